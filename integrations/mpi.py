"""MPI as a transport, through mpi4py: any MPI-3 library, any communicator.

The transport works on a duplicate of the communicator, so that its messages never meet the user's,
and only ever calls MPI from the thread that calls it. MPI waits without end; every operation here
is non-blocking, and every wait polls against a time limit. MPI also lets the other ranks wait when
one of them fails, so a failure here sends a token to all, and under mpirun an uncaught exception
ends the job. Whoever started MPI ends it: mpi4py, if it was started by its import.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from consensus_opt.checks import flag, seconds, whole
from consensus_opt.exchange import Message, PointToPoint
from consensus_opt.integrations.mpi_process import (
    MPI,
    abort_when_uncaught,
    check_running,
    check_thread,
    is_gpu_aware,
)
from consensus_opt.integrations.shared import RollCall, failure
from consensus_opt.transport import Pending, all_reduce_bytes, arithmetic_dtype

_DATA, _FAILED = 0, 32767  # Tags. The second can travel on the user's communicator: an unusual one.
_LONGEST_TOKEN = 1024
_SPIN_SECONDS = 0.01
_PAUSES = (2e-5, 1e-3)
_SUMS_AT_ONCE = 4
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
_ABANDONED: list[MPI.Request] = []
"""After a failure MPI may still write into the buffers of these, which must not be freed."""


class MPITransport(PointToPoint):
    """Workers are the ranks of an MPI communicator.

    Making one is a collective call over the communicator. Under mpirun it also sees to it that an
    uncaught exception of one rank ends the whole job, after that rank's traceback is printed.

    Args:
        comm: Any intra-communicator of mpi4py; ``MPI.COMM_WORLD`` if not given.
        timeout: Seconds to wait for a peer before ``PeerError`` is raised.
        chunk_bytes: Size of a message.
        gpu_aware: Whether MPI may be given GPU memory in gossip; asked of the library if not given.
            Otherwise, and in collectives, data on a GPU travel through pinned memory.

    Raises:
        TypeError: If ``comm`` is no intra-communicator.
        ValueError: If this rank is not in it, or a number is out of range.
        RuntimeError: If MPI is not running, or does not allow calls from this thread.
        PeerError: If the other ranks do not make theirs.
    """

    largest_count = 2**31 - 1
    """What MPI counts to in one message."""
    _owns = False

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout: float = 300.0,
        chunk_bytes: int = 8 << 20,
        gpu_aware: bool | None = None,
    ) -> None:
        super().__init__()
        check_running()
        comm = MPI.COMM_WORLD if comm is None else comm
        _check(comm, timeout, chunk_bytes, self.largest_count)
        self.timeout, self.chunk_bytes = timeout, chunk_bytes
        given = None if gpu_aware is None else flag(gpu_aware, "gpu_aware", "gpu_aware=False")
        self.gpu_aware = is_gpu_aware() if given is None else given
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._pid = os.getpid()
        self._talk_over(comm)
        check_thread()
        duplicate, request = self._comm.Idup()
        self.complete([request])
        duplicate.Set_errhandler(MPI.ERRORS_RETURN)
        self._talk_over(duplicate)
        self._owns = True
        abort_when_uncaught()

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start all-reduces of the result's chunks; half precision is summed in fp32."""
        self.bytes_sent += all_reduce_bytes(flat, self.size)
        out.copy_(flat)
        return _Mean(self, out)

    def start_sum(self, wire: Tensor) -> MPI.Request:
        """Start to replace a tensor on the CPU by its sum."""
        check_thread()
        return self._comm.Iallreduce(MPI.IN_PLACE, wire.numpy())

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start point-to-point messages."""
        check_thread()
        staged: dict[int, Tensor] = {}
        requests, landings = [], []
        for peer, target in receives:
            room = target if self._is_direct(target) else _room(target)
            requests.append(self._comm.Irecv(self._buffer(room), peer, _DATA))
            landings.append((target, room))
        for peer, data in sends:
            if data.data_ptr() not in staged:
                staged[data.data_ptr()] = data if self._is_direct(data) else _room(data, fill=True)
            wire = staged[data.data_ptr()]
            requests.append(self._comm.Isend(self._buffer(wire), peer, _DATA))
        return _Messages(self, requests, [peer for peer, _ in (*receives, *sends)], landings)

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Send rank ``source``'s bytes to all, in chunks."""
        check_thread()
        for chunk in torch.split(flat.view(torch.uint8), self.chunk_bytes):
            wire = chunk if chunk.device.type == "cpu" else _room(chunk, fill=True)
            self.complete([self._comm.Ibcast([wire.numpy(), MPI.BYTE], source)])
            _land(wire, chunk)

    def gather(self, values: Tensor) -> Tensor:
        """All-gather the values, in chunks."""
        check_thread()
        own = values.detach().cpu().contiguous()
        data = own.view(torch.uint8).view(-1)
        rows = data.new_empty((self.size, data.numel()))
        done = 0
        for chunk in torch.split(data, max(1, self.largest_count // self.size)):
            part = rows.new_empty((self.size, chunk.numel()))
            send, receive = [chunk.numpy(), MPI.BYTE], [part.numpy(), MPI.BYTE]
            self.complete([self._comm.Iallgather(send, receive)])
            rows[:, done : done + chunk.numel()] = part
            done += chunk.numel()
        return rows.view(own.dtype).view(self.size, *own.shape)

    def complete(self, requests: list[MPI.Request], peers: Sequence[int | None] = (None,)) -> None:
        """Wait for requests up to the time limit; MPI makes progress only while it is polled."""
        start, pause = time.monotonic(), _PAUSES[0]
        with self._naming(requests, peers), self.waiting():
            while not MPI.Request.Testall(requests):
                waited = time.monotonic() - start
                if waited < _SPIN_SECONDS:
                    _give_way()
                    continue
                if waited > self.timeout:
                    raise TimeoutError(f"MPI did not complete the call in {self.timeout:g} s")
                if self._owns and self._tokens.any():
                    raise TimeoutError("another rank gave up")
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])

    @contextmanager
    def _naming(self, requests: list[MPI.Request], peers: Sequence[int | None]) -> Iterator[None]:
        """Turn a failure into a ``PeerError`` that names who did not answer."""
        try:
            yield
        except (MPI.Exception, TimeoutError) as error:
            _ABANDONED.extend(requests)
            late = [p for p, r in zip(peers, requests, strict=True) if not _is_done(r)]
            raise failure(self, late[0] if late else None, self._roll_call, error) from error

    def give_up(self, reason: str) -> NoReturn:
        """Raise, after telling the ranks that wait for this one."""
        self._roll_call.leave(reason)
        super().give_up(reason)

    def _talk_over(self, comm: MPI.Intracomm) -> None:
        self._comm, self._tokens = comm, _Tokens(comm)
        self._roll_call = _RollCall(self._tokens, self.rank, self.size, self.timeout)

    def _is_direct(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" or self.gpu_aware

    def _buffer(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return [tensor.numpy(), MPI.BYTE]
        torch.accelerator.current_stream(tensor.device).synchronize()  # MPI knows no streams
        return [tensor, MPI.BYTE]

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be half gone
            ours = self._owns and os.getpid() == self._pid and not MPI.Is_finalized()
            if ours and not _ABANDONED and (MPI.Is_thread_main() or _calls_from_anywhere()):
                self._comm.Free()

    def __repr__(self) -> str:
        return f"MPITransport(rank {self.rank} of {self.size})"


class _Messages:
    """Started messages; what arrived for a GPU is copied there at the end."""

    def __init__(
        self,
        transport: MPITransport,
        requests: list[MPI.Request],
        peers: Sequence[int],
        landings: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._transport, self._requests, self._peers = transport, requests, peers
        self._landings = landings

    def wait(self) -> None:
        self._transport.complete(self._requests, self._peers)
        for target, room in self._landings:
            _land(room, target)


class _Mean:
    """All-reduces of a few chunks at a time: small enough to stay in the cache while they travel.

    They are also small enough for what MPI counts to.
    """

    def __init__(self, transport: MPITransport, flat: Tensor) -> None:
        self._transport = transport
        self._wide = arithmetic_dtype(flat.dtype)
        length = max(1, transport.chunk_bytes // 8 // self._wide.itemsize)
        self._todo = deque(torch.split(flat, length))
        self._travelling: deque[tuple[Tensor, Tensor, MPI.Request]] = deque()
        for _ in range(min(_SUMS_AT_ONCE, len(self._todo))):
            self._start()

    def wait(self) -> None:
        while self._travelling:
            chunk, wire, request = self._travelling.popleft()
            self._transport.complete([request])
            _land(wire.div_(self._transport.size), chunk)
            if self._todo:
                self._start()

    def _start(self) -> None:
        chunk = self._todo.popleft()
        wire = chunk.to(self._wide)
        if wire.device.type != "cpu":
            wire = _room(wire, fill=True)
        self._travelling.append((chunk, wire, self._transport.start_sum(wire)))


class _RollCall(RollCall):
    """A roll call in the calling thread, because MPI may not allow calls from another."""

    def _run(self, call: Callable[[], None], seconds: float) -> None:
        call()


class _Tokens:
    """The list that is signed in a roll call, in messages: who signs sends a text to all."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._texts: dict[str, bytes] = {}

    def any(self) -> bool:
        """Tell whether a rank has signed."""
        return bool(self._texts) or self._comm.Iprobe(MPI.ANY_SOURCE, _FAILED)

    def set(self, key: str, value: str) -> None:
        """Sign as rank ``key``."""
        text = value.encode()[:_LONGEST_TOKEN]  # MPI sends what is short without being waited for
        others = (peer for peer in range(self._comm.Get_size()) if peer != int(key))
        _ABANDONED.extend(self._comm.Isend([text, MPI.BYTE], peer, _FAILED) for peer in others)

    def check(self, keys: list[str]) -> bool:
        """Tell whether these ranks have signed."""
        return all(k in self._texts or self._comm.Iprobe(int(k), _FAILED) for k in keys)

    def get(self, key: str) -> bytes:
        """Return what rank ``key``, which has signed, wrote."""
        if key not in self._texts:
            text = bytearray(_LONGEST_TOKEN)
            status = MPI.Status()
            self._comm.Recv([text, MPI.BYTE], int(key), _FAILED, status)
            self._texts[key] = bytes(text[: status.Get_count(MPI.BYTE)])
        return self._texts[key]


def _room(tensor: Tensor, fill: bool = False) -> Tensor:
    """Return memory on the CPU of the tensor's shape, pinned where there is a GPU."""
    pinned = torch.cuda.is_available()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return room.copy_(tensor) if fill else room


def _land(wire: Tensor, target: Tensor) -> None:
    if wire is not target:
        target.copy_(wire, non_blocking=True)


def _calls_from_anywhere() -> bool:
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return False


def _check(comm: Any, timeout: float, chunk_bytes: int, most: int) -> None:
    if comm == MPI.COMM_NULL:
        raise ValueError(
            f"rank {MPI.COMM_WORLD.Get_rank()} is not in the communicator given (MPI.COMM_NULL); "
            "make the transport only on the communicator's ranks"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"comm must be an intra-communicator of mpi4py, and is {comm!r}; write "
            "MPITransport(MPI.COMM_WORLD), or merge an inter-communicator with comm.Merge()"
        )
    seconds(timeout)
    whole(chunk_bytes, "chunk_bytes", "chunk_bytes=8 << 20", most=most)  # to which MPI counts
