"""Pull toward x_C and push away from it, as pure functions on flat tensors.

    x <- x + alpha (x_C - x) + lambda (x - x_C) / r,    r = ||x - x_C||

Both lie on one line, so they are one interpolation: ``x <- x + (alpha - lambda / r) (x_C - x)``.
The radius then obeys ``r' = |(1 - alpha) r + lambda|`` and settles at ``lambda / alpha``.

Source: Dimlioglu & Choromanska, "Communication-Efficient Distributed Training for Collaborative
Flat Optima Recovery in Deep Learning" (DPPF), arXiv 2507.20424. Where gossip hides the mean, its
average stands for it; and where ``r`` is lost in rounding the direction is undefined, so that there
is no push (both decided here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consensus_opt.schedules import Constant, Schedule
from consensus_opt.transport import arithmetic_dtype

_CHUNK = {"cpu": 1 << 18}
"""Elements that fit in the cache together with their difference; elsewhere launches cost more."""
_CHUNK_ELSEWHERE = 1 << 24


@dataclass(frozen=True)
class Force:
    """Strengths of pull (alpha) and push (lambda, in units of the parameters) over training.

    Raises:
        ValueError: If the pull leaves [0, 1] or never pulls, or the push is negative at any time.
    """

    pull: Schedule = Constant(1.0)
    push: Schedule = Constant(0.0)

    def __post_init__(self) -> None:
        for name in ("pull", "push"):
            if not hasattr(strength := getattr(self, name), "bounds"):
                raise TypeError(
                    f"the {name} is {strength!r}; it must be a Schedule; write dppf(alpha=0.1, "
                    "lam=0.5), which takes numbers, or Force(Constant(0.1), Constant(0.5))"
                )
        low, high = self.pull.bounds
        if not (low >= 0 and 0 < high <= 1):
            raise ValueError(
                f"the pull alpha must stay in (0, 1], and goes from {low} to {high}; "
                "write dppf(alpha=0.1), or local_sgd(...) for hard averaging (alpha = 1)"
            )
        low, high = self.push.bounds
        if not (low >= 0 and high < float("inf")):
            raise ValueError(
                f"the push lambda must be a finite number of at least 0, and goes from {low} to "
                f"{high}; write dppf(lam=0.5), which settles at the valley width lam / alpha"
            )


def squared_distance(flats: Sequence[Tensor], centres: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``||x - c||^2`` and the largest value of it that rounding alone can make.

    Sums run in at least fp32 within chunks and in fp64 over them, in one pass over memory.

    Args:
        flats: Buffers of shape ``batch + (P,)``.
        centres: Buffers of the same shapes.

    Returns:
        Two fp64 tensors of shape ``batch``. The second is ``sum (8 eps ||c||)^2`` over the
        buffers, with the machine epsilon of each buffer's dtype.
    """
    squared, floor = [], []
    for flat, centre in zip(flats, centres, strict=True):
        shape = (math.prod(flat.shape[:-1]), flat.shape[-1])
        rows = flat.reshape(shape), centre.reshape(shape)
        sums = torch.stack([_row_sums(x, c) for x, c in zip(*rows, strict=True)])
        sums = sums.reshape(*flat.shape[:-1], 2)
        squared.append(sums[..., 0])
        floor.append(sums[..., 1] * (8 * torch.finfo(flat.dtype).eps) ** 2)
    return _total(squared), _total(floor)


def line_weight(squared: Tensor, floor: Tensor, pull: float, push: float) -> Tensor:
    """Return ``alpha - lambda / r``, or ``alpha`` where r is lost in rounding; shape ``batch``."""
    safe = torch.where(squared > floor, squared, torch.inf)
    return pull - push / safe.sqrt()


def move(flats: Sequence[Tensor], centres: Sequence[Tensor], weight: Tensor) -> None:
    """Compute ``x <- x + weight (c - x)`` in place, with one weight a worker, shape ``batch``."""
    for flat, centre in zip(flats, centres, strict=True):
        scale = weight.to(flat.device, arithmetic_dtype(flat.dtype))
        if flat.dim() == 1:
            flat.lerp_(centre, scale.item())
        else:
            flat.lerp_(centre, scale.to(flat.dtype).unsqueeze(-1))


def _row_sums(x: Tensor, c: Tensor) -> Tensor:
    """Return ``[||x - c||^2, ||c||^2]`` of two vectors, fp64."""
    length = _CHUNK.get(x.device.type, _CHUNK_ELSEWHERE)
    wide = arithmetic_dtype(x.dtype)
    room = x.new_empty(min(length, len(x)), dtype=wide)
    dots = [torch.zeros(2, dtype=wide, device=x.device)]
    for part, centre in zip(torch.split(x, length), torch.split(c, length), strict=True):
        near = centre.to(wide)
        difference = torch.sub(part.to(wide), near, out=room[: len(part)])
        dots.append(torch.stack([torch.dot(difference, difference), torch.dot(near, near)]))
    return torch.stack(dots).double().sum(0)


def _total(parts: list[Tensor]) -> Tensor:
    """Add values that may lie on different devices; 0 where nothing is trained."""
    total = parts[0] if parts else torch.zeros((), dtype=torch.float64)
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total
