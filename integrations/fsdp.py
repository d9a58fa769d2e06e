"""FSDP2: ``fully_shard`` inside a replica, consensus between replicas.

::

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replica", "shard"))
    fully_shard(model, mesh=mesh["shard"])          # gradients stay inside the replica
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = fsdp.consensus(model, optimizer, dppf(period=4), mesh)

Each rank exchanges the pieces that it holds, the local tensors of the parameters, with the ranks
that hold the same pieces of the other replicas. FSDP keeps views of their memory, so that they stay
where they are and are packed for a round. Whatever a round or ``averaged()`` changes, parameters
that were gathered before it are dropped.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from consensus_opt.buffers import Buffers
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.methods import Method
from consensus_opt.optimizer import KEY, ConsensusOptimizer
from consensus_opt.transport import Transport

_FOLDER = "replica_{}"


class FSDPOptimizer(ConsensusOptimizer):
    """The ConsensusOptimizer of a model that ``fully_shard`` has split; see :func:`consensus`."""

    _views = False

    @contextmanager
    def averaged(self, buffers: Buffers = "average") -> Iterator[None]:
        """Put the mean model in place, and restore every bit of this worker's own; collective."""
        try:
            with super().averaged(buffers):
                yield
        finally:
            self._reshard()

    def _recompute(self, buffers: Buffers) -> None:
        self._reshard()
        super()._recompute(buffers)

    def consensus_distances(self) -> dict[str, float]:
        """Return Xi of each parameter by its name in the model, exactly; a collective call."""
        self._reshard()  # names are those of the pieces
        return super().consensus_distances()

    def _communicate(self, *scale: Any) -> None:
        rounds = self.rounds
        super()._communicate(*scale)
        if self.rounds > rounds:
            self._reshard()

    def _reshard(self) -> None:
        """Drop gathered parameters, which are not those of the pieces any more."""
        for module in self._model.modules() if self._model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()


def consensus(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    mesh: DeviceMesh,
    *,
    replicate: str = "replica",
    shard: str = "shard",
    timeout: float = 300.0,
    **options: Any,
) -> FSDPOptimizer:
    """Wrap the optimizer of a sharded model; a collective call.

    Args:
        model: The module, after ``fully_shard(model, mesh=mesh[shard])``.
        optimizer: Any optimizer over its parameters, made after that.
        method: What to do, for example ``dppf()``.
        mesh: The device mesh of all ranks, with two named dimensions.
        replicate: Its dimension along which replicas differ.
        shard: Its dimension along which a replica is sharded.
        timeout: Seconds to wait for a peer.
        options: Further arguments of :class:`~consensus_opt.ConsensusOptimizer`.

    Raises:
        ValueError: If the mesh lacks a dimension, or parameters are not sharded along ``shard``.
        RankMismatchError: On every rank, if ranks differ in method or parameters.
    """
    names = mesh.mesh_dim_names or ()
    if len(names) != 2 or {*names} != {replicate, shard}:
        raise ValueError(
            f"the mesh has the dimensions {names}, and needs {replicate!r} and {shard!r}; write "
            "init_device_mesh('cuda', (nodes, gpus), mesh_dim_names=('replica', 'shard')), or name "
            "its dimensions with replicate= and shard="
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check(parameter, mesh[shard], shard)
    across = TorchTransport(mesh[replicate].get_group(), timeout)
    inside = TorchTransport(mesh[shard].get_group(), timeout)
    return FSDPOptimizer(
        optimizer, method, model=model, transport=across, shards=inside, timeout=timeout, **options
    )


def save(folder: str | Path, model: nn.Module, optimizer: FSDPOptimizer) -> Path:
    """Save model, optimizer and consensus with ``torch.distributed.checkpoint``; collective.

    Each replica has a folder of its own, ``FOLDER/replica_R``, because replicas differ between
    rounds. To ship one model, save it inside ``with optimizer.averaged():``.

    Returns:
        The folder of this replica.
    """
    place = Path(folder, _FOLDER.format(optimizer.transport.rank))
    states, parameters = get_state_dict(model, optimizer.inner)
    blob = io.BytesIO()
    torch.save(optimizer.state_dict()[KEY], blob)
    state = {
        "model": states,
        "optimizer": parameters,
        f"{KEY}_{optimizer.shards.rank}": blob.getvalue(),
    }
    save_state(state, checkpoint_id=place, process_group=_group(optimizer.shards))
    return place


def load(folder: str | Path, model: nn.Module, optimizer: FSDPOptimizer) -> None:
    """Load what :func:`save` saved; collective.

    With as many replicas, of as many pieces, training continues with the same bits. Where fewer
    replicas were saved, replica m loads number m modulo them; a replica of other pieces is put
    together anew.

    Raises:
        FileNotFoundError: If there is no such state.
    """
    saved = len(list(Path(folder).glob(_FOLDER.format("*") + "/.metadata")))
    if not saved:
        raise FileNotFoundError(
            f"{folder} holds no {_FOLDER.format(0)}; give the folder that was given to "
            "consensus_opt.integrations.fsdp.save, on a disk that every rank sees"
        )
    place = Path(folder, _FOLDER.format(optimizer.transport.rank % saved))
    keys = FileSystemReader(place).read_metadata().state_dict_metadata
    pieces = sum(key.startswith(f"{KEY}_") for key in keys)
    own = f"{KEY}_{optimizer.shards.rank % pieces}"
    states, parameters = get_state_dict(model, optimizer.inner)
    state: dict[str, Any] = {"model": states, "optimizer": parameters, own: b""}
    load_state(state, checkpoint_id=place, process_group=_group(optimizer.shards))
    set_state_dict(
        model,
        optimizer.inner,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    kept = {**optimizer.inner.state_dict(), KEY: torch.load(io.BytesIO(state[own]))}
    optimizer.load_state_dict(kept)


def _group(transport: Transport) -> dist.ProcessGroup | None:
    assert isinstance(transport, TorchTransport)
    group: dist.ProcessGroup | None = transport.group
    return group


def _check(parameter: Tensor, mesh: DeviceMesh, shard: str) -> None:
    """Raise ``ValueError`` for a parameter that is not split over just the ranks of ``mesh``."""
    ranks = dist.get_process_group_ranks(mesh.get_group())
    if not isinstance(parameter, DTensor):
        given = "is not sharded"
    elif parameter.device_mesh.mesh.flatten().tolist() != ranks:
        lies = parameter.device_mesh.mesh.flatten().tolist()
        given = f"lies on the ranks {lies} and not on those of this replica, {ranks}"
    elif not isinstance(parameter.placements[0], Shard):
        given = f"is placed as {parameter.placements}"
    else:
        return
    raise ValueError(
        f"a parameter of shape {tuple(parameter.shape)} {given}; consensus between replicas takes "
        f"parameters that are sharded along {shard!r} alone; write fully_shard(model, "
        f"mesh=mesh[{shard!r}]), without ignored_params, and make the optimizer after it"
    )
