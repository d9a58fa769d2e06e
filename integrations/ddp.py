"""DistributedDataParallel whose gradients stay on their worker, for who is handed a wrapped model.

DDP averages gradients over all its ranks, so that replicas never part and there is nothing left to
average. Leave DDP away, or, where a framework has wrapped the model already, turn that off::

    local_gradients(ddp_model)              # a worker is a rank
    node_gradients(ddp_model, node_group)   # a worker is a node, whose ranks average gradients

A model that you wrap yourself needs neither: ``DDP(model, process_group=node_group)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def local_gradients(model: DistributedDataParallel) -> DistributedDataParallel:
    """Keep each rank's gradients, undivided, and each rank's buffers; return the same model.

    Call it before the first backward pass, on all ranks.

    Raises:
        TypeError: If the model is not wrapped in DistributedDataParallel.
        RuntimeError: If the model has a communication hook already; DDP takes one.
    """
    return _hook(model, "local_gradients", None, noop_hook)


def node_gradients(
    model: DistributedDataParallel, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """Average gradients over the ranks of ``group`` alone; buffers stay local.

    Ranks of a group start from the same parameters and take the same steps, and so remain one
    worker. Call it before the first backward pass, on all ranks.

    Args:
        model: The wrapped model.
        group: The group of this rank's node. ``torch.distributed.new_subgroups()`` makes one for
            each node.

    Raises:
        TypeError: If the model is not wrapped in DistributedDataParallel.
        ValueError: If this rank is not in the group.
        RuntimeError: If the model has a communication hook already; DDP takes one.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group given; pass the group of this "
            "rank's own node: group, _ = torch.distributed.new_subgroups()"
        )
    return _hook(model, "node_gradients", group, allreduce_hook)


def _hook(
    model: DistributedDataParallel, name: str, state: Any, hook: Callable[..., Any]
) -> DistributedDataParallel:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is {type(model).__name__}, and {name} takes a DistributedDataParallel; a model "
            "that is not wrapped keeps its gradients local anyway: leave this call out"
        )
    model.register_comm_hook(state, hook)
    model.broadcast_buffers = False
    return model
