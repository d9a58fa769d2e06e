"""``phi^2 = (1/n) sum_i ||g_i||^2``: how large gradients are, without a pass of their own.

The critical consensus distance is proportional to it (Kong et al., ICML 2021). Each gradient's
norm is taken by a hook right after ``backward`` has accumulated it: while it is still in the
cache, before clipping, and with the whole sum where gradients are accumulated over several
batches. Weight decay, which the optimizer adds later, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from consensus_opt.transport import arithmetic_dtype


class GradientMeter:
    """Averages ``||g||^2`` of each worker over the steps since it was last taken.

    Args:
        batch: Leading shape of every tensor, ``()`` or ``(n,)``.
    """

    def __init__(self, batch: tuple[int, ...]) -> None:
        self._batch = batch
        self._squared: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}
        self._sum = torch.zeros(batch, dtype=torch.float64)
        self._steps = 0

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Hook these parameters and no others."""
        wanted = {id(p): p for p in parameters}
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key).remove()
        for key in wanted.keys() - self._hooks.keys():
            self._hooks[key] = wanted[key].register_post_accumulate_grad_hook(self._measure)

    def add(
        self, parameters: Iterable[Tensor], scale: Tensor | None, remeasure: bool = False
    ) -> None:
        """Take one step's gradients into account; those that overflowed do not count.

        Args:
            parameters: The parameters; a gradient that was assigned, not accumulated by a backward
                pass, is measured now.
            scale: GradScaler's factor that was in the gradients at backward; None if none was.
            remeasure: Ignore what the hooks measured, and measure the gradients as they are.
        """
        if remeasure:
            self._squared.clear()
        total = torch.zeros(self._batch, dtype=torch.float64)
        for parameter in parameters:
            if parameter.grad is not None:
                if id(parameter) not in self._squared:
                    self._measure(parameter)
                total += self._squared[id(parameter)].to(total)
        self._squared.clear()
        if scale is not None:
            total /= scale.to(total) ** 2
        if bool(torch.isfinite(total).all()):
            self._sum += total
            self._steps += 1

    def take(self) -> Tensor:
        """Return mean ``||g||^2`` and number of steps, shape ``batch + (2,)``, and start anew."""
        steps = torch.full(self._batch, float(self._steps), dtype=torch.float64)
        taken = torch.stack([self._sum / max(1, self._steps), steps], dim=-1)
        self._sum, self._steps = torch.zeros_like(self._sum), 0
        return taken

    def _measure(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        rows = gradient.detach().reshape(*self._batch, -1)
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=arithmetic_dtype(rows.dtype))
        self._squared[id(parameter)] = norm.square()
