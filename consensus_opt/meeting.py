"""One worker among the others: what of it is averaged, who counts, and what all agree on.

Before each round the workers compare headers (:mod:`consensus_opt.agreement`); everything that a
round then does follows from what they agree on (contract C3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from consensus_opt.agreement import (
    KINDS,
    OPERATIONS,
    Agreement,
    Header,
    describe,
    fingerprint,
    gather_texts,
    meet_all,
    meet_neighbours,
)
from consensus_opt.control import Memory
from consensus_opt.exchange import PointToPoint
from consensus_opt.flat import FlatParameters, layout
from consensus_opt.methods import Method
from consensus_opt.remaining import Members, among
from consensus_opt.shards import check_pieces, meet_pieces
from consensus_opt.slips import Slips
from consensus_opt.state import common_state, placeholder
from consensus_opt.transport import SoloTransport, Transport


@dataclass(frozen=True)
class LocalStep:
    """What the optimizer tells of the step that it has just taken.

    Attributes:
        parameters: What is averaged.
        state: Optimizer state that may travel with them, by lines that say which it is.
        lr: Learning rate of the step.
        gradient_scale: GradScaler's factor in the gradients at backward; None if there was none.
        remeasure: Gradients were unscaled since backward: measure them as they are.
        gradient_norm: Norm of the replica's gradients where it is known; None to measure it.
    """

    parameters: Sequence[Tensor]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    lr: float = 0.0
    gradient_scale: Tensor | None = None
    remeasure: bool = False
    gradient_norm: float | None = None


class Meeting:
    """What one worker (or all stacked workers) brings to a round, and how it meets the others.

    Attributes:
        method: What the rounds do.
        total_steps: Number of steps that training will take, if it is known.
        transport: The way to the other workers.
        shards: The way to the other pieces of this replica.
        pieces: Number of the pieces.
        clock: Calls of ``step()`` so far; all timing counts in it.
        exchanges: Exchanges so far: the phase of a time-varying topology.
        uneven: What to do once a worker runs out of data, "continue" or "stop"; None: none may.
    """

    transport: Transport
    shards: Transport = SoloTransport()
    pieces = 1
    uneven: str | None = None

    def __init__(self, method: Method, total_steps: int | None, views: bool) -> None:
        self.method, self.total_steps, self._views = method, total_steps, views
        self.clock = self.exchanges = 0
        self._met = False
        self._absent: tuple[int, ...] = ()
        self._flat: FlatParameters | None = None
        self._state = FlatParameters([])
        self._centres: list[Tensor] = []
        self._description = ""
        self._memory: Memory = {}
        self._slips = Slips()

    def _refresh(self, parameters: Sequence[Tensor]) -> FlatParameters:
        """Return the flat parameters; what is no longer these tensors is laid out anew."""
        if self._flat is None or not self._flat.is_current(parameters):
            if self._flat is not None:
                self._flat.release()
            self._flat, self._centres = self._lay_out(parameters), []
            self._description = self._describe(parameters)
        return self._flat

    def _lay_out(self, tensors: Sequence[Tensor]) -> FlatParameters:
        return FlatParameters(tensors, self.transport.batch, self._views)

    def _describe(self, parameters: Sequence[Tensor], start: Sequence[Tensor] = ()) -> str:
        check_pieces([*parameters, *start], self.shards)
        entries = [("piece", f"{self.shards.rank} of {self.pieces}"), *self._settings()]
        for kind, tensors in zip(KINDS, (parameters, start), strict=True):
            entries += [
                (f"{kind} {i}", layout(t, self.transport.batch)) for i, t in enumerate(tensors)
            ]
        return describe(entries)

    def _settings(self) -> list[tuple[str, object]]:
        return [
            ("workers", self.transport.size),
            ("method", self.method),
            ("total_steps", self.total_steps),
        ]

    def _open_round(self, step: LocalStep) -> float:
        """Compare headers with those whom this round meets; return the agreed learning rate."""
        method, transport = self.method, self.transport
        mixing = method.average.mixing(transport.size, self.exchanges)
        everyone = method.timing.uses_lr or method.state == "average" or self.uneven is not None
        if (
            mixing is not None
            and self._met
            and not everyone
            and isinstance(transport, PointToPoint)
            and transport.local_headers
        ):
            meet_neighbours(transport, self._header("step()", step), mixing, self._look)
            return step.lr
        agreed = self._meet("step()", step)
        self._settle(step, agreed)
        return agreed.lr

    def _meet(self, operation: str, step: LocalStep | None = None) -> Agreement:
        """Meet all ranks and go on from where the furthest of them is.

        The pieces of a replica take each of their steps together, so that they need to meet only
        where something new begins, or a learning rate decides.
        """
        header = self._header(operation, step or LocalStep(()))
        description = self._whole_description()
        meet = partial(meet_all, self.transport, header, description, self._look)
        new = not self._met or operation != "step()" or self.method.timing.uses_lr
        if self.pieces > 1 and new:
            own = [("worker", self.transport.rank), *self._settings(), ("join", self.uneven)]
            agreed = meet_pieces(self.shards, meet, describe(own))
        else:
            agreed = meet()
        self.clock, self.exchanges, self._met = agreed.clock, agreed.exchanges, True
        if not agreed.together:
            self._memory = {}
        self._let_count(agreed.members)
        return agreed

    def _let_count(self, members: Sequence[int]) -> None:
        """Let only these workers count from now on."""
        everyone = len(members) == self.transport.size
        self._counting = self.transport if everyone else Members(self.transport, members)
        self._rule = self.method.average
        if not everyone:
            self._rule = among(self._rule, self.transport.size, tuple(members))

    def _counts(self) -> bool:
        return getattr(self._counting, "counts", True)

    def _settle(self, step: LocalStep, agreed: Agreement) -> None:
        """Note who is absent from the round, and lay out the state that travels in it."""
        self._absent = tuple(m for m in range(self.transport.size) if m not in agreed.members)
        state = list(step.state.values())
        if len(set(agreed.state)) > 1:
            texts = gather_texts(self.transport, "\n".join(step.state))
            state = [
                step.state[line] if line in step.state else placeholder(line, step.parameters)
                for line in common_state(texts, agreed.members)
            ]
        if not self._state.is_current(state):
            self._state.release()
            self._state = self._lay_out(state)

    def _header(self, operation: str, step: LocalStep) -> Header:
        return Header(
            fingerprint(self._whole_description()),
            self.clock,
            self.exchanges,
            OPERATIONS.index(operation),
            step.lr,
            fingerprint("\n".join(step.state)),
            self._slips.checksum(step.parameters) if operation == "step()" else 0,
        )

    def _look(self, own: Header, met: Mapping[int, Header]) -> None:
        if own.operation == OPERATIONS.index("step()") and not self.transport.batch:
            self._slips.look(self.transport.rank, own, met)

    def _whole_description(self) -> str:
        return f"{self._description}\njoin: {self.uneven}"
