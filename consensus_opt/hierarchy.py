"""Workers that are whole nodes: all network cards carry load, and each byte crosses once.

Inside a node something else keeps the ranks equal in every step: DistributedDataParallel, Horovod
with the node's process set, or DeepSpeed at stage 0. Between nodes each of its g ranks exchanges
one g-th of the vector with its counterparts, and inside the node these parts are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from consensus_opt.mixing import MixingMatrix
from consensus_opt.transport import Pending, Transport


class HierarchicalTransport(Transport):
    """Workers are groups of ranks that hold the same parameters; a collective call.

    ::

        inside, across = TorchTransport(node_group), TorchTransport(counterparts_group)
        model = DistributedDataParallel(model, process_group=node_group)
        ConsensusOptimizer(optimizer, dppf(), transport=HierarchicalTransport(inside, across))

    ``bytes_sent`` counts what this rank sends to other nodes.

    Args:
        inside: Over the ranks of this node.
        across: Over the ranks with the same number in all nodes.

    Raises:
        ValueError: If the two do not cross each other in a grid.
    """

    def __init__(self, inside: Transport, across: Transport) -> None:
        super().__init__()
        self.inside, self.across = inside, across
        self.rank, self.size = across.rank, across.size
        for one, other, name in ((inside, across, "inside"), (across, inside, "across")):
            own = torch.tensor([float(other.rank), float(other.size)], dtype=torch.float64)
            places = {tuple(row) for row in one.gather(own).tolist()}
            if len(places) > 1:
                raise ValueError(
                    f"the ranks of {name}= have the places {sorted(places)} (rank, size) in the "
                    "other transport, and must have one and the same; write inside=TorchTransport("
                    "group of this node's ranks), across=TorchTransport(group of the ranks with "
                    "this local rank on all nodes)"
                )

    def start_mean(self, flat: Tensor, out: Tensor) -> Pending:
        """Start the mean of this rank's part; ``wait()`` puts the parts together."""
        parts, own = self._parts(out), self.inside.rank
        source = parts[own] if out is flat else self._parts(flat)[own]
        before = self.across.bytes_sent
        pending = self.across.start_mean(source, parts[own])
        self.bytes_sent += self.across.bytes_sent - before
        return _Parts(self, pending, parts)

    def start_exchange(self, flat: Tensor, mixing: MixingMatrix, out: Tensor) -> Pending:
        """Start to exchange this rank's part; ``wait()`` puts the parts together."""
        parts, own = self._parts(out), self.inside.rank
        before = self.across.bytes_sent
        pending = self.across.start_exchange(self._parts(flat)[own], mixing, parts[own])
        self.bytes_sent += self.across.bytes_sent - before
        return _Parts(self, pending, parts)

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Send node ``source``'s bits to all, each rank one part of them."""
        parts = self._parts(flat)
        self.across.broadcast(parts[self.inside.rank], source)
        self.put_together(parts)

    def gather(self, values: Tensor) -> Tensor:
        """Collect values of all nodes: those of the first rank in each."""
        rows = self.across.gather(values)
        first: Tensor = self.inside.gather(rows.flatten())[0]
        return first.view_as(rows)

    def of_worker(self, values: Tensor) -> Tensor:
        """Return the mean of a handful of values over the ranks of this node."""
        return self.inside.gather(values).mean(0)

    def give_up(self, reason: str) -> NoReturn:
        """Leave the round towards counterparts and the node."""
        self.inside.abandon()
        self.across.give_up(reason)

    def abandon(self) -> None:
        """Use neither transport any more."""
        self.inside.abandon()
        self.across.abandon()

    def put_together(self, parts: Sequence[Tensor]) -> None:
        """Give every rank of the node all parts."""
        for source, part in enumerate(parts):
            if part.numel():
                self.inside.broadcast(part, source)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.tensor_split(self.inside.size)

    def __repr__(self) -> str:
        return f"HierarchicalTransport(inside={self.inside!r}, across={self.across!r})"


class _Parts:
    """A part on its way, and the places of all of them."""

    def __init__(
        self, transport: HierarchicalTransport, pending: Pending, parts: Sequence[Tensor]
    ) -> None:
        self._transport, self._pending, self._parts = transport, pending, parts

    def wait(self) -> None:
        with self._transport.waiting():
            self._pending.wait()
            self._transport.put_together(self._parts)
