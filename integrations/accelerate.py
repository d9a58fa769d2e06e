"""Hugging Face Accelerate: an ``Accelerator`` whose workers average parameters, not gradients.

What a user changes is the first line of a script::

    accelerator = Accelerator(method=dppf(period=4))     # of this module

``prepare`` then leaves models without DDP, and wraps optimizers in ConsensusOptimizer. With
``accelerator.averaged():`` evaluates the mean model, and is where ``save_model`` belongs.
``save_state`` writes the mean model and each worker's own state; call all three on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from consensus_opt.integrations import workers
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "consensus_opt.integrations.accelerate needs Accelerate; write pip install "
        "'consensus-opt[huggingface]'"
    ) from error

REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` for workers that take local steps.

    Args:
        *args: Accelerate's own.
        method: What ``prepare`` gives to each optimizer that is no ConsensusOptimizer yet.
        consensus: Further arguments of ConsensusOptimizer, such as ``{"total_steps": 1000}``.
        **kwargs: Accelerate's own.

    Raises:
        ValueError: If the configuration asks for FSDP, DeepSpeed or Megatron-LM.
    """

    method: Method
    consensus: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        method: Method,
        consensus: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        Accelerator.adopt(self, method, consensus)

    @staticmethod
    def adopt(other: Any, method: Method, consensus: Mapping[str, Any] | None = None) -> None:
        """Turn an Accelerator that somebody else made into one of this class."""
        if other.distributed_type not in [DistributedType[kind] for kind in REPLICATED]:
            raise ValueError(
                f"distributed_type is {other.distributed_type}, and workers with whole replicas "
                f"need one of {REPLICATED}; leave fsdp_plugin and deepspeed_plugin out (for "
                "DeepSpeed use consensus_opt.integrations.deepspeed.initialize)"
            )
        other.__class__ = Accelerator
        other.method, other.consensus, other._offered = method, dict(consensus or {}), []

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does; models stay without DDP."""
        self._offered = [each for each in args if isinstance(each, nn.Module)]
        if self.device_placement and device_placement is None:
            for model in self._offered:  # before an optimizer sends its parameters
                model.to(self.device)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True
    ) -> Any:
        """Prepare a model whose gradients stay local."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer in ConsensusOptimizer, and that as Accelerate does."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(optimizer, ConsensusOptimizer):
            model = self._model_of(optimizer)
            optimizer = ConsensusOptimizer(optimizer, self.method, model=model, **self.consensus)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _Prepared
        return prepared

    def _model_of(self, optimizer: Any) -> nn.Module | None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = (*self._offered, *self._models)
        return next((m for m in models if any(id(p) in held for p in m.parameters())), None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean model in place of each worker's own for a while; collective."""
        with ExitStack() as stack:
            for prepared in self._optimizers:
                stack.enter_context(prepared.optimizer.averaged())
            yield

    def synchronize(self) -> None:
        """Make all workers equal to their mean; collective."""
        for prepared in self._optimizers:
            prepared.optimizer.synchronize()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save the mean model as Accelerate does, and beside it each worker's own; collective."""
        with self.averaged():
            folder = super().save_state(output_dir, *args, **kwargs)
        self.save_workers(folder)
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what ``save_state`` saved."""
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        self.load_workers(folders[0])

    def save_workers(self, folder: Any) -> None:
        """Save this worker's own models, optimizers and scaler."""
        if self._optimizers:
            workers.save(folder, self._optimizers[0].optimizer.transport, self._parts())

    def load_workers(self, folder: Any) -> bool:
        """Load what this worker saved; False where another number of workers saved."""
        if not self._optimizers:
            return False
        return workers.load(folder, self._optimizers[0].optimizer.transport, self._parts())

    def _parts(self) -> dict[str, workers.Stateful]:
        parts = {f"model {i}": self.unwrap_model(model) for i, model in enumerate(self._models)}
        parts |= {f"optimizer {i}": each.optimizer for i, each in enumerate(self._optimizers)}
        return parts if self.scaler is None else {**parts, "scaler": self.scaler}


class _Prepared(AcceleratedOptimizer):
    """Tells Accelerate of steps that overflowed, although step() was called; can be pickled."""

    @property
    def step_was_skipped(self) -> bool:
        return not self.optimizer.step_applied

    def __getstate__(self) -> dict[str, Any]:
        # Accelerate's own state refers to loaders, and a scheduler's patch of step() to itself.
        left_out = ("accelerator_state", "gradient_state", "step")
        return {k: v for k, v in super().__getstate__().items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.accelerator_state, self.gradient_state = AcceleratorState(), GradientState()
        super().__setstate__(state)
