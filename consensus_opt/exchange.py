"""Gossip over point-to-point messages, in chunks that are mixed as they arrive (contract C6).

A chunk is sent straight from the parameters' own buffer. While the next chunks travel, the chunk
that has arrived is mixed in: it is small enough to still be in the cache, so an exchange costs
little more than its messages, and needs only a few chunks of memory.

Products and sums are separate operations, never a fused multiply-add, so that each rounds once and
the bits of the result do not depend on how the vector was cut.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from consensus_opt.mixing import MixingMatrix
from consensus_opt.transport import Pending, Terms, Transport, arithmetic_dtype, terms

_CACHED = 1 << 18
"""Elements of a part that stays in the cache while it is mixed."""

Message = tuple[int, Tensor]
"""A peer, and the bytes to send to it or the place for what comes from it."""


class PointToPoint(Transport):
    """A transport whose engine can send a tensor from one rank to another.

    Attributes:
        chunk_bytes: Size of a message; the whole tensor is cut into such messages.
        window: Number of chunks on their way at the same time.
        local_headers: Whether neighbours can compare headers for less than all ranks can.
    """

    chunk_bytes: int = 32 << 20
    window: int = 4
    local_headers = True

    def __init__(self) -> None:
        super().__init__()
        self._staging: dict[tuple[torch.device, torch.dtype, int, int], Tensor] = {}

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start all these messages, given as contiguous ``uint8`` tensors.

        Messages between the same two ranks arrive in the order in which they were posted.
        """

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start to send ``flat`` in chunks; ``wait()`` mixes what arrives into ``out``."""
        self.bytes_sent += len(mixing.sends(self.rank)) * flat.numel() * flat.element_size()
        return _ChunkedExchange(self, flat, mixing, out)

    def gather_neighbours(self, values: Tensor, mixing: MixingMatrix) -> Tensor:
        """Collect values of the workers from which this one receives."""
        own = values.detach().contiguous()
        peers = [peer for peer, _ in mixing.receives(self.rank)]
        rows = own.new_empty((len(peers), *own.shape))
        sends = [(peer, own.view(torch.uint8)) for peer in mixing.sends(self.rank)]
        receives = [(peer, row.view(torch.uint8)) for peer, row in zip(peers, rows, strict=True)]
        self.post(sends, receives).wait()
        return rows.cpu()

    def staging(self, like: Tensor, length: int, slots: int) -> Tensor:
        """Return room for received chunks, ``(slots, length)``, kept from exchange to exchange.

        Fresh memory would cost as much as the messages: the system clears each page of it.
        """
        key = (like.device, like.dtype, length, slots)
        if key not in self._staging:
            self._staging[key] = like.new_empty((slots, length))
        return self._staging[key]


class _ChunkedExchange:
    """One exchange on its way: a window of chunks travels, the rest waits its turn."""

    def __init__(
        self, transport: PointToPoint, flat: Tensor, mixing: MixingMatrix, out: Tensor
    ) -> None:
        self._transport, self._flat, self._out = transport, flat, out
        self._sends = mixing.sends(transport.rank)
        self._terms = terms(mixing, transport.rank)
        length = max(1, min(transport.chunk_bytes // flat.element_size(), flat.numel()))
        self._todo = deque(
            slice(start, min(start + length, flat.numel()))
            for start in range(0, flat.numel(), length)
        )
        window, peers = min(transport.window, len(self._todo)), len(self._terms.peers)
        room = transport.staging(flat, length, window * peers)
        self._travelling: deque[tuple[slice, list[Tensor], Pending]] = deque()
        for slot in range(window):
            self._post(list(room[slot * peers : (slot + 1) * peers]))

    def wait(self) -> None:
        while self._travelling:
            chunk, received, pending = self._travelling.popleft()
            pending.wait()
            length = chunk.stop - chunk.start
            arrived = [staged[:length] for staged in received]
            mix(self._flat[chunk], self._terms, arrived, self._out[chunk])
            if self._todo:
                self._post(received)

    def _post(self, staging: list[Tensor]) -> None:
        chunk = self._todo.popleft()
        wire = self._flat[chunk].view(torch.uint8)
        length = chunk.stop - chunk.start
        receives = [
            (peer, staged[:length].view(torch.uint8))
            for (peer, _), staged in zip(self._terms.peers, staging, strict=True)
        ]
        pending = self._transport.post([(peer, wire) for peer in self._sends], receives)
        self._travelling.append((chunk, staging, pending))


def mix(own: Tensor, terms: Terms, received: Sequence[Tensor], out: Tensor) -> None:
    """Compute ``out <- scale (own_factor * own + sum_j factor_j received_j)`` for one chunk.

    Half precision is mixed in fp32 and rounded once at the end.

    Args:
        own: The worker's own chunk, shape ``(c,)``.
        terms: Its factors.
        received: The chunk of each peer, in the order of ``terms.peers``; spoilt.
        out: Where the result goes; may be ``own``.
    """
    length = _CACHED if own.device.type == "cpu" else max(1, own.numel())
    for start in range(0, own.numel(), length):
        part = slice(start, start + length)
        _mix_part(own[part], terms, [chunk[part] for chunk in received], out[part])


def _mix_part(own: Tensor, terms: Terms, received: Sequence[Tensor], out: Tensor) -> None:
    wide = arithmetic_dtype(own.dtype)
    total = out if wide == own.dtype else torch.empty_like(own, dtype=wide)
    if terms.own != 1.0:
        torch.mul(own.to(wide), terms.own, out=total)
    elif total is not own:
        total.copy_(own)
    for (_, factor), chunk in zip(terms.peers, received, strict=True):
        total.add_(chunk.to(wide) if factor == 1.0 else chunk.to(wide).mul_(factor))
    if terms.scale != 1.0:
        total.mul_(terms.scale)
    if total is not out:
        out.copy_(total)
