"""When a round is due.

A timing is a pure function: from the step at which the last round ended to the step of the next
one. It sees nothing that could differ between ranks (contract C3). ``QuadraticSync`` needs the
learning rate; it is handed rank 0's, which ranks agree on when they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from consensus_opt.checks import positive, whole_field


class Timing(Protocol):
    """When rounds happen."""

    @property
    def uses_lr(self) -> bool:
        """Whether ``next_round`` looks at the learning rate."""

    def next_round(self, step: int, lr: float, total: int | None) -> int:
        """Return the step, later than ``step``, after which the next round is due."""


@dataclass(frozen=True)
class Every:
    """A round every ``period`` (tau) steps, at its multiples."""

    period: int = 1
    uses_lr = False

    def __post_init__(self) -> None:
        whole_field(self, "period", "local_sgd(period=4)")

    def next_round(self, step: int, lr: float, total: int | None) -> int:
        """Return the next multiple of the period."""
        return step - step % self.period + self.period


@dataclass(frozen=True)
class PostLocal:
    """A round after every step up to step ``until``, then every ``period`` steps.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (they switch at
    half of training, and use a period of 16).
    """

    until: int
    period: int = 16
    uses_lr = False

    def __post_init__(self) -> None:
        for field in ("until", "period"):
            whole_field(self, field, "post_local(until=total_steps // 2, period=16)")

    def next_round(self, step: int, lr: float, total: int | None) -> int:
        """Return the next step before the switch, the next multiple of the period after it."""
        if step < self.until:
            return step + 1
        done = step - self.until
        return self.until + done - done % self.period + self.period


@dataclass(frozen=True)
class QuadraticSync:
    """Periods that grow as the learning rate falls: ``H = max(min_period, floor((a / lr)^2))``.

    The learning rate is rank 0's at the start of the period; the last period is cut at the end of
    training, where that is known.

    Source: Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024
    (for ViT: a = 0.0175, at least 4 steps, with a peak learning rate of 0.008).

    Args:
        coefficient: ``a``, in units of the learning rate, positive.
        min_period: Smallest period, in steps.
    """

    coefficient: float
    min_period: int = 4
    uses_lr = True

    def __post_init__(self) -> None:
        whole_field(self, "min_period", "quadratic_sync(0.0175, min_period=4)")
        example = "quadratic_sync(coefficient=0.0175), in units of the learning rate"
        object.__setattr__(self, "coefficient", positive(self.coefficient, "coefficient", example))

    def next_round(self, step: int, lr: float, total: int | None) -> int:
        """Return the end of a period that the learning rate sets."""
        longest = 2**31
        # Cut before it is squared, which can exceed what a float holds.
        growth = min(self.coefficient / lr, longest**0.5) ** 2 if lr > 0 else longest
        period = max(self.min_period, math.floor(growth))
        end = step + period
        return min(end, total) if total is not None and step < total else end
