"""Scalars that change over training: the strengths of pull and push.

A schedule is a pure function of the communication clock, the number of steps that training will
take and the learning rate. Where that number is not known, every schedule is constant at its
``value``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from consensus_opt.checks import not_negative, positive, real, whole_field


@runtime_checkable
class Schedule(Protocol):
    """A scalar over training."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value that the schedule can take."""

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Return the value after ``step`` of ``total`` steps, at the learning rate ``lr``."""


@dataclass(frozen=True)
class Constant:
    """``value``, always."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The value, twice."""
        return self.value, self.value

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """``start + (value - start) t / T``: from ``start`` to ``value`` over training."""

    value: float
    start: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """The two ends, in order."""
        return _ordered(self.start, self.value)

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Interpolate between start and value."""
        return self.start + (self.value - self.start) * _progress(step, total)


@dataclass(frozen=True)
class CosineUp:
    """``value (1 - cos(pi t / T)) / 2``: from 0 up to ``value``."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Zero and the value."""
        return _ordered(0.0, self.value)

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Climb along half a cosine wave."""
        return self.value * (1 - math.cos(math.pi * _progress(step, total))) / 2


@dataclass(frozen=True)
class CosineDown:
    """``value (1 + cos(pi t / T)) / 2``: from ``value`` down to 0."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Zero and the value."""
        return _ordered(0.0, self.value)

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Descend along half a cosine wave."""
        progress = 0.0 if total is None else _progress(step, total)
        return self.value * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class LrPower:
    """``least + (1 - least) (lr / reference)^power``, at most 1; 1 up to step ``start``.

    The pull of DSGD-AC: as the learning rate falls, workers are left further apart.

    Source: Wang & Johansson, arXiv 2602.02899.

    Raises:
        TypeError: If one of them is no number.
        ValueError: If ``reference`` or ``power`` is not positive, or ``least`` is outside [0, 1].
    """

    reference: float
    power: float = 3.0
    least: float = 0.0
    start: int = 0

    def __post_init__(self) -> None:
        for field in ("reference", "power"):
            number = positive(getattr(self, field), field, "LrPower(reference=0.1, power=3.0)")
            object.__setattr__(self, field, number)
        whole_field(self, "start", "LrPower(reference=0.1, start=1000)", least=0)
        object.__setattr__(self, "least", not_negative(self.least, "least", "least=0.01"))
        if self.least > 1.0:
            raise ValueError(
                f"least is {self.least!r}; it must lie in [0, 1]; write LrPower(0.1, least=0.01)"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """From ``least`` to 1."""
        return self.least, 1.0

    def at(self, step: int, total: int | None, lr: float = 0.0) -> float:
        """Follow the learning rate."""
        if step <= self.start:
            return 1.0
        share: float = min(1.0, lr / self.reference) ** self.power
        return self.least + (1 - self.least) * share


SHAPES = {
    "constant": Constant,
    "linear": Linear,
    "cosine_up": CosineUp,
    "cosine_down": CosineDown,
}


def schedule(value: float | Schedule, shape: str = "constant") -> Schedule:
    """Return a schedule of the named shape that reaches ``value``; schedules pass through.

    Raises:
        ValueError: If the shape is unknown.
        TypeError: If ``value`` is neither a number nor a schedule.
    """
    if shape not in SHAPES:
        raise ValueError(
            f"unknown schedule {shape!r}; known are {', '.join(SHAPES)}; "
            "write for example dppf(schedule='cosine_up')"
        )
    if isinstance(value, Schedule):
        return value
    number = real(
        value,
        f"a schedule's value must be a number or a Schedule, and is {value!r}; "
        "write 0.5 or consensus_opt.schedules.Linear(0.5)",
    )
    made: Schedule = SHAPES[shape](number)
    return made


def _progress(step: int, total: int | None) -> float:
    return 1.0 if total is None else min(step / total, 1.0)


def _ordered(a: float, b: float) -> tuple[float, float]:
    """Return the two numbers in order; NaN where one is, which ``min`` would hide."""
    return (math.nan, math.nan) if math.isnan(a + b) else (min(a, b), max(a, b))
