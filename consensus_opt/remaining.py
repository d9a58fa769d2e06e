"""Rounds among those who are left, when some workers have ended.

All workers go on making the same calls, for the collectives of engines know no absentees; those who
have ended count for nothing. A mean is over the others. In gossip, what a worker would send to one
that has ended goes where that one's messages would have gone: with S those who are left and M the
others, the weights among S become

    W_SS + W_SM (I - W_MM)^-1 W_MS,

the stochastic complement. Rows and columns still sum to 1, a symmetric matrix stays symmetric, and
a connected graph connected: a ring closes over the gap, the leaves of a star without its centre
meet each other. Weights that merely returned to their senders would cut both apart.

Source: Meyer, "Stochastic Complementation, Uncoupling Markov Chains, and the Theory of Nearly
Reducible Systems", SIAM Review 1989.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from consensus_opt.averaging import Average, Gossip
from consensus_opt.graphs import Topology
from consensus_opt.mixing import Matrix, MixingMatrix
from consensus_opt.transport import Pending, Transport


class Members(Transport):
    """A transport in which only some of the workers count; the others take part with nothing.

    Args:
        everyone: The transport of all workers.
        members: Ranks of those that count, ascending.

    Attributes:
        counts: Whether this worker does.
    """

    def __init__(self, everyone: Transport, members: Sequence[int]) -> None:
        self._everyone, self._members = everyone, list(members)
        self.wait_seconds = 0.0
        self.rank, self.size, self.batch = everyone.rank, everyone.size, everyone.batch
        self.counts = everyone.rank in self._members

    @property
    def bytes_sent(self) -> int:
        """What the transport of all workers has counted."""
        return self._everyone.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._everyone.bytes_sent = count

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start to write the mean over those that count to ``out``, on all ranks."""
        pending = self._everyone.start_mean(flat if self.counts else out.zero_(), out)
        return _Rescaled(pending, out, self.size / len(self._members))

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start an exchange; the matrix leaves out who does not count."""
        return self._everyone.start_exchange(flat, mixing, out)

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite ``flat`` on all ranks."""
        self._everyone.broadcast(flat, source)

    def gather(self, values: Tensor) -> Tensor:
        """Collect the values of those that count, on all ranks."""
        return self._everyone.gather(values)[self._members]


class _Rescaled:
    """A mean over all workers on its way, which becomes one over those that count."""

    def __init__(self, pending: Pending, flat: Tensor, factor: float) -> None:
        self._pending, self._flat, self._factor = pending, flat, factor

    def wait(self) -> None:
        self._pending.wait()
        self._flat.mul_(self._factor)


@dataclass(frozen=True)
class Remaining(Topology):
    """A topology in which only ``members`` exchange; the others keep what they have.

    Its matrices are of all ``workers`` or, asked for as many workers, of the members alone.
    """

    topology: Topology
    workers: int
    members: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the whole topology."""
        return self.topology.name

    def validate(self, n: int) -> None:
        """Accept the number of all workers, and that of the members."""
        if n not in (self.workers, len(self.members)):
            raise ValueError(
                f"{n} workers do not fit; {self.workers} were there and {len(self.members)} are "
                f"left; write mixing({self.workers})"
            )

    def cycle(self, n: int) -> int | None:
        """Return the whole topology's cycle."""
        return self.topology.cycle(self.workers)

    def _weights(self, n: int, phase: int) -> Matrix:
        gone = sorted(set(range(self.workers)) - set(self.members))
        left = complement(self.topology.mixing(self.workers, phase).weights, gone)
        return left if n == self.workers else left[self.members, :][:, self.members]


def complement(weights: Matrix, gone: Sequence[int]) -> Matrix:
    """Return W without the exchanges of ``gone``, whose weights go to the others, see the module.

    One worker is taken out after the other, by elementwise operations: all machines get the same
    bits, and an entry is 0 on all of them or on none.
    """
    left: Matrix = weights.copy()
    for m in gone:
        through, back = left[:, m].copy(), left[m].copy()
        through[m] = back[m] = 0.0
        if through.any():
            left += through[:, None] * back / (1.0 - left[m, m])
        left[m] = left[:, m] = 0.0
        left[m, m] = 1.0
    return left


def among(average: Average, workers: int, members: tuple[int, ...]) -> Average:
    """Return the average, formed only among these ``members`` of so many workers."""
    if isinstance(average, Gossip):
        return replace(average, topology=Remaining(average.topology, workers, members))
    return average
