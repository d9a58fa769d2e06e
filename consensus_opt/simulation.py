"""n virtual workers in one process, through the optimizer that runs on a cluster.

All workers' parameters are the rows of one ``(n, P)`` parameter; ``torch.func.vmap`` gives the n
gradients at once; a ``ConsensusOptimizer`` over a ``StackedTransport`` does everything else. There
is no second implementation of any method that could drift from the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from consensus_opt.checks import whole
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer
from consensus_opt.telemetry import Sink
from consensus_opt.transport import StackedTransport

Loss = Callable[[Tensor, Tensor], Tensor]
_Gradients = Callable[..., tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]]


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Simulation:
    """Trains ``n`` workers that start from one model.

    Args:
        model: The model; it is left as it is. Its parameters must be of one dtype.
        n: Number of workers.
        method: What the workers do, for example ``gossip_sgd("ring")``.
        optimizer: Makes the inner optimizer from a list of parameters. It must work elementwise
            (SGD, Adam, AdamW, ...): the rows of its one parameter are the workers.
        loss: Maps a worker's outputs and targets to a scalar.
        total_steps: Number of steps that training will take, for schedules.
        telemetry: Called with a ``RoundRecord`` after each round.

    Attributes:
        optimizer: The ``ConsensusOptimizer``; give it to learning-rate schedulers.
        flat: The ``(n, P)`` parameter.

    Raises:
        TypeError: If the model is no module, or ``optimizer`` no function that makes one.
        ValueError: If the model has no trainable parameter, or several dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        n: int,
        method: Method,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _sgd,
        loss: Loss = cross_entropy,
        *,
        total_steps: int | None = None,
        telemetry: Sink | Sequence[Sink] | None = None,
    ) -> None:
        n = whole(n, "n", "Simulation(model, 16, gossip_sgd('ring'))")
        _check_kinds(model, optimizer)
        self.model = copy.deepcopy(model)
        self._trainable = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        _check_dtypes(self._trainable)
        row = torch.cat([p.detach().flatten() for p in self._trainable.values()])
        self._state = _Workers(row, dict(self.model.named_buffers()), n)
        self.n, self.flat = n, self._state.flat
        self.optimizer = ConsensusOptimizer(
            optimizer([self.flat]),
            method,
            model=self._state,
            transport=StackedTransport(n),
            total_steps=total_steps,
            telemetry=telemetry,
        )
        per_worker = grad_and_value(self._loss_of(loss), has_aux=True)
        self._gradients: _Gradients = vmap(per_worker, in_dims=0, randomness="different")

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Let each worker take one step on a batch of its own.

        Args:
            x: Inputs, shape ``(n, batch, ...)``.
            y: Targets, shape ``(n, batch, ...)``.

        Returns:
            The losses of the workers before the step, shape ``(n,)``.
        """
        if len(x) != self.n or len(y) != self.n:
            raise ValueError(
                f"x and y have {len(x)} and {len(y)} rows, and there are {self.n} workers; give "
                "each worker a batch of its own: x of shape (n, batch, ...)"
            )
        self.model.train()
        gradient, (losses, buffers) = self._gradients(self.flat.detach(), self._state.stacked, x, y)
        for name, value in buffers.items():
            self._state.stacked[name].copy_(value)
        self.flat.grad = gradient
        self.optimizer.step()
        return losses.detach()

    def worker(self, m: int) -> nn.Module:
        """Return a copy of worker ``m``'s model."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, value in self._unflatten(self.flat[m]).items():
                model.get_parameter(name).copy_(value)
            for name, value in self._state.stacked.items():
                model.get_buffer(name).copy_(value[m])
        return model

    def mean(self) -> nn.Module:
        """Return the mean model, which is the one to evaluate."""
        with self.optimizer.averaged():
            return self.worker(0)

    def _loss_of(self, loss: Loss) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        def run(row: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
            # One dict, not two: a buffer that the model replaces is written back into it.
            tensors = {**self._unflatten(row), **buffers}
            outputs = functional_call(self.model, tensors, (x,))
            return loss(outputs, y), {name: tensors[name] for name in buffers}

        return run

    def _unflatten(self, row: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(row, [p.numel() for p in self._trainable.values()])
        items = zip(self._trainable.items(), pieces, strict=True)
        return {name: piece.view(p.shape) for (name, p), piece in items}


class _Workers(nn.Module):
    """What differs between workers: parameters as rows, buffers stacked."""

    def __init__(self, row: Tensor, buffers: dict[str, Tensor], n: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(row.repeat(n, 1))
        self.stacked = {
            name: buffer.expand(n, *buffer.shape).clone() for name, buffer in buffers.items()
        }
        for name, buffer in self.stacked.items():
            self.register_buffer(name.replace(".", "/"), buffer)


def _check_kinds(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {model!r}; it must be one torch.nn.Module, the start of all workers; "
            "write Simulation(model, n, method)"
        )
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; it must be a function that makes "
            "one from a list of parameters; write optimizer=lambda p: torch.optim.SGD(p, lr=0.1)"
        )


def _check_dtypes(parameters: dict[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError(
            "the model has no trainable parameters, and a simulation trains at least one; write "
            "model.requires_grad_(True), or give the model layers"
        )
    dtypes = {p.dtype for p in parameters.values()}
    if len(dtypes) != 1:
        raise ValueError(
            f"the model's trainable parameters have the dtypes {sorted(map(str, dtypes))}, and a "
            "simulation needs exactly one; write model.float()"
        )
