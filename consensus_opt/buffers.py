"""What the mean model has for buffers, above all BatchNorm statistics.

In training, buffers are each worker's own: nothing in a training step reads BatchNorm's running
statistics. The mean model needs some. The *average* over the workers is free, and close where
their weights are close; *recomputed* ones are those of the mean model itself. Integer buffers
(``num_batches_tracked``) are counters, and never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

from consensus_opt.together import together
from consensus_opt.transport import Transport


@dataclass(frozen=True)
class Recompute:
    """BatchNorm statistics of the mean model, from one pass over data on all workers.

    Each worker runs its own batches through the model in training mode, without gradients; the
    statistics are then averaged over all batches of all workers, so that every worker has the same,
    also where numbers of batches differ. ``torch.optim.swa_utils.update_bn`` does the pass.

    Args:
        batches: This worker's batches, for example its training loader: inputs, or tuples that
            start with the inputs.
        device: Where inputs are sent before the model takes them; None leaves them where they are.
    """

    batches: Iterable[Any]
    device: torch.device | str | None = None

    def run(self, model: nn.Module, transport: Transport) -> None:
        """Replace the statistics; counters, modes and momenta of the layers stay as they are.

        Raises:
            RuntimeError: On every rank, if one of them failed; with the statistics as before.
            ValueError: On every rank, if there was no batch on any.
        """
        model = model.module if isinstance(model, DistributedDataParallel) else model
        layers = _layers(model)
        kept = [(b, b.clone()) for layer in layers for b in layer.buffers(recurse=False)]
        done = False
        try:
            with together(transport, "recompute BatchNorm statistics"):
                counts = self._pass(model, layers)
            with torch.no_grad():
                _average(layers, counts, transport)
            done = True
        finally:
            with torch.no_grad():
                for buffer, copy in kept:
                    if not done or not buffer.is_floating_point():
                        buffer.copy_(copy)

    @torch.no_grad()
    def _pass(self, model: nn.Module, layers: list[_BatchNorm]) -> list[float]:
        """Run the batches; return how many each layer has seen."""
        modes = [(module, module.training) for module in model.modules()]
        momenta = [(layer, layer.momentum) for layer in layers]
        try:
            update_bn(self.batches, model, self.device)  # type: ignore[arg-type]
            return [float(_counter(layer)) for layer in layers]
        finally:
            for module, training in modes:
                module.training = training
            for layer, momentum in momenta:
                layer.momentum = momentum


Buffers: TypeAlias = str | Recompute
"""``"average"``, ``"local"``, or ``Recompute(batches)``."""


_POLICIES = ("", "buffers='local'", "buffers=Recompute(...)")


def calls(call: str) -> list[str]:
    """Name a collective call with each policy; ranks that differ in it are in different calls."""
    return [f"{call}({policy})" for policy in _POLICIES]


def averaged_buffers(call: str, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return which buffers the call averages."""
    return () if call.endswith(f"({_POLICIES[1]})") else buffers


def name_call(call: str, buffers: Any, model: nn.Module | None) -> str:
    """Return the call with this policy, as in :func:`calls`.

    Raises:
        ValueError: If there is no such policy, or no BatchNorm layer to recompute.
    """
    if isinstance(buffers, Recompute):
        if model is None or not _layers(model):
            raise ValueError(
                "buffers is Recompute(...), which needs BatchNorm layers with running statistics, "
                f"and {'model is None' if model is None else 'the model has none'}; write "
                "ConsensusOptimizer(..., model=model), or leave buffers out"
            )
        return calls(call)[2]
    if buffers not in ("average", "local"):
        raise ValueError(
            f"buffers is {buffers!r}; it must be 'average', 'local' or Recompute(batches); write "
            "averaged(buffers=Recompute(loader)) for the BatchNorm statistics of the mean model"
        )
    return calls(call)[1 if buffers == "local" else 0]


def _layers(model: nn.Module) -> list[_BatchNorm]:
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [layer for layer in found if layer.running_mean is not None]


def _counter(layer: _BatchNorm) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _average(layers: list[_BatchNorm], counts: list[float], transport: Transport) -> None:
    """Weigh each worker's statistics by its number of batches."""
    totals = transport.gather(torch.tensor(counts, dtype=torch.float64)).sum(0).tolist()
    if not any(totals):
        raise ValueError(
            "no BatchNorm layer has seen a batch on any rank; give Recompute a loader that is not "
            "empty, and that can be read again (not a generator that is used up)"
        )
    for layer, count, total in zip(layers, counts, totals, strict=True):
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            if total:
                wide = statistic.double().mul_(count / total * transport.size)
                transport.mean(wide)
                statistic.copy_(wide)
