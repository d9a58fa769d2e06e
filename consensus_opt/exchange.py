"""Gossip over point-to-point messages, in chunks that are mixed as they arrive (contract C6).

A chunk is sent straight from the parameters' own buffer. While the next chunks travel, the chunk
that has arrived is mixed in: it is small enough to still be in the cache, so an exchange costs
little more than its messages, and needs only a few chunks of memory.

Every product and every sum rounds once (``mul_``, then ``add_``, never a fused multiply-add): the
bits of the result do not depend on how the vector was cut.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from consensus_opt.topology import MixingMatrix
from consensus_opt.transport import Pending, Transport, arithmetic_dtype

Message = tuple[int, Tensor]
"""A peer, and the bytes to send to it or the place for what comes from it."""


class PointToPoint(Transport):
    """A transport whose engine can send a tensor from one rank to another.

    Attributes:
        chunk_bytes: Size of a message; the whole tensor is cut into such messages.
        window: Number of chunks on their way at the same time.
    """

    chunk_bytes: int
    window: int = 3

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
        pending = self.post(sends, receives)
        with self.waiting():
            pending.wait()
        return rows.cpu()


class _ChunkedExchange:
    """One exchange on its way: a window of chunks travels, the rest waits its turn."""

    def __init__(
        self, transport: PointToPoint, flat: Tensor, mixing: MixingMatrix, out: Tensor
    ) -> None:
        self._transport = transport
        self._flat, self._out = flat, out
        self._receives = mixing.receives(transport.rank)
        self._sends = mixing.sends(transport.rank)
        self._self_weight = mixing.self_weight(transport.rank)
        step = max(1, transport.chunk_bytes // flat.element_size())
        self._todo = deque(
            (start, min(start + step, flat.numel())) for start in range(0, flat.numel(), step)
        )
        self._staging = [
            [flat.new_empty(min(step, flat.numel())) for _ in self._receives]
            for _ in range(min(transport.window, len(self._todo)))
        ]
        self._travelling: deque[tuple[slice, list[Tensor], Pending]] = deque()
        for staging in self._staging:
            self._post(staging)

    def wait(self) -> None:
        while self._travelling:
            chunk, received, pending = self._travelling.popleft()
            with self._transport.waiting():
                pending.wait()
            length = chunk.stop - chunk.start
            terms = [
                (weight, staged[:length])
                for (_, weight), staged in zip(self._receives, received, strict=True)
            ]
            mix(self._flat[chunk], self._self_weight, terms, self._out[chunk])
            if self._todo:
                self._post(received)

    def _post(self, staging: list[Tensor]) -> None:
        chunk = slice(*self._todo.popleft())
        wire = self._flat[chunk].view(torch.uint8)
        length = chunk.stop - chunk.start
        receives = [
            (peer, staged[:length].view(torch.uint8))
            for (peer, _), staged in zip(self._receives, staging, strict=True)
        ]
        pending = self._transport.post([(peer, wire) for peer in self._sends], receives)
        self._travelling.append((chunk, staging, pending))


def mix(own: Tensor, self_weight: float, terms: list[tuple[float, Tensor]], out: Tensor) -> None:
    """Compute ``out <- self_weight * own + sum_j w_j received_j`` for one chunk.

    Half precision is mixed in fp32 and rounded once at the end. The received tensors are spoilt.

    Args:
        own: The worker's own chunk, shape (c,).
        self_weight: Its weight ``W[m, m]``.
        terms: Weight and received chunk of each peer, in ascending order of the peers.
        out: Where the result goes; may be ``own``.
    """
    wide = arithmetic_dtype(own.dtype)
    total = out if wide == own.dtype else own.new_empty(own.shape, dtype=wide)
    torch.mul(own, self_weight, out=total) if wide == own.dtype else total.copy_(own).mul_(
        self_weight
    )
    for weight, received in terms:
        total.add_(received.to(wide).mul_(weight))
    if total is not out:
        out.copy_(total)
