"""``phi^2 = (1/n) sum_i ||g_i||^2``: how large gradients are, without a pass of their own.

The critical consensus distance is proportional to it (Kong et al., ICML 2021). Each gradient's
norm is taken by a hook right after ``backward`` has accumulated it: while it is still in the
cache, before clipping, and with the whole sum where gradients are accumulated over several
batches. Weight decay, which the optimizer adds later, is not in it. One case escapes: GradScaler's
``unscale_`` hides by how much it divided, so that gradients are measured after it, and after
clipping if there was any.

Parameters hold the meter weakly: when it goes, so do its hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from consensus_opt.flat import local
from consensus_opt.transport import arithmetic_dtype


class GradientMeter:
    """Adds up ``||g||^2`` of each worker over the steps since it was last taken.

    Args:
        batch: Leading shape of every tensor, ``()`` or ``(n,)``.
    """

    def __init__(self, batch: tuple[int, ...]) -> None:
        self._batch = batch
        self._norms: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}
        self._sum = torch.zeros(batch, dtype=torch.float64)
        self._steps = 0
        weakref.finalize(self, _remove, self._hooks)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Hook these parameters and no others."""
        wanted = {id(p): p for p in parameters}
        _remove(self._hooks, self._hooks.keys() - wanted.keys())
        for key in wanted.keys() - self._hooks.keys():
            register = wanted[key].register_post_accumulate_grad_hook
            self._hooks[key] = register(_weakly(self._measure))  # type: ignore[no-untyped-call]

    def add(
        self, parameters: Sequence[Tensor], scale: Tensor | None, remeasure: bool = False
    ) -> None:
        """Take one step's gradients into account; those that overflowed do not count.

        Args:
            parameters: The parameters, watched from now on; a gradient that no hook saw, because
                it was assigned or its parameter is new, is measured as it is.
            scale: GradScaler's factor that was in the gradients at backward; None if none was.
            remeasure: Ignore what the hooks measured, and measure the gradients as they are.
        """
        if remeasure:
            self._norms.clear()
        present = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in present:
            if id(parameter) not in self._norms:
                self._measure(parameter)
        squared = self._total([self._norms[id(parameter)] for parameter in present], scale)
        self._norms.clear()
        self._add_squared(squared)
        self.watch(parameters)

    def add_norm(self, norm: float, pieces: int = 1) -> None:
        """Take one step into account whose norm an engine tells, for all pieces of a replica."""
        self._norms.clear()
        self._add_squared(torch.full_like(self._sum, norm**2 / pieces))

    def take(self, pieces: int = 1) -> Tensor:
        """Return the sum of ``||g||^2`` and the number of steps, ``batch + (2,)``; start anew.

        Args:
            pieces: Number of ranks that share the worker's gradients: the sums over them count.
        """
        steps = torch.full(self._batch, self._steps / pieces, dtype=torch.float64)
        taken = torch.stack([self._sum, steps], dim=-1)
        self._sum, self._steps = torch.zeros_like(self._sum), 0
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured since the last :meth:`take`."""
        return {"sum": self._sum.clone(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, unless it is of another number of stacked workers."""
        if state and state["sum"].shape == self._sum.shape:
            self._sum, self._steps = state["sum"].clone(), state["steps"]

    def _add_squared(self, squared: Tensor) -> None:
        if bool(torch.isfinite(squared).all()):
            self._sum += squared
            self._steps += 1

    def _total(self, norms: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        """Return the sum of squares, on the CPU, where one copy brings all norms."""
        if not norms:
            return torch.zeros_like(self._sum)
        together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).cpu()
        return (together if scale is None else together / scale.to(together)).square().sum(0)

    def _measure(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        rows = gradient.detach().reshape(*self._batch, -1)
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=arithmetic_dtype(rows.dtype))
        self._norms[id(parameter)] = norm


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    reference = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return call


def _remove(hooks: dict[int, Any], keys: set[int] | None = None) -> None:
    """Remove these hooks, by default all."""
    for key in set(hooks) if keys is None else keys:
        hooks.pop(key).remove()
