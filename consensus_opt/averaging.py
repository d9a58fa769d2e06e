"""How the consensus variable x_C is formed from the other workers.

An average works on the flat buffers of one worker (or of stacked workers), one for each dtype. It
either replaces them, which needs no memory, or leaves them and writes x_C beside them, which lets
the force see both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Protocol

import numpy as np
from torch import Tensor

from consensus_opt.acceleration import accelerate, mode_factors, modes
from consensus_opt.checks import flag
from consensus_opt.mixing import Matrix, MixingMatrix
from consensus_opt.topology import Topology
from consensus_opt.transport import Transport


class Average(Protocol):
    """A rule that forms x_C."""

    @property
    def exact(self) -> bool:
        """Whether x_C is the mean x_A itself."""

    def validate(self, size: int) -> None:
        """Raise ``ValueError`` if the rule does not fit this number of workers."""

    def mixing(self, size: int, exchange: int) -> MixingMatrix | None:
        """Return the matrix of exchange number ``exchange``; None where all average with all."""

    def form(
        self,
        flats: Sequence[Tensor],
        outs: Sequence[Tensor],
        transport: Transport,
        first: int,
        exchanges: int,
    ) -> None:
        """Write x_C of ``flats`` to ``outs``, which may be the same tensors.

        Args:
            flats: Buffers of shape ``batch + (P,)``.
            outs: Buffers of the same shapes.
            transport: The way to the other workers.
            first: Number of exchanges made so far: the phase of a time-varying topology.
            exchanges: How many exchanges to make now.
        """

    def foresee(self, values: Matrix, first: int) -> Iterator[Matrix]:
        """Yield what 0, 1, 2, ... exchanges will make of linear functions of the parameters.

        Args:
            values: Of all workers, shape (n, K).
            first: As in :meth:`form`.

        Yields:
            The mean squared differences from the mean, shape (K,).
        """


@dataclass(frozen=True)
class AllReduce:
    """The mean over all workers: ``x_C = x_A``."""

    exact = True

    def validate(self, size: int) -> None:
        """Accept any number of workers."""

    def mixing(self, size: int, exchange: int) -> MixingMatrix | None:
        """Return None: all average with all."""
        return None

    def form(
        self,
        flats: Sequence[Tensor],
        outs: Sequence[Tensor],
        transport: Transport,
        first: int,
        exchanges: int,
    ) -> None:
        """All-reduce the buffers; further exchanges would change nothing."""
        pairs = zip(flats, outs, strict=True)
        for pending in [transport.start_mean(flat, out) for flat, out in pairs]:
            pending.wait()

    def foresee(self, values: Matrix, first: int) -> Iterator[Matrix]:
        """Yield the differences as they are, then none."""
        yield ((values - values.mean(0)) ** 2).mean(0)
        yield from repeat(np.zeros(values.shape[1]))


@dataclass(frozen=True)
class Gossip:
    """A weighted mean over the neighbours in a graph: ``x_C = sum_j W[m, j] x_j``.

    Args:
        topology: The graph and its weights.
        accelerated: Replace several exchanges that are made together by the polynomial of W that
            mixes best (see :mod:`consensus_opt.acceleration`); needs a fixed symmetric W.
    """

    topology: Topology
    accelerated: bool = False
    exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology):
            raise TypeError(
                f"topology is {self.topology!r}; it must be a Topology; write "
                "gossip_sgd('ring'), which takes names and graphs, or Gossip(topology('ring'))"
            )
        plain = flag(self.accelerated, "accelerated", "gossip_sgd('ring', accelerated=True)")
        object.__setattr__(self, "accelerated", plain)

    def validate(self, size: int) -> None:
        """Raise ``ValueError`` if the topology does not fit this number of workers."""
        self.topology.validate(size)
        if self.accelerated and self.topology.cycle(size) != 1:
            raise ValueError(
                f"the topology {self.topology.name!r} changes from exchange to exchange, and only "
                "a fixed one can be accelerated; use 'ring' or 'torus', or accelerated=False"
            )
        self._mixings(size, 0, 1)

    def mixing(self, size: int, exchange: int) -> MixingMatrix | None:
        """Return the topology's matrix in this phase."""
        return self.topology.mixing(size, exchange)

    def form(
        self,
        flats: Sequence[Tensor],
        outs: Sequence[Tensor],
        transport: Transport,
        first: int,
        exchanges: int,
    ) -> None:
        """Exchange with the neighbours; every exchange but the first starts from ``outs``."""
        source = flats
        for mixing in self._mixings(transport.size, first, exchanges):
            for flat, out in zip(source, outs, strict=True):
                transport.exchange(flat, mixing, out)
            source = outs

    def foresee(self, values: Matrix, first: int) -> Iterator[Matrix]:
        """Apply the exchanges, or where they are accelerated the polynomial of each mode of W."""
        left = values - values.mean(0)
        if not self.accelerated:
            for phase in count(first):
                yield (left**2).mean(0)
                left = self.topology.mixing(len(left), phase).weights @ left
        mixing = self.topology.mixing(len(left), first)
        energies = (modes(mixing)[1].T @ left) ** 2
        for exchanges in count():
            factors = mode_factors(mixing, exchanges) if exchanges else np.ones(len(left))
            yield factors**2 @ energies / len(left)

    def _mixings(self, size: int, first: int, exchanges: int) -> Sequence[MixingMatrix]:
        if self.accelerated:
            return accelerate(self.topology.mixing(size, first), exchanges)
        return [self.topology.mixing(size, first + k) for k in range(exchanges)]
