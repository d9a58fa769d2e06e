"""One collective call at a time, in the process that joined, and none after one that broke off.

Messages between ranks match by their order alone. A call that was left in the middle (Ctrl-C, a
dead peer, no memory) leaves messages under way that a later call would take for its own, and so do
two threads or a forked process that talk over the same connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from consensus_opt.errors import EndOfDataError, PeerError, RankMismatchError
from consensus_opt.transport import Transport

_IN_ORDER = (RankMismatchError, EndOfDataError, TypeError, ValueError)
"""Errors that are raised where no message is under way."""


class Guard:
    """Watches over the calls that go through an optimizer's transports.

    Args:
        transport: The way to the other workers.
        shards: The way to the other pieces of this replica.

    Stacked workers and a single one have no peers, and may break off as they like.
    """

    def __init__(self, transport: Transport, shards: Transport) -> None:
        self._ways = [way for way in (transport, shards) if way.size > 1 and not way.batch]
        self._rank, self._pid = transport.rank, os.getpid()
        self._again = "write optimizer.transport = TorchTransport()"
        if shards.size > 1:
            self._again = "write optimizer.connect(TorchTransport(...), shards=TorchTransport(...))"
        self._lock = threading.RLock()
        self._broken: tuple[str, tuple[int, ...]] | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold around a collective call; calls may be nested in one thread.

        Raises:
            RuntimeError: In a forked process, or while another thread is in such a call.
            PeerError: After a call that broke off.
        """
        self._check()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} called the optimizer while another "
                "thread is in step(), averaged(), synchronize() or consensus_distance(); one call "
                "at a time, in the same order on all ranks; make them in one thread"
            )
        try:
            yield
        except _IN_ORDER:
            raise
        except BaseException as error:
            if self._ways and self._broken is None:
                text = f"{type(error).__name__} {error}".strip().split("\n")[0]
                self._broken = text, getattr(error, "ranks", ())
                for way in self._ways:
                    way.abandon()
            raise
        finally:
            self._lock.release()

    def _check(self) -> None:
        if self._ways and os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self._rank} (process {self._pid}), "
                "whose connections to the other ranks it cannot use; in a data-loader worker read "
                "data, and call step(), averaged() and synchronize() in the process that made the "
                "optimizer"
            )
        if self._broken is not None:
            cause, ranks = self._broken
            raise PeerError(
                f"an earlier call of rank {self._rank} broke off in the middle ({cause}), so its "
                "messages and those of the other ranks no longer match, and parameters may be half "
                "averaged; start all ranks again from the last checkpoint, or load it and give all "
                f"of them a new transport: {self._again}",
                ranks,
            )
