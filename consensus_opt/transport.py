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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from consensus_opt.checks import whole
from consensus_opt.errors import RankMismatchError
from consensus_opt.mixing import MixingMatrix


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
    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start to write the workers' mean of ``flat``, shape ``batch + (P,)``, to ``out``.

        ``out`` may be ``flat`` itself. All workers end with the same bits.
        """

    @abstractmethod
    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start ``out_m <- sum_j W[m, j] flat_j``; ``out`` may be ``flat`` itself.

        Neither tensor may be touched before ``wait()`` has returned. Terms are those of
        :func:`terms`, added one after the other, each product and each sum rounded once: every
        transport gives the same bits.
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

    def of_worker(self, values: Tensor) -> Tensor:
        """Return the mean of a handful of values over the ranks that are one worker together."""
        return values

    def mean(self, flat: Tensor) -> None:
        """Run :meth:`start_mean` to its end."""
        self.start_mean(flat, flat).wait()

    def exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor | None = None) -> None:
        """Run :meth:`start_exchange` to its end, in place by default."""
        self.start_exchange(flat, mixing, flat if out is None else out).wait()

    def give_up(self, reason: str) -> NoReturn:
        """Leave a round that others are in: raise, and see to it that they raise soon too."""
        raise RankMismatchError(reason)

    def abandon(self) -> None:  # noqa: B027 - most engines have nothing to close
        """Use this transport no more, after a call broke off: ranks that wait hear of it soon."""

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

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Copy ``flat`` to ``out``."""
        out.copy_(flat)
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
        TypeError: If ``n`` is no integer.
        ValueError: If ``n`` is below 1.
    """

    rank = 0

    def __init__(self, n: int) -> None:
        super().__init__()
        self.size = whole(n, "the number of workers", "StackedTransport(8)")
        self.batch = (self.size,)

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Write the mean row to every row."""
        out.copy_(_mean_row(flat).expand_as(flat))
        self.bytes_sent += all_reduce_bytes(flat[0], self.size) * self.size
        return Done()

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Compute ``W @ flat``, with the terms that real ranks add, in their order."""
        wide = flat.to(arithmetic_dtype(flat.dtype))
        rows = [terms(mixing, m) for m in range(self.size)]
        mixed = wide * _column([row.own for row in rows], wide)
        for slot in range(max(len(row.peers) for row in rows)):
            here = [m for m, row in enumerate(rows) if slot < len(row.peers)]
            peers, factors = zip(*(rows[m].peers[slot] for m in here), strict=True)
            index = torch.tensor(here, device=flat.device)
            received = wide[torch.tensor(peers, device=flat.device)]
            mixed.index_add_(0, index, received.mul_(_column(factors, wide)))
        out.copy_(mixed.mul_(_column([row.scale for row in rows], wide)))
        self.bytes_sent += mixing.messages * flat.shape[-1] * flat.element_size()
        return Done()

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite all rows with row ``source``."""
        flat.copy_(flat[source].clone().expand_as(flat))

    def gather(self, values: Tensor) -> Tensor:
        """Return the rows; all of them are here already."""
        return values.detach().cpu()

    def __repr__(self) -> str:
        return f"StackedTransport({self.size})"


@dataclass(frozen=True)
class Terms:
    """How one worker mixes: ``scale * (own x_m + sum over peers (factor x_j))``."""

    own: float
    peers: tuple[tuple[int, float], ...]
    scale: float


def terms(mixing: MixingMatrix, rank: int) -> Terms:
    """Return the terms of row ``rank``, peers ascending.

    Equal weights are multiplied in once, at the end, which saves a pass for each peer.
    """
    own, peers = mixing.self_weight(rank), mixing.receives(rank)
    if all(abs(weight - own) < 1e-12 for _, weight in peers):
        return Terms(1.0, tuple((peer, 1.0) for peer, _ in peers), own)
    return Terms(own, peers, 1.0)


def total(values: Tensor, shards: Transport) -> Tensor:
    """Return the sum of values over the pieces of a replica, the same bits on each of them.

    Args:
        values: A handful, of shape ``batch + (k,)``.
        shards: The way to the other pieces.
    """
    return values if shards.size == 1 else shards.gather(values).sum(0)


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


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
