"""How many exchanges a round makes, from the measured consensus distance.

A control is a frozen value. It runs a round through two verbs, *exchange* and *measure*, and keeps
what it has to remember in a plain dict, which goes into checkpoints. All that it decides on is the
same bits on every rank: the clock, and distances that came out of a reduction (contract C3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from consensus_opt.checks import whole_field
from consensus_opt.distance import Distance, Sketch
from consensus_opt.targets import OfReference, Target

_USUAL_FACTOR = 0.8
_PATIENCE = 16
"""Rounds with one number, after which one fewer is tried: what a number led to goes out of date."""
_TINY = 1e-30

Memory = dict[str, float]
"""What a control remembers from round to round."""


@dataclass(frozen=True)
class Verbs:
    """What a control can do in a round.

    Attributes:
        step: The clock.
        total: Number of steps of training; None where it is not known.
        exchange: Makes so many exchanges.
        measure: Returns the distance after the exchanges made so far; a collective call.
    """

    step: int
    total: int | None
    exchange: Callable[[int], None]
    measure: Callable[[Sketch], Distance]


@dataclass(frozen=True)
class Outcome:
    """What a control did in a round.

    Attributes:
        exchanges: Number of exchanges.
        distance: The last distance that was measured; None where none was.
        target: The distance aimed at; None outside of the controlled phase.
    """

    exchanges: int
    distance: Distance | None = None
    target: float | None = None


class Control(Protocol):
    """A rule for the exchanges of a round."""

    @property
    def uses_gradients(self) -> bool:
        """Whether ``measure`` must carry the mean squared gradient norm along."""

    def validate(self, total: int | None) -> None:
        """Raise ``ValueError`` if the rule needs to know the length of training and does not."""

    def run(self, verbs: Verbs, memory: Memory) -> Outcome:
        """Make one round."""


@dataclass(frozen=True)
class Fixed:
    """The same number of exchanges in every round."""

    exchanges: int = 1
    uses_gradients = False

    def __post_init__(self) -> None:
        whole_field(self, "exchanges", "gossip_sgd('ring', exchanges=2)")

    def validate(self, total: int | None) -> None:
        """Accept any length of training."""

    def run(self, verbs: Verbs, memory: Memory) -> Outcome:
        """Exchange, and measure nothing."""
        verbs.exchange(self.exchanges)
        return Outcome(self.exchanges)


@dataclass(frozen=True)
class KeepBelow:
    """Exchange until the consensus distance is at most its target.

    The number of exchanges that is expected to do is made at once (which lets gossip be
    accelerated), then verified; missing ones follow one by one. What each number led to is
    remembered, and sets the number for the next round. A distance counts with two standard errors
    on top. Outside of ``during`` a round makes one exchange; a target that ``most`` exchanges do
    not reach is left, and training goes on.

    Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the rule:
    repeat exchanges until the distance is below the target). The prediction is ours.

    Args:
        target: What Xi must not exceed.
        during: Part of training that is controlled, as fractions of ``total_steps``; the first half
            by default, for it is the one that decides.
        most: Most exchanges in a round (q_max).
        meter: How Xi is measured.
        at_least: A lower limit for the time after ``during``, when a large distance does no harm
            and can help: a round that finds Xi below it makes no exchange.

    Raises:
        ValueError: If ``during`` is no part of training.
    """

    target: Target
    during: tuple[float, float] = (0.0, 0.5)
    most: int = 16
    meter: Sketch = Sketch(512)
    at_least: Target | None = None

    def __post_init__(self) -> None:
        whole_field(self, "most", "consensus_control('ring', most=16)")
        start, end = self.during
        if not 0.0 <= start < end <= 1.0:
            raise ValueError(
                f"during is {self.during!r}; it must be two rising fractions of training within "
                "[0, 1]; write during=(0.0, 0.5) for the first half"
            )

    @property
    def uses_gradients(self) -> bool:
        """Whether a limit follows gradients."""
        floor = self.at_least
        return self.target.uses_gradients or (floor is not None and floor.uses_gradients)

    def validate(self, total: int | None) -> None:
        """Ask for the length of training where a part of it is meant."""
        if total is None and self.during != (0.0, 1.0):
            raise ValueError(
                f"the control is on during {self.during} of training, and its length is not known; "
                "pass total_steps to ConsensusOptimizer, or during=(0.0, 1.0) to control always"
            )
        if total is None and isinstance(self.target, OfReference):
            raise ValueError(
                f"the target is {self.target!r}, which has phases of training, and its length is "
                "not known; pass total_steps to ConsensusOptimizer, or a constant target"
            )

    def run(self, verbs: Verbs, memory: Memory) -> Outcome:
        """Make the predicted exchanges, verify, and add what is missing."""
        start, end = self.during
        if verbs.total is not None and not start * verbs.total < verbs.step <= end * verbs.total:
            late = verbs.step > end * verbs.total
            return self._run_freely(verbs, memory, self.at_least if late else None)
        planned = made = min(int(memory.get("planned", 1)), self.most)
        verbs.exchange(planned)
        first = measured = verbs.measure(self.meter)
        limit = self.target.at(verbs.step, verbs.total, measured, memory)
        while measured.upper > limit and made < self.most:
            verbs.exchange(1)
            made += 1
            measured = verbs.measure(self.meter)
        reached = max(first.upper / max(limit, _TINY), _TINY)
        memory["planned"] = self._plan(planned, made, reached, memory)
        return Outcome(made, measured, limit if math.isfinite(limit) else None)

    def _plan(self, planned: int, made: int, reached: float, memory: Memory) -> int:
        """Return the number for the next round.

        Args:
            planned: Exchanges that were made at once.
            made: Exchanges in all.
            reached: Distance after the planned ones, relative to the limit; above 0.
            memory: Holds, for each number q, by which factor q exchanges beat q - 1.
        """
        gap = planned - int(memory.get("last_planned", planned))
        memory["steady"] = memory.get("steady", 0) + 1 if gap == 0 else 0
        if gap == 1:
            memory[f"factor_{planned}"] = reached / memory["last_reached"]
        elif gap == -1:
            memory[f"factor_{planned + 1}"] = memory["last_reached"] / reached
        memory["last_planned"], memory["last_reached"] = planned, reached
        if reached > 1:
            return min(self.most, planned + max(1, (made - planned) // 2))
        nearby = memory.get(f"factor_{planned + 1}", _USUAL_FACTOR)
        one_fewer = reached / memory.get(f"factor_{planned}", nearby)
        try_fewer = one_fewer <= 1 or memory["steady"] >= _PATIENCE
        return planned - 1 if planned > 1 and try_fewer else planned

    def _run_freely(self, verbs: Verbs, memory: Memory, floor: Target | None) -> Outcome:
        """Exchange once, unless the distance is below its lower limit already."""
        measured = None
        if floor is not None:
            measured = verbs.measure(self.meter)
            if measured.value < floor.at(verbs.step, verbs.total, measured, memory):
                return Outcome(0, measured)
        verbs.exchange(1)
        return Outcome(1, measured)
