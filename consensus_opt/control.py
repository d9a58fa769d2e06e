"""How many exchanges a round makes, from the consensus distance that they will lead to.

A control is a frozen value. Before a round it names what it wants to know, and then decides, once:
the exchanges are made together, so that gossip can be accelerated. What it has to remember is kept
in a plain dict, which goes into checkpoints. Rank 0's decision is everybody's (contract C3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import torch
from torch import Tensor

from consensus_opt.checks import whole_field
from consensus_opt.distance import Distance, Sketch, of_squares
from consensus_opt.mixing import Matrix
from consensus_opt.targets import OfReference, Target, as_target

Memory = dict[str, float]
"""What a control remembers from round to round."""


class Forecast:
    """The consensus distance after any number of exchanges, before one is made.

    Sketches are linear, and so are exchanges: what is left of the differences between sketches
    after q exchanges is what is left of those between parameters, as far as the sketch tells.

    Args:
        squares: Mean squared differences of the sketched values, (K,), after 0, 1, 2, ...
            exchanges.
        extra: Means over the workers of what was measured beside them.
    """

    def __init__(self, squares: Iterator[Matrix], extra: tuple[float, ...] = ()) -> None:
        self._squares, self._extra = squares, extra
        self._known: list[Distance] = []

    def after(self, exchanges: int) -> Distance:
        """Return the distance after so many exchanges."""
        while len(self._known) <= exchanges:
            self._known.append(of_squares(next(self._squares), self._extra))
        return self._known[exchanges]


@dataclass(frozen=True)
class Outcome:
    """What a control decided in a round.

    Attributes:
        exchanges: Number of exchanges.
        distance: The distance after them; None where nothing was measured.
        target: The distance aimed at; None outside of the controlled phase.
    """

    exchanges: int
    distance: Distance | None = None
    target: float | None = None

    def row(self, batch: tuple[int, ...]) -> Tensor:
        """Return it as numbers, shape ``batch + (4,)``, for the other ranks."""
        distance = self.distance or Distance(math.nan, math.nan, "")
        target = math.nan if self.target is None else self.target
        numbers = (self.exchanges, distance.value, distance.error, target)
        return torch.tensor(numbers, dtype=torch.float64).expand(*batch, 4)

    def told(self, row: Tensor) -> Outcome:
        """Return what rank 0 decided, of which this is another rank's opinion."""
        exchanges, value, error, target = row.tolist()
        source = "" if self.distance is None else self.distance.source
        return Outcome(
            int(exchanges),
            None if self.distance is None else Distance(value, error, source),
            None if math.isnan(target) else target,
        )


class Control(Protocol):
    """A rule for the exchanges of a round."""

    @property
    def uses_gradients(self) -> bool:
        """Whether a forecast must carry the mean squared gradient norm along."""

    def validate(self, total: int | None) -> None:
        """Raise ``ValueError`` if the rule does not fit the length of training."""

    def meter_at(self, step: int, total: int | None) -> Sketch | None:
        """Return how Xi is measured before this round; None where it is not."""

    def decide(
        self, step: int, total: int | None, forecast: Forecast | None, memory: Memory
    ) -> Outcome:
        """Decide on this round.

        Args:
            step: The clock.
            total: Number of steps of training; None where it is not known.
            forecast: What the meter tells; None where there is no meter.
            memory: To read and to change.
        """


@dataclass(frozen=True)
class Fixed:
    """The same number of exchanges in every round."""

    exchanges: int = 1
    uses_gradients = False

    def __post_init__(self) -> None:
        whole_field(self, "exchanges", "gossip_sgd('ring', exchanges=2)")

    def validate(self, total: int | None) -> None:
        """Accept any length of training."""

    def meter_at(self, step: int, total: int | None) -> Sketch | None:
        """Measure nothing."""
        return None

    def decide(
        self, step: int, total: int | None, forecast: Forecast | None, memory: Memory
    ) -> Outcome:
        """Return the number."""
        return Outcome(self.exchanges)


@dataclass(frozen=True)
class KeepBelow:
    """Exchange until the consensus distance is at most its target.

    A round makes the fewest exchanges, at least one, after which the distance will be at most the
    target; it counts with two standard errors on top. A target that ``most`` exchanges do not reach
    is left after them, and training goes on. Outside of ``during`` a round makes one exchange.

    Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the rule:
    repeat exchanges until the distance is below the target). To know the number beforehand is ours.

    Args:
        target: What Xi must not exceed.
        during: Part of training that is controlled, from after the first bound up to the second.
            Floats are fractions of ``total_steps``, integers are steps; the first half by default,
            for it is the one that decides.
        most: Most exchanges in a round (q_max).
        meter: How Xi is measured.
        at_least: A lower limit for the time after ``during``, when a large distance does no harm
            and can help: a round that finds Xi below it makes no exchange.

    Raises:
        ValueError: If ``during`` is no part of training, or ``at_least`` has no time left.
        TypeError: If a target or the meter is of another kind.
    """

    target: Target
    during: tuple[float, float] = (0.0, 0.5)
    most: int = 16
    meter: Sketch = Sketch(512)
    at_least: Target | None = None

    def __post_init__(self) -> None:
        whole_field(self, "most", "consensus_control('ring', most=16)")
        object.__setattr__(self, "during", _part(self.during))
        if not isinstance(self.meter, Sketch):
            raise TypeError(
                f"the meter is {self.meter!r}; it must be a Sketch; write meter=Sketch(512)"
            )
        object.__setattr__(self, "target", as_target(self.target))
        if self.at_least is not None:
            object.__setattr__(self, "at_least", as_target(self.at_least))
        if self.at_least is not None and self.during[1] == 1.0:
            raise ValueError(
                f"during is {self.during!r} and at_least is {self.at_least!r}, which counts after "
                "it; it must end before training does; write during=(0.0, 0.5), or no at_least"
            )

    @property
    def uses_gradients(self) -> bool:
        """Whether a limit follows gradients."""
        floor = self.at_least
        return self.target.uses_gradients or (floor is not None and floor.uses_gradients)

    def validate(self, total: int | None) -> None:
        """Ask for the length of training where a part of it is meant."""
        if total is None and any(0.0 < b < 1.0 for b in self.during):
            raise ValueError(
                f"the control is on during {self.during} of training, and its length is not known; "
                "pass total_steps to ConsensusOptimizer, or during=(0.0, 1.0) to control always"
            )
        start, end = (_steps(bound, total) for bound in self.during)
        if not start < end:
            raise ValueError(
                f"the control is on during {self.during} of {total} steps, which is no time; the "
                "second bound must come later; write during=(0.0, 0.5) for the first half"
            )
        if total is None and isinstance(self.target, OfReference):
            raise ValueError(
                f"the target is {self.target!r}, which has phases of training, and its length is "
                "not known; pass total_steps to ConsensusOptimizer, or a constant target"
            )

    def meter_at(self, step: int, total: int | None) -> Sketch | None:
        """Measure where there is a limit."""
        return self.meter if self._place(step, total) in self._limits() else None

    def decide(
        self, step: int, total: int | None, forecast: Forecast | None, memory: Memory
    ) -> Outcome:
        """Return the fewest exchanges that will do."""
        if forecast is None:
            return Outcome(1)
        place = self._place(step, total)
        limit = self._limits()[place].at(step, total, forecast.after(0), memory)
        if place == "after":
            made = 0 if forecast.after(0).value < limit else 1
            return Outcome(made, forecast.after(made))
        # A distance that is not a number is above no limit: more exchanges would not mend it.
        enough = (q for q in range(1, self.most) if not forecast.after(q).upper > limit)
        made = next(enough, self.most)
        return Outcome(made, forecast.after(made), limit if math.isfinite(limit) else None)

    def _limits(self) -> dict[str, Target]:
        return {"in": self.target} | ({} if self.at_least is None else {"after": self.at_least})

    def _place(self, step: int, total: int | None) -> str:
        """Tell whether a step lies before, in or after the part that is controlled."""
        start, end = (_steps(bound, total) for bound in self.during)
        return "before" if step <= start else "in" if step <= end else "after"


def _part(during: tuple[float, float]) -> tuple[float, float]:
    """Return the bounds as plain numbers, if they are rising bounds of a part of training."""
    start, end = bounds = tuple(_bound(value, during) for value in during)
    mixed = isinstance(start, int) != isinstance(end, int)
    inside = all(b >= 0 and (isinstance(b, int) or b <= 1.0) for b in bounds)
    first_step_alone = isinstance(end, int) and end <= 1  # hardly meant: (0, 1) for (0.0, 1.0)
    if inside and (start < end or mixed) and not first_step_alone:
        return start, end
    raise ValueError(
        f"during is {during!r}; it must be two rising fractions of training within [0, 1], as "
        "floats, or numbers of steps, as integers; write during=(0.0, 0.5) for the first half, "
        "(0.0, 1.0) for all of training, or (0, 5000) for 5000 steps"
    )


def _bound(value: Any, during: object) -> float:
    """Return a plain int or float, whatever numeric type was given."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"during is {during!r}; it must be two numbers; write during=(0.0, 0.5)")
    return int(value) if isinstance(value, Integral) else float(value)


def _steps(bound: float, total: int | None) -> float:
    """Return a bound of a part of training in steps; 1.0 is the end, whenever it comes."""
    if isinstance(bound, int) or bound == 0.0:
        return bound
    return math.inf if bound == 1.0 or total is None else bound * total
