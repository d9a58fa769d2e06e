"""What the consensus distance should not exceed.

Kong et al. (ICML 2021): while ``Xi^2 <= eta sigma^2 / (L n) + ||grad f(x_A)||^2 / (8 L^2)``,
decentralized training converges as fast as centralized. The constants are unknown in practice,
hence three practical targets: a number, a fraction of what an uncontrolled run reaches, or a
multiple of the gradients' size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from consensus_opt.checks import not_negative, real
from consensus_opt.distance import Distance
from consensus_opt.telemetry import RoundRecord


@runtime_checkable
class Target(Protocol):
    """An upper limit for Xi."""

    @property
    def uses_gradients(self) -> bool:
        """Whether ``measured.extra`` must hold the sum of ``||g||^2`` and the number of steps."""

    def at(
        self, step: int, total: int | None, measured: Distance, memory: dict[str, float]
    ) -> float:
        """Return the limit in this round, in units of the parameters; ``inf`` for none."""


@dataclass(frozen=True)
class Constant:
    """The same limit always; ``inf`` measures and controls nothing.

    Raises:
        ValueError: If the limit is negative or not a number.
    """

    value: float
    uses_gradients = False

    def __post_init__(self) -> None:
        example = "consensus_control('ring', target=0.5)"
        object.__setattr__(self, "value", not_negative(self.value, "the target distance", example))

    def at(
        self, step: int, total: int | None, measured: Distance, memory: dict[str, float]
    ) -> float:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class GradientNorm:
    """``rho * phi``, where ``phi^2 = (1/n) sum_i ||g_i||^2``, smoothed over the steps.

    rho stands for ``1 / (2 sqrt(2) L)``, so that there is no learning rate in it. Gradients are
    minibatch gradients, before clipping and without weight decay, and phi^2 is an exponential
    moving average with bias correction (decided here). Under ``GradScaler`` whose ``unscale_`` the
    training loop calls itself, they are measured after that, and after clipping.

    Source: Kong et al., ICML 2021; their best value is 0.25.

    Raises:
        ValueError: If rho is negative, or the decay is outside [0, 1).
    """

    rho: float = 0.25
    decay: float = 0.99
    uses_gradients = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", not_negative(self.rho, "rho", "GradientNorm(rho=0.25)"))
        object.__setattr__(self, "decay", not_negative(self.decay, "the decay of phi", "0.99"))
        if self.decay >= 1.0:
            raise ValueError(
                f"the decay of phi is {self.decay!r}; it must lie in [0, 1); write 0.99"
            )

    def at(
        self, step: int, total: int | None, measured: Distance, memory: dict[str, float]
    ) -> float:
        """Update the average with what came along with the first measurement of the round."""
        summed, steps = measured.extra  # workers that overflowed have fewer steps
        keep, squared = self.decay**steps, summed / steps if steps > 0 else 0.0
        memory["phi_sum"] = keep * memory.get("phi_sum", 0.0) + (1 - keep) * squared
        memory["phi_weight"] = keep * memory.get("phi_weight", 0.0) + (1 - keep)
        weight = memory["phi_weight"]
        return self.rho * math.sqrt(memory["phi_sum"] / weight) if weight > 0 else math.inf


@dataclass(frozen=True)
class OfReference:
    """A fraction of the largest distance that a recorded run reached in the same phase.

    Attributes:
        fraction: For example 1/2, 1/4, 1/8.
        phases: ``(start, end, Xi_max)`` with fractions of training; see :class:`Recorder`.

    Raises:
        ValueError: If the fraction is negative.
    """

    fraction: float
    phases: tuple[tuple[float, float, float], ...]
    uses_gradients = False

    def __post_init__(self) -> None:
        example = "OfReference.load(0.5, 'reference.json')"
        number = not_negative(self.fraction, "the fraction of Xi_max", example)
        object.__setattr__(self, "fraction", number)

    @classmethod
    def load(cls, fraction: float, path: str | Path) -> OfReference:
        """Read the file that a :class:`Recorder` wrote; give all ranks the same file."""
        phases = json.loads(Path(path).read_text(encoding="utf-8"))["phases"]
        known = [phase for phase in phases if phase["largest"] is not None]
        return cls(fraction, tuple((p["start"], p["end"], p["largest"]) for p in known))

    def at(
        self, step: int, total: int | None, measured: Distance, memory: dict[str, float]
    ) -> float:
        """Return the fraction of this phase's Xi_max; no limit where none was recorded."""
        progress = 0.0 if total is None else step / total
        for start, end, largest in self.phases:
            if start < progress <= end:
                return self.fraction * largest
        return math.inf


def as_target(target: float | Target) -> Target:
    """Return a number as a constant target; targets pass through.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(target, Target) and not isinstance(target, type):
        return target
    message = (
        f"the target is {target!r}; it must be a number or a target; write "
        "consensus_control('ring', target=0.5) or target=GradientNorm(rho=0.25)"
    )
    return Constant(real(target, message))


class Recorder:
    """A telemetry sink that writes the largest distance of each phase, for ``OfReference``.

    Use it on one rank of an uncontrolled run that measures, all the time:
    ``consensus_control("ring", target=math.inf, during=(0.0, 1.0))``. A phase in which nothing was
    measured has no limit.

    Args:
        path: The JSON file, rewritten at each measurement.
        total_steps: Number of steps of training.
        bounds: Rising fractions of training at which phases end.
    """

    def __init__(
        self,
        path: str | Path,
        total_steps: int,
        bounds: tuple[float, ...] = (0.5, 0.75, 1.0),
    ) -> None:
        self._path, self._total = Path(path), total_steps
        starts = (0.0, *bounds[:-1])
        self._phases: list[dict[str, Any]] = [
            {"start": start, "end": end, "largest": None}
            for start, end in zip(starts, bounds, strict=True)
        ]

    def __call__(self, record: RoundRecord) -> None:
        """Take one round into account."""
        if record.distance is None:
            return
        progress = record.step / self._total
        for phase in self._phases:
            if phase["start"] < progress <= phase["end"]:
                phase["largest"] = max(phase["largest"] or 0.0, record.distance)
        self._path.write_text(json.dumps({"phases": self._phases}), encoding="utf-8")
