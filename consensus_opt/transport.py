"""The one seam between the algorithm and the machines (contract C1).

Everything above this file is written once, for a *batch of workers* (contract C2). A real rank is
a batch of one: its flat tensors have shape ``(P,)``. :class:`StackedTransport` holds ``n`` workers
as the rows of ``(n, P)`` tensors, and runs the very code that runs on a cluster.

An engine adapter fills in four operations: mean, exchange, broadcast, gather. Adapters with
point-to-point messages inherit the exchange from :class:`~consensus_opt.exchange.PointToPoint`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from consensus_opt.topology import MixingMatrix


class Pending(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Block until the result is in place; raise ``PeerError`` when it cannot come."""


class Done:
    """A pending operation that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


class Transport(ABC):
    """How the workers reach each other.

    Attributes:
        rank: Number of this worker, ``0 <= rank < size``.
        size: Number of workers ``n``.
        batch: Leading shape of every tensor: ``()`` for a real rank, ``(n,)`` for stacked workers.
        bytes_sent: Payload bytes that the workers of this process have sent. An all-reduce counts
            as a ring all-reduce, ``2 (n - 1) / n`` times the tensor; headers and scalars do not
            count.
        wait_seconds: Time that this process has spent waiting for others.
    """

    rank: int
    size: int
    batch: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.wait_seconds = 0.0

    @abstractmethod
    def start_mean(self, flat: Tensor) -> Pending:
        """Start to replace ``flat``, shape ``batch + (P,)``, by its mean over the workers.

        All workers end with the same bits.
        """

    @abstractmethod
    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start ``out_m <- sum_j W[m, j] flat_j``; ``out`` may be ``flat`` itself.

        Neither tensor may be touched before ``wait()`` has returned. The terms are added in one
        order, own first and then ascending peers, each product and each sum rounded once, so that
        every transport gives the same bits.
        """

    @abstractmethod
    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite ``flat`` with worker ``source``'s bits; any dtype."""

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """Collect a handful of values, ``batch + (k,)``, from all workers into ``(n, k)``.

        The result is on the CPU and has the same bits everywhere, and so does what is computed
        from it: this is how ranks agree (contract C3).
        """

    def gather_neighbours(self, values: Tensor, mixing: MixingMatrix) -> Tensor:
        """Collect values, ``(k,)``, of the workers from which this one receives, ascending."""
        peers = [peer for peer, _ in mixing.receives(self.rank)]
        return self.gather(values)[peers]

    def mean(self, flat: Tensor) -> None:
        """Run :meth:`start_mean` to its end."""
        self.start_mean(flat).wait()

    def exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor | None = None) -> None:
        """Run :meth:`start_exchange` to its end, in place by default."""
        self.start_exchange(flat, mixing, flat if out is None else out).wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - start


class SoloTransport(Transport):
    """The only worker of its world: every operation is the identity."""

    rank = 0
    size = 1

    def start_mean(self, flat: Tensor) -> Pending:
        """Leave ``flat`` as it is."""
        return Done()

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Copy ``flat`` to ``out``."""
        out.copy_(flat)
        return Done()

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Leave ``flat`` as it is."""

    def gather(self, values: Tensor) -> Tensor:
        """Return the values as the only row."""
        return values.detach().cpu().unsqueeze(0)


class StackedTransport(Transport):
    """All ``n`` workers in one process, as the rows of ``(n, P)`` tensors.

    ``ConsensusOptimizer(SGD([X]), method, transport=StackedTransport(n))`` with ``X`` of shape
    ``(n, P)`` *is* n workers, for every elementwise inner optimizer. ``bytes_sent`` counts what
    all n workers would have sent together.

    Args:
        n: Number of workers, at least 1.

    Raises:
        ValueError: If ``n`` is not a positive integer.
    """

    rank = 0

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(
                f"StackedTransport needs a number of workers, a positive integer, and got {n!r}; "
                "write StackedTransport(8)"
            )
        super().__init__()
        self.size = n
        self.batch = (n,)

    def start_mean(self, flat: Tensor) -> Pending:
        """Replace every row by the mean row."""
        flat.copy_(_mean_row(flat).expand_as(flat))
        self.bytes_sent += all_reduce_bytes(flat[0], self.size) * self.size
        return Done()

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Compute ``W @ flat`` in the order of terms that real ranks use."""
        wide = flat.to(arithmetic_dtype(flat.dtype))
        mixed = wide * _column(mixing, [(m, m) for m in range(self.size)], wide)
        for pairs in _slots(mixing):
            rows = torch.tensor([m for m, _ in pairs], device=flat.device)
            peers = torch.tensor([j for _, j in pairs], device=flat.device)
            mixed.index_add_(0, rows, wide[peers].mul_(_column(mixing, pairs, wide)))
        out.copy_(mixed)
        self.bytes_sent += mixing.messages * flat.shape[-1] * flat.element_size()
        return Done()

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite all rows with row ``source``."""
        flat.copy_(flat[source].clone().expand_as(flat))

    def gather(self, values: Tensor) -> Tensor:
        """Return the rows; all of them are here already."""
        return values.detach().cpu()

    def gather_neighbours(self, values: Tensor, mixing: MixingMatrix) -> Tensor:
        """Return the rows: in one process, all workers are neighbours."""
        return self.gather(values)

    def __repr__(self) -> str:
        return f"StackedTransport({self.size})"


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are averaged: at least fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def all_reduce_bytes(flat: Tensor, size: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: ``2 (n - 1) / n`` of the tensor.

    Half precision travels as fp32, in which it is summed.
    """
    return 2 * (size - 1) * flat.numel() * arithmetic_dtype(flat.dtype).itemsize // size


def _mean_row(flat: Tensor) -> Tensor:
    return flat.sum(0, dtype=arithmetic_dtype(flat.dtype)).div_(flat.shape[0])


def _slots(mixing: MixingMatrix) -> Iterator[list[tuple[int, int]]]:
    """Yield, for k = 0, 1, ..., the pairs (worker, its k-th peer) of the workers that have one."""
    receives = [[peer for peer, _ in mixing.receives(m)] for m in range(mixing.n)]
    for slot in range(max(map(len, receives))):
        yield [(m, peers[slot]) for m, peers in enumerate(receives) if slot < len(peers)]


def _column(mixing: MixingMatrix, pairs: list[tuple[int, int]], like: Tensor) -> Tensor:
    weights = [mixing.weights[m, j] for m, j in pairs]
    return torch.tensor(weights, dtype=like.dtype, device=like.device).unsqueeze(-1)
