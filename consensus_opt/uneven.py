"""Rounds of workers that have different numbers of batches.

A worker that has run out of data follows the others: it makes the calls that they make, which the
header of each round tells it, until none has data. What it did since the last round still counts
in the next one; from then on it counts for nothing (see :mod:`consensus_opt.remaining`). At the end
a worker that missed a round takes the mean of those that did not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from consensus_opt.agreement import ASKING, ENDED, OWING
from consensus_opt.buffers import averaged_buffers, calls
from consensus_opt.errors import EndOfDataError
from consensus_opt.meeting import LocalStep
from consensus_opt.remaining import Members
from consensus_opt.rounds import Rounds

MODES = ("continue", "stop")


class UnevenRounds(Rounds):
    """Rounds in which a worker may run out of data before the others."""

    def ends_in_a_round(self, lr: float) -> bool:
        """Tell whether the next step does."""
        if self._next is None:
            self._next = self._after(self.clock, lr)
        return self.clock + 1 >= self._next and self.transport.size > 1

    def ask(self, step: LocalStep) -> None:
        """Ask the others, before a step that ends in a round, whether they have data for it.

        Raises:
            EndOfDataError: On all ranks that have data, if one has none.
        """
        with self.guard.hold():
            self._refresh(step.parameters)
            agreed = self._meet(ASKING, step)
        if agreed.ended:
            raise EndOfDataError(
                f"ranks {list(agreed.ended)} have run out of data before step {self.clock + 1}, "
                "and join('stop') ends the loop on all ranks",
                self,
            )

    def outlast(self, step: LocalStep, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        """Follow the other workers until none has data, and catch up with them.

        Args:
            step: The last local step.
            parameters: All parameters.
            buffers: Those of the model.
        """
        if self.transport.size > 1:
            with self.guard.hold():
                while self._follow(step, parameters, buffers):
                    pass
                self._catch_up()
        self.part()

    def part(self) -> None:
        """Let all workers count again."""
        self.uneven, self._absent = None, ()
        self._let_count(range(self.transport.size))

    def follow_step(self, step: LocalStep, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        """Count a step that the others take, and follow them if they make a round after it."""
        if self.ends_in_a_round(step.lr):
            with self.guard.hold():
                self._follow(step, parameters, buffers)
        else:
            self.clock += 1

    @torch.no_grad()
    def _follow(
        self, step: LocalStep, parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> bool:
        """Make the next call of those that have data; False where there is none to make."""
        waited, stop = self._waited(), self.uneven == "stop"
        self._refresh(step.parameters)
        agreed = self._meet(OWING if self._worked or stop else ENDED, step)
        if agreed.operation in (ENDED, ASKING):
            return False
        if agreed.operation == "step()":
            self._settle(step, agreed)
            self._run(step, agreed.lr, waited)
        elif agreed.operation in calls("averaged"):
            with self.averaged(None, parameters, averaged_buffers(agreed.operation, buffers)):
                pass
        elif agreed.operation in calls("synchronize"):
            self.synchronize(None, parameters, averaged_buffers(agreed.operation, buffers))
        else:
            self.distances(parameters, met=True)
        return True

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Give the workers that missed a round the mean of those that did not."""
        if self.uneven == "stop" or not self._absent or self._flat is None:
            return
        present = set(range(self.transport.size)) - set(self._absent)
        transport = Members(self.transport, sorted(present))
        for part in (self._flat, self._state):
            part.pack()
            for buffer in part.buffers:
                mean = buffer.clone() if transport.counts else buffer
                transport.mean(mean)
            if not transport.counts:
                part.unpack()
