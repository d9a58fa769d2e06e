"""What more than one adapter needs: means of half precision, and who did not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from consensus_opt.errors import PeerError, RankMismatchError
from consensus_opt.transport import Pending, arithmetic_dtype

_LONGEST_ROLL_CALL = 30.0
_SPARE_SECONDS = 3.0
_LAST_ONE_SECONDS = 2.0
_FAILED = "failed"


class Waits(Protocol):
    """A transport that waits for others no longer than its timeout."""

    rank: int
    timeout: float


class Engine(Waits, Protocol):
    """A transport that can sum."""

    chunk_bytes: int

    def start_sum(self, flat: Tensor, average: bool) -> Pending:
        """Start to replace ``flat`` by its sum or mean, in its own precision."""


class HalfMean:
    """A mean in fp32 of a tensor in half precision, a chunk at a time."""

    def __init__(self, transport: Engine, flat: Tensor) -> None:
        self._transport, self._flat = transport, flat

    def wait(self) -> None:
        for chunk in torch.split(self._flat, max(1, self._transport.chunk_bytes // 2)):
            wide = chunk.to(arithmetic_dtype(chunk.dtype))
            self._transport.start_sum(wide, average=True).wait()
            chunk.copy_(wide)


class SignIn(Protocol):
    """What a roll call is signed in: a ``torch.distributed.Store``, or what does its part."""

    def set(self, key: str, value: str) -> None:
        """Sign as rank ``key``; raise RuntimeError if the list is out of reach."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether these ranks have signed."""

    def get(self, key: str) -> bytes:
        """Return what rank ``key``, which has signed, wrote."""


class RollCall:
    """Finds out, after a failure, which ranks do not answer, or why one of them gave up.

    A rank that fails signs a list in a store that all ranks reach. Ranks that wait fail too, soon
    (their peer has closed the group) or at their own timeout, and sign. Who does not sign is dead,
    stopped or still busy elsewhere. A rank that found a mismatch writes what it is.

    Args:
        store: A list that all ranks reach, used for nothing else.
        rank: Number of this rank.
        size: Number of ranks.
        timeout: Seconds by which ranks may come late to the roll call.
        keeper: The rank whose process keeps the store, if one of them does.

    Attributes:
        reason: What a rank wrote that found a mismatch; empty if none did.
    """

    reason = ""

    def __init__(
        self,
        store: SignIn,
        rank: int,
        size: int,
        timeout: float,
        keeper: int | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._seconds = min(timeout, _LONGEST_ROLL_CALL) + _SPARE_SECONDS
        self._absent: list[int] | None = None if keeper is None else [keeper]

    def absent(self) -> list[int] | None:
        """Return the ranks that did not sign; where the store does not answer, its keeper.

        None if that is unknown.
        """
        self._run(self._call, self._seconds + _SPARE_SECONDS)
        return self._absent

    def leave(self, reason: str) -> None:
        """Sign with what was found, for those who will call the roll."""
        self.reason = reason
        self._run(partial(self._sign, reason), _SPARE_SECONDS)

    def _run(self, call: Callable[[], None], seconds: float) -> None:
        # A client of a store whose process is stopped waits without end, so not in this thread.
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        caller.join(seconds)

    def _sign(self, text: str) -> None:
        with suppress(RuntimeError):
            self._store.set(str(self._rank), text)

    def _call(self) -> None:
        with suppress(RuntimeError):
            if self.reason:
                return
            self._store.set(str(self._rank), _FAILED)
            self._absent = self._wait_for_others()

    def _wait_for_others(self) -> list[int]:
        start = alone_since = time.monotonic()
        absent = [rank for rank in range(self._size) if rank != self._rank]
        while absent and time.monotonic() - start < self._seconds:
            if len(absent) > 1:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > _LAST_ONE_SECONDS:
                break
            time.sleep(0.02)
            for rank in [rank for rank in absent if self._store.check([str(rank)])]:
                absent.remove(rank)
                text = self._store.get(str(rank)).decode(errors="replace")
                if text != _FAILED:
                    self.reason = text
                    return absent
        return absent


def failure(
    transport: Waits, peer: int | None, roll_call: RollCall | None, cause: Exception
) -> PeerError | RankMismatchError:
    """Call the roll, and say why a rank gave up, or who is absent; else the peer waited for."""
    absent = None if roll_call is None else roll_call.absent()
    if roll_call is not None and roll_call.reason:
        return RankMismatchError(roll_call.reason)
    named = absent if absent is not None or peer is None else [peer]
    seconds = f"{transport.timeout:g} s"
    if named == []:
        text = (
            f"all ranks gave up in the call that rank {transport.rank} is in: they did not come to "
            f"it within {seconds} of each other"
        )
    else:
        who = f"rank {named[0]} does" if named and len(named) == 1 else f"ranks {named} do"
        text = (
            f"{who if named else 'a peer does'} not answer rank {transport.rank} within {seconds}: "
            "dead, stopped, or not in the same call. Look at the log of that rank"
        )
    return PeerError(
        f"{text}; where a rank is only slow, pass a larger timeout to ConsensusOptimizer; where it "
        "has fewer batches or stops earlier, write 'with optimizer.join():' around the loop. "
        f"The engine said: {cause}",
        tuple(named or ()),
    )
