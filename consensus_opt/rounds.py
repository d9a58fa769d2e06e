"""The communicating half of the optimizer: clock, flat parameters, and what a round does.

Every decision here is a function of the clock, the method and numbers that are the same bits on
all ranks (contract C3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from consensus_opt import forces
from consensus_opt.control import Forecast, Outcome
from consensus_opt.distance import Distance, root_mean
from consensus_opt.flat import FlatParameters
from consensus_opt.gradients import GradientMeter
from consensus_opt.guard import Guard
from consensus_opt.meeting import LocalStep, Meeting
from consensus_opt.methods import Method
from consensus_opt.restoring import restored
from consensus_opt.telemetry import RoundRecord, Sink, tell
from consensus_opt.transport import Transport, total

VERSION = 1


class Rounds(Meeting):
    """Keeps one worker (or all stacked workers) in step with the others.

    Attributes:
        rounds: Rounds so far.
        bytes_sent: Payload that this process sent in all rounds.
    """

    def __init__(
        self,
        method: Method,
        total_steps: int | None,
        sinks: Sequence[Sink] = (),
        views: bool = True,
    ) -> None:
        super().__init__(method, total_steps, views)
        self._sinks = tuple(sinks)
        self.rounds = self.bytes_sent = 0
        self._next: int | None = None
        self._worked = False
        self._gradients: GradientMeter | None = None
        self._carried: dict[str, Any] = {}
        self._workers: int | None = None

    def connect(self, transport: Transport, shards: Transport | None = None) -> None:
        """Use this transport from now on, and the same ``shards`` as before if none are given.

        Raises:
            ValueError: If the method does not fit its number of workers.
        """
        self.method.average.validate(transport.size)
        self.method.control.validate(self.total_steps)
        self.transport, self._met = transport, False
        self.shards = shards or self.shards
        self.guard = Guard(transport, self.shards)
        self.pieces = self.shards.size
        self._count(transport.size)
        self._let_count(range(transport.size))
        if self.method.control.uses_gradients and transport.size > 1:
            measured = self._measured_gradients()
            self._gradients = GradientMeter(transport.batch)
            self._gradients.load_state_dict(measured)

    def _count(self, workers: int | None) -> None:
        """Go on with so many workers, anew in what was shared with another number of them."""
        if None not in (workers, self._workers) and workers != self._workers:
            self.restart()
        self._workers = self._workers if workers is None else workers

    def restart(self) -> None:
        """Forget what only the workers so far share: the phase and the control's memory."""
        self.exchanges, self._memory = 0, {}

    # ------------------------------------------------------------------ a step

    def tick(self, step: LocalStep) -> None:
        """Count one step, and make a round when it is due."""
        self.clock += 1
        self._worked = True
        if self.transport.size == 1:
            return
        if self._gradients is not None:
            if step.gradient_norm is None:
                self._gradients.add(step.parameters, step.gradient_scale, step.remeasure)
            else:
                self._gradients.add_norm(step.gradient_norm, self.pieces)
        if self._next is None:
            self._next = self._after(self.clock - 1, step.lr)
        if self.clock >= self._next:
            with self.guard.hold(), torch.no_grad(), record_function("consensus_opt::round"):
                self._round(step)

    def _round(self, step: LocalStep) -> None:
        waited = self._waited()
        self._refresh(step.parameters)
        self._run(step, self._open_round(step), waited)

    def _waited(self) -> float:
        return self.transport.wait_seconds + self.shards.wait_seconds

    def _run(self, step: LocalStep, lr: float, waited: float) -> None:
        """Make the round that the ranks have agreed on.

        Args:
            step: The local step before it.
            lr: Agreed learning rate.
            waited: What :meth:`_waited` was before the ranks met.
        """
        assert self._flat is not None
        ways, flat = (self.transport, self.shards), self._flat
        sent = sum(way.bytes_sent for way in ways)
        force = self.method.force
        pull = force.pull.at(self.clock, self.total_steps, lr)
        push = force.push.at(self.clock, self.total_steps, lr)
        for part in (flat, self._state):
            part.pack()
        outcome, squared, pushed = self._move(flat, pull, push)
        for part in (flat, self._state):
            part.unpack()
        self._slips.renew(flat.tensors)
        self.rounds, self._worked = self.rounds + 1, False
        self.exchanges += outcome.exchanges
        sent = sum(way.bytes_sent for way in ways) - sent
        self.bytes_sent += sent
        self._next = self._after(self.clock, lr)
        distance = outcome.distance or self._known_distance(squared)
        record = RoundRecord(
            step=self.clock,
            round=self.rounds,
            exchanges=outcome.exchanges,
            distance=None if distance is None else distance.value,
            distance_source=None if distance is None else distance.source,
            target=outcome.target,
            radius=None if squared is None or not self._counts() else squared.mean().sqrt().item(),
            pull=pull,
            push=push,
            pushed=pushed,
            bytes_sent=sent,
            wait_seconds=self._waited() - waited,
        )
        tell(self._sinks, record)

    def _move(
        self, flat: FlatParameters, pull: float, push: float
    ) -> tuple[Outcome, Tensor | None, bool]:
        """Form x_C and move.

        Returns:
            What the control did, ``||x - x_C||^2`` a worker where both were held, and whether a
            push that was due had a direction.
        """
        if pull == 1.0 and push == 0.0:
            return self._form(flat.buffers, flat.buffers), None, True
        if not self._centres:
            self._centres = [torch.empty_like(buffer) for buffer in flat.buffers]
        outcome = self._form(flat.buffers, self._centres)
        if outcome.exchanges == 0:
            return outcome, None, True
        with record_function("consensus_opt::force"):
            own = torch.stack(forces.squared_distance(flat.buffers, self._centres), dim=-1)
            squared, floor = total(own, self.shards).unbind(-1)
            forces.move(flat.buffers, self._centres, forces.line_weight(squared, floor, pull, push))
        return outcome, squared, push == 0.0 or bool((squared > floor).all())

    def _form(self, flats: Sequence[Tensor], outs: Sequence[Tensor]) -> Outcome:
        """Let the control decide, and exchange from ``flats`` to ``outs``."""
        outcome, state = self._decide(flats), self._state.buffers
        if outcome.exchanges:
            with record_function("consensus_opt::average"):
                self._rule.form(
                    [*flats, *state],
                    [*outs, *state],
                    self._counting,
                    self.exchanges,
                    outcome.exchanges,
                )
        return outcome

    def _decide(self, flats: Sequence[Tensor]) -> Outcome:
        """Measure what the control wants to know, and return what rank 0 makes of it."""
        control, clock, steps = self.method.control, self.clock, self.total_steps
        meter = control.meter_at(clock, steps)
        if meter is None:
            return control.decide(clock, steps, None, self._memory)
        with record_function("consensus_opt::measure"):
            beside = None if self._gradients is None else self._gradients.take(self.pieces)
            rows, extra = meter.gather(flats, self._counting, clock, beside, self.shards)
            forecast = Forecast(self._rule.foresee(rows, self.exchanges), extra)
            outcome = control.decide(clock, steps, forecast, self._memory)
            told = self._counting.gather(outcome.row(self.transport.batch))[0]
            return outcome.told(self.shards.gather(told)[0])

    def _known_distance(self, squared: Tensor | None) -> Distance | None:
        """Return the distance that an exact mean gives away: 0 after it replaced the parameters."""
        if not self.method.average.exact:
            return None
        value = 0.0 if squared is None else root_mean(squared, self._counting)
        return Distance(value, 0.0, "exact")

    def _after(self, step: int, lr: float) -> int:
        return self.method.timing.next_round(step, lr, self.total_steps)

    # ------------------------------------------------------------------ named collective calls

    def start(self, parameters: Sequence[Tensor], everything: Sequence[Tensor], lr: float) -> None:
        """Compare the ranks and give all of them rank 0's ``everything``."""
        if self.transport.size == 1:
            return
        with self.guard.hold():
            self._start(parameters, everything, lr)

    def _start(self, parameters: Sequence[Tensor], everything: Sequence[Tensor], lr: float) -> None:
        self._description = self._describe(parameters, everything)
        # Before the clock is read: it may move it.
        lr = self._meet("the start of training", LocalStep((), lr=lr)).lr
        self._next = self._after(self.clock, lr)
        self.watch(parameters)
        flat = FlatParameters(everything, self.transport.batch, views=False)
        with torch.no_grad():
            flat.pack()
            for buffer in flat.buffers:
                self.transport.broadcast(buffer)
            flat.unpack()
        if not self.transport.batch:
            self._slips.begin(parameters)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Measure these parameters' gradients at backward, where the control needs them."""
        if self._gradients is not None:
            self._gradients.watch(parameters)

    @contextmanager
    def averaged(
        self,
        operation: str | None,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        module: nn.Module | None = None,
    ) -> Iterator[None]:
        """Hold the mean in place of the parameters and buffers, and restore every bit after.

        Args:
            operation: What the ranks meet for; None if they have met.
            parameters: All parameters.
            buffers: Those that are averaged, as far as they are real-valued.
            module: All of its buffers are restored.
        """
        with ExitStack() as stack:
            with self.guard.hold():
                parts = self._collect(operation, parameters, buffers)
                stack.enter_context(restored(parts, module))
                self._average(parts)
            yield

    def synchronize(
        self, operation: str | None, parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        """Make all workers equal to the mean."""
        with self.guard.hold():
            self._average(self._collect(operation, parameters, buffers))

    def distances(self, parameters: Sequence[Tensor], met: bool = False) -> dict[int, float]:
        """Return the exact consensus distance of each parameter, by its ``id``."""
        with self.guard.hold():
            return self._distances(None if met else "consensus_distance()", parameters)

    def _distances(self, operation: str | None, parameters: Sequence[Tensor]) -> dict[int, float]:
        (part, _) = self._collect(operation, parameters, ())
        if self.transport.size == 1 or not part.tensors:
            return {id(tensor): 0.0 for tensor in part.tensors}
        means = [buffer.clone() for buffer in part.buffers]
        for mean in means:
            self._counting.mean(mean)
        pairs = zip(part.pieces(part.buffers), part.pieces(means), strict=True)
        squared = [forces.squared_distance([x], [mean])[0] for x, mean in pairs]
        own = total(torch.stack([s.cpu() for s in squared], dim=-1), self.shards)
        rows = self._counting.gather(own)
        each = rows.mean(0).sqrt().tolist()
        return {id(tensor): value for tensor, value in zip(part.tensors, each, strict=True)}

    def mean_of(self, value: float | Tensor) -> float:
        """Return the mean of a number over all ranks, or of one number for each stacked worker."""
        if self.transport.size > 1:
            self._meet("mean_of()")
        own = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        own = self.transport.of_worker(own.expand(self.transport.batch).unsqueeze(-1))
        return float(self.transport.gather(total(own, self.shards) / self.pieces).mean())

    def _collect(
        self, operation: str | None, parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> tuple[FlatParameters, FlatParameters]:
        """Lay out parameters and floating-point buffers, and meet the other ranks if not yet met.

        Parameters that took part in the last round do so here too if they are frozen for a while.
        """
        held = {id(tensor) for tensor in self._flat.tensors} if self._flat is not None else set()
        flat = self._refresh([p for p in parameters if p.requires_grad or id(p) in held])
        floating = [b for b in buffers if _is_real_valued(b)]
        extra = FlatParameters(floating, self.transport.batch, views=False)
        if self.transport.size > 1 and operation is not None:
            self._meet(operation)
        for part in (flat, extra):
            part.pack()
        return flat, extra

    @torch.no_grad()
    def _average(self, parts: tuple[FlatParameters, FlatParameters]) -> None:
        """Average parameters over the workers, and buffers, which are no pieces, over all ranks."""
        parameters, extra = parts
        for buffer in (*parameters.buffers, *extra.buffers):
            self._counting.mean(buffer)
        for buffer in extra.buffers:
            self.shards.mean(buffer)
        for part in parts:
            part.unpack()

    # ------------------------------------------------------------------ state

    def release(self) -> None:
        """Give parameters and state memory of their own again."""
        if self._flat is not None:
            self._flat.release()
        self._state.release()
        self._flat, self._state, self._centres = None, FlatParameters([]), []

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain types (contract C8)."""
        return {
            "version": VERSION,
            "clock": self.clock,
            "rounds": self.rounds,
            "exchanges": self.exchanges,
            "next_round": self._next,
            "timing": repr(self.method.timing),
            "workers": self._workers,
            "control": dict(self._memory),
            "gradients": self._measured_gradients(),
        }

    def _measured_gradients(self) -> dict[str, Any]:
        return self._carried if self._gradients is None else self._gradients.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; another timing starts anew from the saved clock.

        With another number of workers the phase of a topology and the control's memory start anew.

        Raises:
            ValueError: If a newer release wrote the state.
        """
        if state["version"] > VERSION:
            raise ValueError(
                f"the checkpoint has consensus state of version {state['version']}, and this "
                f"release reads up to {VERSION}; install a newer consensus-opt"
            )
        self._slips.forget()
        self.clock, self.rounds = state["clock"], state["rounds"]
        self.exchanges = state["exchanges"]
        same = state["timing"] == repr(self.method.timing)
        self._next = state["next_round"] if same else None
        self._memory = dict(state["control"])
        self._carried = state.get("gradients", {})
        if self._gradients is not None:
            self._gradients.load_state_dict(self._carried)
        self._met = False
        size, self._workers = self._workers, state.get("workers")
        self._count(size)


def _is_real_valued(tensor: Tensor) -> bool:
    """Tell whether a mean of such tensors makes sense; counters have none."""
    return tensor.is_floating_point() or tensor.is_complex()
