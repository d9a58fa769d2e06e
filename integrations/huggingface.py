"""Hugging Face Trainer: a ``Trainer`` whose workers average parameters, not gradients.

What a user changes is the class and one argument::

    trainer = ConsensusTrainer(model, args, train_dataset=data, method=dppf(period=4))

Evaluation, prediction and saved models are of the mean model; checkpoints hold each worker's own
state beside it; after ``train()`` all workers are equal to their mean. To add this to another
Trainer: ``class Mine(ConsensusTrainer, Seq2SeqTrainer): pass``.

For language models set ``average_tokens_across_devices=False``: with it, Trainer counts tokens over
all workers, who then wait for each other in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consensus_opt.methods import Method

try:
    from transformers import PreTrainedModel, Trainer

    from consensus_opt.integrations.accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "consensus_opt.integrations.huggingface needs transformers and Accelerate; write pip "
        "install 'consensus-opt[huggingface]'"
    ) from error


class ConsensusTrainer(Trainer):
    """A ``transformers.Trainer`` for workers that take local steps.

    Args:
        *args: Trainer's own.
        method: What the workers do, for example ``dppf(period=4)``.
        consensus: Further arguments of ConsensusOptimizer, such as ``{"telemetry": sink}``;
            ``total_steps`` is Trainer's number of steps unless it is given.
        **kwargs: Trainer's own.
    """

    accelerator: Accelerator

    def __init__(
        self,
        *args: Any,
        method: Method,
        consensus: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._method, self._consensus = method, dict(consensus or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Let Trainer make its Accelerator, and make that one of ours."""
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator, self._method, self._consensus)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create Trainer's optimizer; ``accelerator.prepare`` wraps it."""
        steps = self.state.max_steps
        self.accelerator.consensus = {
            "total_steps": steps if steps > 0 else None,
            **self._consensus,
        }
        return super().create_optimizer(model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and make all workers equal to their mean."""
        output = super().train(*args, **kwargs)
        self.accelerator.synchronize()
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the mean model."""
        with self.accelerator.averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the mean model; collective, rank 0 writes."""
        with self.accelerator.averaged():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_workers(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.accelerator.load_workers(checkpoint):
            return
        if isinstance(self.model, PreTrainedModel):
            # Trainer has loaded the mean by itself, but for weights that transformers renamed.
            mean = type(self.model).from_pretrained(checkpoint)
            self.model.load_state_dict(mean.state_dict())
