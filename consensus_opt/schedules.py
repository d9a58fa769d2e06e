"""Scalars that change over training: the strengths of pull and push.

A schedule is a pure function of the communication clock and of the number of steps that training
will take. Where that number is not known, every schedule is constant at its ``value``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Schedule(Protocol):
    """A scalar over training."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value that the schedule can take."""

    def at(self, step: int, total: int | None) -> float:
        """Return the value after ``step`` of ``total`` steps."""


@dataclass(frozen=True)
class Constant:
    """``value``, always."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The value, twice."""
        return self.value, self.value

    def at(self, step: int, total: int | None) -> float:
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
        return min(self.start, self.value), max(self.start, self.value)

    def at(self, step: int, total: int | None) -> float:
        """Interpolate between start and value."""
        return self.start + (self.value - self.start) * _progress(step, total)


@dataclass(frozen=True)
class CosineUp:
    """``value (1 - cos(pi t / T)) / 2``: from 0 up to ``value``."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Zero and the value."""
        return min(0.0, self.value), max(0.0, self.value)

    def at(self, step: int, total: int | None) -> float:
        """Climb along half a cosine wave."""
        return self.value * (1 - math.cos(math.pi * _progress(step, total))) / 2


@dataclass(frozen=True)
class CosineDown:
    """``value (1 + cos(pi t / T)) / 2``: from ``value`` down to 0."""

    value: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Zero and the value."""
        return min(0.0, self.value), max(0.0, self.value)

    def at(self, step: int, total: int | None) -> float:
        """Descend along half a cosine wave."""
        progress = 0.0 if total is None else _progress(step, total)
        return self.value * (1 + math.cos(math.pi * progress)) / 2


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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"a schedule's value must be a number or a Schedule, and is {value!r}; "
            "write 0.5 or consensus_opt.schedules.Linear(0.5)"
        )
    made: Schedule = SHAPES[shape](float(value))
    return made


def _progress(step: int, total: int | None) -> float:
    return 1.0 if total is None else min(step / total, 1.0)
