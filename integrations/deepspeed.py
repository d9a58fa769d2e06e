"""DeepSpeed: ``initialize`` that reads a ``"consensus"`` block from the same configuration.

Each worker is a replica on one or several ranks: an ``mpu`` tells DeepSpeed that the data-parallel
group is these ranks alone, so that their engines train by themselves at every ZeRO stage. Rounds
happen around them, after each of their steps, and move the fp32 master weights, each rank those
that it holds; the weights that the model computes with are made from them anew, as the engine does
after a step. A step that the engine skips (an overflow
in fp16) counts too: the other workers do not know of it, and are in the round (contract C4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from consensus_opt.buffers import Buffers
from consensus_opt.integrations import deepspeed_config as configuration
from consensus_opt.integrations.deepspeed_engine import (
    Masters,
    Replica,
    keep_checkpoints,
    lent,
    scale_loss,
    share_data,
)
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer
from consensus_opt.telemetry import JsonLines
from consensus_opt.transport import Transport

_ATTRIBUTE = "_consensus_opt"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine as ``deepspeed.initialize`` does: one of several that average parameters.

    The arguments are those of ``deepspeed.initialize``; the configuration has one block more::

        "consensus": {"method": "dppf", "alpha": 0.1, "lam": 0.5, "period": 4, "total_steps": 9000}

    ``"method"`` names a recipe, whose arguments are further keys; so are ``"replica_size"``, the
    number of ranks that hold one model (see ``deepspeed_config.replica_size``), ``"total_steps"``,
    ``"timeout"``, ``"broadcast"`` and ``"telemetry"`` (the path of a file of JSON lines, which rank
    0 writes, or a callable). ``"train_batch_size"`` is the batch of all workers, and
    ``training_data`` is shared out among them. Checkpoints hold the state of consensus; each worker
    has its own, in ``save_dir/replica_M``. Without ``"gradient_clipping"`` DeepSpeed clips each
    worker's gradients at norm 1. A collective call.

    Returns:
        The engine, its optimizer, data loader and scheduler, as ``deepspeed.initialize`` returns
        them. What belongs to consensus is in ``consensus_of(engine)``.

    Raises:
        ImportError: If DeepSpeed is not installed.
        ValueError: If the arguments or the configuration ask for what cannot work here.
        RankMismatchError: On every rank, if ranks differ in method or parameters.
    """
    deepspeed = _import()
    config = _config(deepspeed, args, config_params if config is None else config)
    method, options = configuration.consensus(config)
    configuration.check_model(model, mpu, mesh_param)
    configuration.check_optimizer(optimizer, lr_scheduler, config)
    deepspeed.init_distributed(
        dist_backend=deepspeed.get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    world = dist.get_world_size()
    size = configuration.replica_size(config, options.pop("replica_size", None), world)
    engine_config = configuration.engine_config(config, world // size, optimizer)
    replica = Replica(size)
    with replica.in_charge(), lent(args, deepspeed_config=None):
        engine = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=replica,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=engine_config,
        )[0]
    replica.keep(engine, "backward", "step", "save_checkpoint", "load_checkpoint")
    timeout = options.pop("timeout", 300.0)
    transport, shards = replica.transports(engine.zero_optimization(), timeout)
    consensus = EngineOptimizer(engine, method, transport, shards, **options)
    setattr(engine, _ATTRIBUTE, consensus)
    engine.step = consensus.step
    keep_checkpoints(engine, consensus)
    scale_loss(engine)
    share_data(engine)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def consensus_of(engine: Any) -> EngineOptimizer:
    """Return the ConsensusOptimizer of an engine that ``initialize`` made.

    ``with consensus_of(engine).averaged():`` evaluates the mean model, at every ZeRO stage.

    Raises:
        TypeError: If the engine is another one.
    """
    found = vars(engine).get(_ATTRIBUTE) if hasattr(engine, "__dict__") else None
    if not isinstance(found, EngineOptimizer):
        raise TypeError(
            f"{type(engine).__name__} has no consensus; pass the engine that "
            "consensus_opt.integrations.deepspeed.initialize(...) returned"
        )
    return found


class EngineOptimizer(ConsensusOptimizer):
    """The ConsensusOptimizer of a DeepSpeed engine, over the engine's master weights.

    Its ``step()`` is ``engine.step()``. Its state dict holds the state of consensus alone, because
    the engine saves its optimizer itself. ``initialize`` makes it.
    """

    def __init__(
        self,
        engine: Any,
        method: Method,
        transport: Transport,
        shards: Transport | None = None,
        telemetry: Any = None,
        **options: Any,
    ) -> None:
        wants_norm = method.control.uses_gradients
        if wants_norm and engine.zero_optimization():
            _check_norm(engine)
        self._masters = Masters(engine, wants_norm)
        self._masters.clear_padding()
        self._views = not engine.zero_optimization()  # ZeRO looks into the masters' memory
        if isinstance(telemetry, str):
            telemetry = JsonLines(telemetry) if dist.get_rank() == 0 else None
        inner: Any = self._masters
        super().__init__(
            inner,
            method,
            model=engine.module,
            transport=transport,
            shards=shards,
            telemetry=telemetry,
            **options,
        )
        self._masters.refresh()

    @property
    def step_applied(self) -> bool:
        """Whether the last step changed parameters: False after an overflow."""
        return bool(self._masters.engine.was_step_applied())

    def _gradient_norm(self) -> float | None:
        return self._masters.gradient_norm

    def _communicate(self, *scale: Any) -> None:
        masters = self._masters
        if not (masters.steps_next if self.method.mix_first else masters.stepped):
            return  # gradients accumulate
        rounds = self.rounds
        super()._communicate(*scale)
        if self.rounds > rounds:
            self._masters.refresh()

    @contextmanager
    def averaged(self, buffers: Buffers = "average") -> Iterator[None]:
        """Put the mean model in place for the engine, and restore every bit; collective."""
        try:
            with super().averaged(buffers):
                yield
        finally:
            self._masters.refresh()

    def _recompute(self, buffers: Buffers) -> None:
        self._masters.refresh()
        super()._recompute(buffers)

    def _announce(self) -> None:
        if self._masters.steps_next:
            super()._announce()

    def _outlast(self) -> None:
        super()._outlast()
        self._masters.refresh()

    def _lr(self) -> float:
        return super()._lr() if self.method.mix_first else self._masters.lr

    def _everything(self) -> list[Tensor]:
        masters = super()._everything()
        known = {id(tensor) for tensor in masters}
        weights = [getattr(p, "ds_tensor", p) for p in self._masters.engine.module.parameters()]
        return [*masters, *(weight for weight in weights if id(weight) not in known)]


def _import() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            "consensus_opt.integrations.deepspeed needs DeepSpeed, which is not installed; write "
            "DS_BUILD_OPS=0 pip install --no-build-isolation 'consensus-opt[deepspeed]'"
        ) from error
    return deepspeed


def _config(deepspeed: Any, args: Any, config: Any) -> dict[str, Any]:
    """Return the configuration, which may be a dict or a file, and stand in ``args``."""
    in_args = getattr(args, "deepspeed_config", None)
    if (config is None) == (in_args is None):
        raise ValueError(
            f"the configuration is {config!r} as config=, {in_args!r} in args.deepspeed_config; "
            "give it in one of the two, as a dict or as the path of a JSON file"
        )
    given = in_args if config is None else config
    read: dict[str, Any] = deepspeed.load_ds_config(
        given if isinstance(given, dict) else str(given)
    )
    return read


def _check_norm(engine: Any) -> None:
    if not engine._config.zero_config.compute_grad_norm:
        raise ValueError(
            "'zero_optimization.compute_grad_norm' is false, and the target of the distance "
            "follows the gradients' norm; write true, or a number as the target, for example "
            '"target": 0.5'
        )
