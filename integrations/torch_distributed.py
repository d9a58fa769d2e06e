"""torch.distributed as a transport: any process group, gloo on CPU or NCCL on GPU.

The transport works in a process group of its own over the same ranks, so that its messages never
meet the user's, and so that a failure can close it: then every rank that waits hears of it at once,
and a roll call through the store tells who did not answer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from consensus_opt.checks import seconds, whole
from consensus_opt.errors import PeerError, RankMismatchError
from consensus_opt.exchange import Message, PointToPoint
from consensus_opt.integrations.shared import HalfMean, RollCall, failure
from consensus_opt.transport import Pending, all_reduce_bytes, arithmetic_dtype


class TorchTransport(PointToPoint):
    """Workers are the ranks of a torch.distributed process group.

    Making one is a collective call over the ranks of the group.

    Args:
        group: The process group; the default group if not given.
        timeout: Seconds to wait for a peer before ``PeerError`` is raised.
        chunk_bytes: Size of a message.

    Attributes:
        group: The process group whose ranks these are; messages travel in one of our own.
        device: Where the group's engine wants its data.
        started: Works that may not be done.

    Raises:
        ValueError: If this rank is not in the group, or a number is not positive.
        RuntimeError: If torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        chunk_bytes: int = 32 << 20,
    ) -> None:
        super().__init__()
        _check(group, timeout, chunk_bytes)
        self.chunk_bytes, self.timeout = chunk_bytes, timeout
        self.group = group or dist.group.WORLD
        backend = dist.get_backend_config(group)
        with _fresh_store() as store:
            self._group: Any = dist.new_group(
                dist.get_process_group_ranks(self.group),
                timeout=timedelta(seconds=timeout),
                backend=backend,
                use_local_synchronization=True,
            )
        self.started: WeakSet[_Work] = WeakSet()
        self._ranks: list[int] = dist.get_process_group_ranks(self._group)
        self.rank, self.size = dist.get_rank(self._group), len(self._ranks)
        self._averages = "gloo" not in backend  # gloo has no ReduceOp.AVG
        self.device = torch.device("cuda" if self._averages else "cpu")
        own = distributed_c10d.PrefixStore(f"consensus_opt/{self._group.group_name}", store)
        self._roll_call = RollCall(own, self.rank, self.size, timeout)

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start an all-reduce in the result's memory; half precision is summed in fp32."""
        self.bytes_sent += all_reduce_bytes(flat, self.size)
        if arithmetic_dtype(flat.dtype) != flat.dtype:
            return HalfMean(self, out.copy_(flat))
        if out is flat:
            return self.start_sum(flat, average=True)
        # What is copied anyway is divided at no cost.
        return self.start_sum(torch.div(flat, self.size, out=out), average=False)

    def start_sum(self, flat: Tensor, average: bool) -> _Work:
        """Start to replace ``flat`` by its sum or mean, in its own precision."""
        native = average and self._averages
        operation = dist.ReduceOp.AVG if native else dist.ReduceOp.SUM
        with self.naming():
            work = dist.all_reduce(flat, operation, group=self._group, async_op=True)
        divide = average and not native
        return _Work(self, [(work, None)], (lambda: flat.div_(self.size)) if divide else None)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start point-to-point messages."""
        operations = [self._message(dist.irecv, *message) for message in receives]
        operations += [self._message(dist.isend, *message) for message in sends]
        if not operations:
            return _Work(self, [])
        peers: list[int | None] = [peer for peer, _ in (*receives, *sends)]
        with self.naming(peers[0]):
            works = dist.batch_isend_irecv(operations)
        if len(works) != len(peers):  # NCCL coalesces them into one
            peers = [None] * len(works)
        return _Work(self, list(zip(works, peers, strict=True)))

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Send rank ``source``'s bytes to all."""
        with self.naming():
            dist.broadcast(flat.view(torch.uint8), self._ranks[source], group=self._group)

    def gather(self, values: Tensor) -> Tensor:
        """All-gather the values."""
        own = values.detach().to(self.device).contiguous()
        rows = own.new_empty((self.size, *own.shape))
        with self.naming(), self.waiting():
            dist.all_gather(list(rows), own, group=self._group)
        return rows.cpu()

    def gather_neighbours(self, values: Tensor, mixing: Any) -> Tensor:
        """Collect values of the ranks from which this one receives."""
        return super().gather_neighbours(values.to(self.device), mixing)

    def _message(self, operation: Callable[..., Any], peer: int, data: Tensor) -> dist.P2POp:
        return dist.P2POp(operation, data, self._ranks[peer], self._group)

    @contextmanager
    def naming(self, peer: int | None = None) -> Iterator[None]:
        """Turn an engine's error into a ``PeerError`` that names who did not answer."""
        if self._group is not None and self._group not in distributed_c10d._world.pg_map:
            raise RuntimeError(
                "torch.distributed was shut down: destroy_process_group() was called after this "
                "transport was made; finish training before it, or make a new optimizer after the "
                "next init_process_group()"
            )
        try:
            if self._group is None:
                raise RuntimeError("the group was closed after an earlier failure")
            yield
        except RuntimeError as error:
            if isinstance(error, (PeerError, RankMismatchError)):
                raise
            self._close()
            raise failure(self, peer, self._roll_call, error) from error

    def give_up(self, reason: str) -> NoReturn:
        """Raise, after closing the group: ranks that wait for this one hear of it at once."""
        self._roll_call.leave(reason)
        self._close()
        super().give_up(reason)

    def abandon(self) -> None:
        """Close the transport's own group."""
        self._close()

    def _close(self) -> None:
        """Close the transport's own group, so that ranks that wait for this one stop waiting."""
        for work in self.started:
            work.forget()
        group, self._group = self._group, None  # the last reference keeps connections open
        if group is not None:
            name = group.group_name
            with suppress(Exception):
                distributed_c10d._abort_process_group(group)
            # The next group must not find this one's addresses in the store, under the same name.
            names: Any = distributed_c10d._world.pg_names
            names[object()] = name

    def __repr__(self) -> str:
        return f"TorchTransport(rank {self.rank} of {self.size})"


@contextmanager
def _fresh_store() -> Iterator[Any]:
    """Let new groups meet in a part of the default store that is this attempt's own.

    torchrun keeps the store when it restarts workers (``--max-restarts``), and in it the addresses
    and the roll calls of processes that are gone, under the names that groups have again.
    """
    groups: Any = distributed_c10d._world.pg_map
    default = dist.group.WORLD
    backend, store = groups[default]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    fresh = distributed_c10d.PrefixStore(f"consensus_opt/attempt {attempt}", store)
    groups[default] = backend, fresh
    try:
        yield fresh
    finally:
        groups[default] = backend, store


class _Work:
    """Started works with the peer that each one waits for, and what to do when all are done."""

    def __init__(
        self,
        transport: TorchTransport,
        works: Sequence[tuple[Any, int | None]],
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self._transport, self._works, self._finish = transport, deque(works), finish
        transport.started.add(self)

    def wait(self) -> None:
        with self._transport.naming():
            pass  # it was closed since
        while self._works:
            with self._transport.naming(self._works[0][1]), self._transport.waiting():
                self._works[0][0].wait()  # in no variable: see forget()
            self._works.popleft()
        if self._finish is not None:
            self._finish()

    def forget(self) -> None:
        """Let go of the works, each of which keeps the group's connections open."""
        self._works.clear()


def _check(group: dist.ProcessGroup | None, timeout: float, chunk_bytes: int) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "TorchTransport needs torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group('gloo') (or 'nccl') first"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group given; make the transport only on "
            "the group's ranks, or pass the group that this rank belongs to"
        )
    seconds(timeout)
    whole(chunk_bytes, "chunk_bytes", "chunk_bytes=32 << 20")
