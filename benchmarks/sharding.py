"""Replicas of several ranks, as users write them: fully_shard, or nodes with DDP inside."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from consensus_opt import ConsensusOptimizer, Method
from consensus_opt.hierarchy import HierarchicalTransport
from consensus_opt.integrations import fsdp
from consensus_opt.integrations.torch_distributed import TorchTransport

SHARDINGS = ("zero1", "zero2", "zero3", "fsdp2", "node")


def fully_sharded(
    model: nn.Module, optimizer: Optimizer, method: Method, options: Namespace, **more: Any
) -> tuple[nn.Module, ConsensusOptimizer]:
    """Split the model inside each replica; the optimizer steps the pieces from now on."""
    size = options.replica_size
    shape = (dist.get_world_size() // size, size)
    mesh = init_device_mesh(options.device, shape, mesh_dim_names=("replica", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    (group,) = optimizer.param_groups
    group["params"] = list(model.parameters())
    return model, fsdp.consensus(model, optimizer, method, mesh, **more)


def nodes(
    model: nn.Module, optimizer: Optimizer, method: Method, options: Namespace, **more: Any
) -> tuple[nn.Module, ConsensusOptimizer]:
    """Average gradients inside each node, and share out the messages between nodes."""
    size, world = options.replica_size, dist.get_world_size()
    node = _own([range(first, first + size) for first in range(0, world, size)])
    counterparts = _own([range(piece, world, size) for piece in range(size)])
    transport = HierarchicalTransport(
        inside=TorchTransport(node), across=TorchTransport(counterparts)
    )
    network = DistributedDataParallel(model, process_group=node)
    return network, ConsensusOptimizer(optimizer, method, model=model, transport=transport, **more)


def _own(groups: Sequence[Sequence[int]]) -> Any:
    """Make all these process groups, and return the one that this rank is in."""
    made = [(dist.new_group(list(ranks)), ranks) for ranks in groups]
    return next(group for group, ranks in made if dist.get_rank() in ranks)
