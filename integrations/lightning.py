"""Lightning: a strategy whose workers average parameters, not gradients.

What a user changes is the strategy::

    trainer = Trainer(strategy=ConsensusStrategy(dppf(period=4)), devices=4)

Each optimizer of the module is wrapped. Validation and checkpoints are of the mean model; beside
``NAME.ckpt``, the folder ``NAME.ckpt.workers`` holds each worker's own state; after ``fit()`` all
workers are equal to their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from consensus_opt.integrations import workers
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer

try:
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "consensus_opt.integrations.lightning needs Lightning; write pip install "
        "'consensus-opt[lightning]'"
    ) from error


class ConsensusStrategy(DDPStrategy):
    """A ``DDPStrategy`` for workers that take local steps; models stay without DDP.

    Args:
        method: What the workers do, for example ``dppf(period=4)``.
        consensus: Further arguments of ConsensusOptimizer; ``total_steps`` is the Trainer's number
            of steps unless it is given.
        **kwargs: DDPStrategy's own.
    """

    optimizers: Any
    lightning_module: Any

    def __init__(
        self, method: Method, consensus: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._method, self._consensus = method, dict(consensus or {})
        self._evaluation = ExitStack()
        self._loaded_from: Any = None

    def configure_ddp(self) -> None:
        """Leave the model as it is, with local gradients."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Wrap the module's optimizers."""
        super().setup_optimizers(trainer)
        steps = trainer.estimated_stepping_batches
        known = {"total_steps": int(steps)} if 0 < steps < math.inf else {}
        options = {"model": self.lightning_module, **known, **self._consensus}
        self.optimizers = [
            each
            if isinstance(each, ConsensusOptimizer)
            else ConsensusOptimizer(each, self._method, **options)
            for each in self.optimizers
        ]

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin; automatic mixed precision is one that knows this optimizer."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if type(plugin) is MixedPrecision:
            plugin = LocalMixedPrecision(plugin.precision, plugin.device, plugin.scaler)
        self._precision_plugin = plugin

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean model in place of each worker's own for a while; collective."""
        with ExitStack() as stack:
            for each in self._wrapped():
                stack.enter_context(each.averaged())
            yield

    def _wrapped(self) -> list[ConsensusOptimizer]:
        return [each for each in self.optimizers if isinstance(each, ConsensusOptimizer)]

    def on_validation_start(self) -> None:
        """Validate the mean model."""
        self._evaluation.enter_context(self.averaged())

    def on_validation_end(self) -> None:
        """Go on with this worker's own model."""
        self._evaluation.close()

    def on_train_end(self) -> None:
        """Make all workers equal to their mean."""
        super().on_train_end()
        for each in self._wrapped():
            each.synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the mean model; collective, as Lightning calls it on all ranks."""
        self._evaluation.close()  # a checkpoint at the end of validation has each worker's own too
        with self.averaged():
            state = super().lightning_module_state_dict()
            return {key: value.clone() for key, value in state.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the checkpoint on rank 0, and on each rank what is its own."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint and self._wrapped():
            own = {
                "state_dict": super().lightning_module_state_dict(),
                "optimizer_states": [each.state_dict() for each in self.optimizers],
                "precision": self.precision_plugin.state_dict(),
            }
            self.checkpoint_io.save_checkpoint(own, self._own_place(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint, and remember which one it is."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this worker's own optimizers and model, or worker 0's and the mean."""
        super().load_optimizer_state_dict(checkpoint)
        if not self._wrapped():
            return
        place = self._own_place(self._loaded_from)
        try:
            own = self.checkpoint_io.load_checkpoint(place, weights_only=True)
        except FileNotFoundError:
            workers.warn(place)
            return
        super().load_optimizer_state_dict(own)
        self.lightning_module.load_state_dict(own["state_dict"])
        self.precision_plugin.load_state_dict(own["precision"])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with all workers' own."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(f"{filepath}.workers")

    def _own_place(self, filepath: Any) -> str:
        return f"{filepath}.workers/{workers.name(self._wrapped()[0].transport)}"


class LocalMixedPrecision(MixedPrecision):
    """Mixed precision with a GradScaler that lets a wrapped optimizer clip.

    Lightning takes an optimizer that understands GradScaler for a fused one, which cannot clip.
    """

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        skipped = closure() is None and model.automatic_optimization
        if not skipped:
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if skipped:  # training_step returned None; one worker alone may
            return optimizer.step(**kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip gradients, which are unscaled by now."""
        Precision.clip_gradients(self, optimizer, *args, **kwargs)
