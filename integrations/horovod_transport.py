"""Horovod's collectives as a transport.

Horovod knows its operations by name, and waits for them without end. So gossip is an alltoall whose
splits are zero but for the neighbours, a name is taken again as soon as it is free (Horovod
negotiates names that it knows faster), and every wait polls against a time limit.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from consensus_opt.checks import seconds, whole
from consensus_opt.errors import PeerError
from consensus_opt.exchange import Message, PointToPoint
from consensus_opt.integrations.shared import HalfMean, RollCall, failure
from consensus_opt.mixing import MixingMatrix
from consensus_opt.transport import Pending, all_reduce_bytes, arithmetic_dtype

try:
    import horovod.torch as hvd
    from horovod.torch import mpi_ops
except ImportError as error:
    raise ImportError(
        "consensus_opt.integrations.horovod needs Horovod built for this torch, and it does not "
        "load; after torch is installed, write HOROVOD_WITH_PYTORCH=1 pip install "
        "--no-build-isolation horovod==0.28.1 (with CXX=tools/cxx17 of our repository where torch "
        "needs C++17; `make engines` there does all of it)"
    ) from error

__all__ = ["HorovodPeerError", "HorovodTransport", "hvd", "initialization"]

_CONNECT_SECONDS = 10.0
_LONGEST_PAUSE = 1e-3


class HorovodPeerError(PeerError, hvd.HorovodInternalError):  # type: ignore[misc]
    """A peer is gone or late; ``hvd.elastic.run`` takes it as its sign to restore and reset."""


class HorovodTransport(PointToPoint):
    """Workers are the ranks of a Horovod process set.

    Making one is a collective call over the ranks of the set. Rank 0 then listens on a TCP port,
    over which the ranks tell after a failure who is still there; where a rank cannot reach it,
    errors say that a peer is missing without naming it.

    Args:
        process_set: The process set; all ranks if not given. ``rank`` and ``size`` count within it.
        timeout: Seconds to wait for a peer before ``PeerError`` is raised.
        chunk_bytes: Size of a message; all messages of a chunk together stay below 2 GiB.

    Raises:
        ValueError: If this rank is not in the set, or a number is out of range.
        RuntimeError: If Horovod is not initialised.
        PeerError: If the other ranks do not make theirs.
    """

    local_headers = False
    largest_sum = 1 << 30
    """Elements of one all-reduce; MPI counts in 31 bits."""

    def __init__(
        self, process_set: Any = None, timeout: float = 300.0, chunk_bytes: int = 8 << 20
    ) -> None:
        super().__init__()
        self.process_set = hvd.global_process_set if process_set is None else process_set
        _check(self.process_set, timeout, chunk_bytes)
        self.timeout, self.chunk_bytes = timeout, chunk_bytes
        self.rank, self.size = self.process_set.rank(), self.process_set.size()
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._prefix, self._names = "consensus_opt", set[str]()
        self._roll_call: RollCall | None = None
        if self.size > 1:
            self._roll_call = self._open_roll_call()

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start an all-reduce in the result's memory; half precision is summed in fp32."""
        self.bytes_sent += all_reduce_bytes(flat, self.size)
        if arithmetic_dtype(flat.dtype) != flat.dtype:
            return HalfMean(self, out.copy_(flat))
        if out is flat:
            return self.start_sum(flat, average=True)
        # What is copied anyway is divided at no cost.
        return self.start_sum(torch.div(flat, self.size, out=out), average=False)

    def start_sum(self, flat: Tensor, average: bool) -> Pending:
        """Start to replace ``flat`` by its sum or mean, in its own precision."""
        sums = [
            self._start("sum", hvd.allreduce_async_, part, op=hvd.Sum)
            for part in torch.split(flat, self.largest_sum)
        ]
        return _All(sums, (lambda: flat.div_(self.size)) if average else None)

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start to send ``flat`` in chunks, each by one alltoall in which all ranks take part."""
        self._nothing = flat.new_empty(0, dtype=torch.uint8)
        return super().start_exchange(flat, mixing, out)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start one alltoall; ranks without neighbours take part with nothing."""
        splits = torch.zeros(self.size, dtype=torch.int32)
        for peer, data in sends:
            splits[peer] = data.numel()
        parts = [data for _, data in sends]
        wire = parts[0] if len(parts) == 1 else torch.cat([self._nothing, *parts])
        started = self._start("alltoall", hvd.alltoall_async, wire, splits)
        places = [place for _, place in receives]
        return _All([started], lambda: _scatter(started.result[0], places))

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Send rank ``source``'s bytes to all, in chunks."""
        root = self.process_set.ranks[source]
        for part in torch.split(flat.view(torch.uint8), self.chunk_bytes):
            self._start("broadcast", hvd.broadcast_async_, part, root).wait()

    def gather(self, values: Tensor) -> Tensor:
        """All-gather the values."""
        own = values.detach().cpu().contiguous()
        kind = f"gather {own.numel()}"
        started = self._start(kind, hvd.allgather_async, own.view(torch.uint8).view(-1))
        started.wait()
        rows: Tensor = started.result.view(own.dtype).view(self.size, *own.shape)
        return rows

    def _start(
        self, kind: str, call: Callable[..., int], tensor: Tensor, *arguments: Any, **options: Any
    ) -> _Operation:
        names = (f"{self._prefix} {kind} {number}" for number in count())
        name = next(name for name in names if name not in self._names)
        with self.naming():
            handle = call(tensor, *arguments, name=name, process_set=self.process_set, **options)
        self._names.add(name)
        return _Operation(self, handle, name)

    def finish(self, handle: int, name: str) -> Any:
        """Wait for an operation, up to the time limit, and return what Horovod returns."""
        deadline, pause = time.monotonic() + self.timeout, 1e-5
        with self.naming(), self.waiting():
            while not hvd.poll(handle):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"'{name}' is not complete after {self.timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._names.discard(name)
            return hvd.synchronize(handle)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn an engine's error into a ``PeerError`` that names who did not answer."""
        try:
            yield
        except (hvd.HorovodInternalError, TimeoutError) as error:
            told = failure(self, None, self._roll_call, error)
            if isinstance(told, PeerError):
                told = HorovodPeerError(str(told), told.ranks)
            raise told from error

    def _open_roll_call(self) -> RollCall | None:
        """Reach a store in rank 0's process, which lives on where Horovod fails."""
        store, address = None, torch.zeros(256, dtype=torch.uint8)
        if self.rank == 0:
            store = _store("127.0.0.1", 0, keeper=True)
            text = f"{_host_name()}:{store.port}".encode()
            address[: len(text)] = torch.tensor(list(text))
        self.broadcast(address)
        host, port = bytes(address.tolist()).rstrip(b"\0").decode().rsplit(":", 1)
        self._prefix = f"consensus_opt {port}"  # a living transport's port is its own
        if self.rank != 0:
            with suppress(RuntimeError):
                store = _store(host, int(port), keeper=False)
        reached = self.gather(torch.tensor([float(store is not None)]))
        if store is None or not reached.all():
            return None
        return RollCall(store, self.rank, self.size, self.timeout, keeper=0)

    def __repr__(self) -> str:
        return f"HorovodTransport(rank {self.rank} of {self.size})"


class _Operation:
    """One started operation of Horovod; ``result`` is there after ``wait()``."""

    result: Any = None

    def __init__(self, transport: HorovodTransport, handle: int, name: str) -> None:
        self._transport, self._handle, self._name = transport, handle, name

    def wait(self) -> None:
        self.result = self._transport.finish(self._handle, self._name)


class _All:
    """Several operations, and what to do when all are done."""

    def __init__(self, parts: Sequence[_Operation], then: Callable[[], Any] | None) -> None:
        self._parts, self._then = parts, then

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
        if self._then is not None:
            self._then()


def initialization() -> object:
    """Return an object that ``hvd.init()`` makes anew each time."""
    handles: object = mpi_ops._handle_map
    return handles


def _scatter(received: Tensor, places: Sequence[Tensor]) -> None:
    for place, part in zip(places, torch.split(received, [p.numel() for p in places]), strict=True):
        place.copy_(part)


def _store(host: str, port: int, keeper: bool) -> Any:
    wait = timedelta(seconds=_CONNECT_SECONDS)
    options: dict[str, Any] = {"is_master": keeper, "wait_for_workers": False, "timeout": wait}
    return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]


def _host_name() -> str:
    """Return the name by which the other ranks of this job reach this machine."""
    if hvd.local_size() == hvd.size():
        return "127.0.0.1"
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _check(process_set: Any, timeout: float, chunk_bytes: int) -> None:
    if not hvd.is_initialized():
        raise RuntimeError(
            "HorovodTransport needs Horovod, which is not initialised; call hvd.init() first"
        )
    if process_set.process_set_id is None:
        raise ValueError(
            f"Horovod does not know {process_set}; write hvd.init(process_sets=[process_set]) or "
            "hvd.add_process_set(process_set) first, on all ranks"
        )
    if not process_set.included():
        raise ValueError(
            f"rank {hvd.rank()} is not in the process set given, which has ranks "
            f"{process_set.ranks}; make the transport only on these, or pass a set with this rank"
        )
    seconds(timeout)
    most = (2**31 - 1) // process_set.size()  # Horovod counts in 31 bits
    whole(chunk_bytes, "chunk_bytes", "chunk_bytes=8 << 20", most=most)
