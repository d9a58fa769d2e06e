"""What DeepSpeed's engine needs to be one worker among several.

An ``mpu`` keeps it to its own ranks, its master weights are found wherever a ZeRO stage has them,
its data are this worker's share, and its checkpoint goes to a folder of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from consensus_opt.hierarchy import HierarchicalTransport
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.optimizer import KEY, ConsensusOptimizer
from consensus_opt.transport import Transport

_FOLDER = "replica_{}"


class Replica:
    """The ``mpu`` of one worker: its data-parallel group is the ranks that hold its replica.

    ZeRO shards the replica among them and never crosses it. DeepSpeed looks for the ``mpu`` in a
    variable of the process, where other engines would find it too: it is there only while calls of
    this engine run. Making one is a collective call.

    Args:
        size: Number of ranks of a replica; they follow each other.
    """

    def __init__(self, size: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        first, piece = rank - rank % size, rank % size
        self._ranks = list(range(first, first + size))
        self._group = _new_group(self._ranks)
        self._alone = self._group if size == 1 else _new_group([rank])
        self._across = _new_group(list(range(piece, world, size)))

    def transports(self, sharded: bool, timeout: float) -> tuple[Transport, Transport | None]:
        """Return the way to the other replicas, and to the other pieces of this one if sharded.

        A replica of which every rank holds all is a node whose ranks share the messages.
        """
        across = TorchTransport(self._across, timeout)
        if len(self._ranks) == 1:
            return across, None
        inside = TorchTransport(self._group, timeout)
        return (across, inside) if sharded else (HierarchicalTransport(inside, across), None)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Be the ``mpu`` of the process for a while."""
        from deepspeed.utils import groups

        with lent(groups, mpu=self):
            yield

    def keep(self, engine: Any, *names: str) -> None:
        """Be in charge whenever one of these methods of the engine runs."""
        for name in names:
            setattr(engine, name, self._in_charge_of(getattr(engine, name)))

    def _in_charge_of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.in_charge():
                return method(*args, **kwargs)

        return call

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._ranks

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_data_parallel_world_size(self) -> int:
        return len(self._ranks)

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


class Masters:
    """The engine as ConsensusOptimizer sees it: an optimizer over the master weights.

    Attributes:
        engine: The engine.
        stepped: Whether the last ``step()`` ended an accumulation of gradients.
        lr: Learning rate of that step; the engine's scheduler has moved on since.
        gradient_norm: Norm of that step's gradients before clipping, where it is wanted; infinite
            after an overflow.
    """

    def __init__(self, engine: Any, wants_norm: bool = False) -> None:
        self.engine, self.stepped = engine, False
        self.gradient_norm: float | None = None
        self._wants_norm = wants_norm
        self._step = engine.step
        self._beside: dict[str, Any] = {}  # one dict, for a scheduler writes to it and reads it
        self.lr = self._current_lr()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the engine's optimizer; stage 3 keeps the masters beside them."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        if not self._is_stage_3():
            return groups
        masters = list(self.engine.optimizer.fp32_partitioned_groups_flat)
        self._beside.update(params=masters, lr=groups[0]["lr"])
        return [*groups, self._beside]

    @property
    def state(self) -> Any:
        """The state of the engine's optimizer."""
        return self.engine.optimizer.state

    @property
    def steps_next(self) -> bool:
        """Whether the next ``step()`` will end an accumulation of gradients."""
        managed = self.engine.managed_gradient_accumulation()
        return not managed or bool(self.engine.is_gradient_accumulation_boundary())

    def step(self, lr_kwargs: Any = None) -> None:
        """Take the engine's step, which may skip the update or only accumulate."""
        self.stepped, self.lr = self.steps_next, self._current_lr()
        measured = self._wants_norm and self.stepped
        norm_of = self._norm_before() if measured else None
        self._step(lr_kwargs)
        self.gradient_norm = None if norm_of is None else norm_of()

    def zero_grad(self) -> None:
        """Do nothing: the engine clears gradients itself, where their accumulation ends."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine saves its optimizer itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set to zero what lies after the last value of a parameter on the last rank of stage 3.

        It is whatever was in memory, and would be in norms and distances.
        """
        optimizer = self.engine.optimizer
        if not self._is_stage_3():
            return
        rank = dist.get_rank(optimizer.dp_process_group)
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for weights, flat in groups:
            end = 0
            for weight in weights:
                size = weight.ds_tensor.numel()
                held = min(size, max(0, weight.ds_numel - rank * size))
                flat[end + held : end + size].zero_()
                weight.ds_tensor.data.view(-1)[held:].zero_()
                end += size
            flat[end:].zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the weights that the model computes with from the masters."""
        optimizer = self.engine.optimizer
        if self._is_stage_3():
            optimizer.checkpoint_event_prologue()  # releases what is gathered
            for piece in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(piece)
            optimizer.checkpoint_event_epilogue()  # gathers what always is
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp16_groups"):
            groups = zip(optimizer.fp16_groups, optimizer.param_groups, strict=True)
            for weights, group in groups:
                _copy(group["params"], weights)

    def _norm_before(self) -> Callable[[], float]:
        """Return what tells the norm of this step's gradients after the step.

        ZeRO and 16-bit optimizers compute it, but the one that keeps each weight's master by itself
        in fp16 does not take the scale out, which the step may change. A plain optimizer computes
        none, and its gradients are cleared in the step.
        """
        optimizer = self.engine.optimizer
        if not hasattr(optimizer, "_global_grad_norm"):
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            return lambda: norm
        scaled = type(optimizer).__name__ == "FP16_UnfusedOptimizer"
        scale = float(optimizer.loss_scale) if scaled else 1.0
        return lambda: float(optimizer._global_grad_norm) / scale

    def _current_lr(self) -> float:
        return float(self.engine.optimizer.param_groups[0].get("lr", 0.0))

    def _is_stage_3(self) -> bool:
        return int(self.engine.zero_optimization_stage()) == 3


def scale_loss(engine: Any) -> None:
    """Scale the loss in fp16 at stage 0, which ``backward`` of DeepSpeed 0.19.8 forgets.

    Its optimizer divides the gradients by the scale all the same, and training stands still (pull
    request 8393 of DeepSpeed). The gradient of the loss is set, not multiplied: where ``backward``
    scales, nothing changes.
    """
    if not engine.fp16_enabled() or engine.zero_optimization():
        return
    backward = engine.backward

    @functools.wraps(backward)
    def scaled(loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        parts = engine.gradient_accumulation_steps() if scale_wrt_gas else 1
        scale = engine.optimizer.loss_scale / parts
        register: Any = loss.register_hook
        handle = register(lambda gradient: torch.full_like(gradient, scale))
        try:
            return backward(loss, retain_graph, scale_wrt_gas)
        finally:
            handle.remove()

    engine.backward = scaled


def _new_group(ranks: list[int]) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True)


def share_data(engine: Any) -> None:
    """Let ``deepspeed_io`` give this rank its share; with this ``mpu`` it would be a replica's."""
    make = engine.deepspeed_io

    @functools.wraps(make)
    def deepspeed_io(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(make).bind(*args, **kwargs)
        if given.arguments.get("data_sampler") is None:
            given.arguments["data_sampler"] = DistributedSampler(
                given.arguments["dataset"],
                num_replicas=dist.get_world_size(),
                rank=dist.get_rank(),
                shuffle=given.arguments.get("route", "train") == "train",
            )
        return make(*given.args, **given.kwargs)

    engine.deepspeed_io = deepspeed_io


def keep_checkpoints(engine: Any, consensus: ConsensusOptimizer) -> None:
    """Let the engine save and load the state of consensus, in a folder for each worker."""
    engine.save_checkpoint = functools.partial(_save, engine, engine.save_checkpoint, consensus)
    engine.load_checkpoint = functools.partial(_load, engine.load_checkpoint, consensus)


def _save(
    engine: Any,
    save: Callable[..., Any],
    consensus: ConsensusOptimizer,
    save_dir: str,
    tag: Any = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Any:
    """Save ``save_dir/replica_M/TAG``: workers differ between rounds, so each saves its own."""
    client_state = client_state or {}
    if KEY in client_state:
        raise ValueError(
            f"client_state has the key {KEY!r}, under which the state of consensus is saved; name "
            "it otherwise, for example 'my_consensus'"
        )
    folder = Path(save_dir, _FOLDER.format(consensus.transport.rank))
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    state = {**client_state, **consensus.state_dict()}
    done = save(str(folder), tag, state, save_latest, exclude_frozen_parameters)
    if save_latest:
        (folder / "latest").write_text(tag)
    return done


def _load(
    load: Callable[..., Any],
    consensus: ConsensusOptimizer,
    load_dir: str,
    tag: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Load what this worker saved; where fewer workers did, worker m loads number m modulo them.

    What DeepSpeed saved without consensus is loaded too, the same on all workers.
    """
    latest = Path(load_dir, _FOLDER.format(0), "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    saved = len(list(Path(load_dir).glob(_FOLDER.format(f"*/{tag}"))))
    own = _FOLDER.format(consensus.transport.rank % saved) if saved else ""
    path, client_state = load(str(Path(load_dir, own)), tag, *args, **kwargs)
    given = inspect.signature(load).bind(load_dir, tag, *args, **kwargs).arguments
    if path is not None and not given.get("load_module_only", False):
        consensus.load_state_dict({KEY: client_state.pop(KEY)} if KEY in client_state else {})
    return path, client_state


def _copy(masters: list[Tensor], weights: list[Tensor]) -> None:
    """Copy masters, one for each weight or one flat tensor for all, to the weights."""
    if len(masters) < len(weights):
        masters = list(torch.split(masters[0], [weight.numel() for weight in weights]))
    for master, weight in zip(masters, weights, strict=True):
        weight.copy_(master.view(weight.shape))


@contextmanager
def lent(target: Any, **attributes: Any) -> Iterator[None]:
    """Set those of the attributes that the target has, for a while."""
    before = {name: getattr(target, name) for name in attributes if hasattr(target, name)}
    for name in before:
        setattr(target, name, attributes[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
