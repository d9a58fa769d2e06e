"""What a control that knew the exact distance would have done, round by round.

Over a fixed symmetric W, q exchanges multiply what the workers differ by in the graph mode of
eigenvalue l by ``P_q(l)``. The energies of the modes before a round thus give the exact distance
after any q, ``Xi_q^2 = (1/n) sum_k P_q(l_k)^2 e_k``, and the fewest exchanges that meet the target,
without making any of them. The oracle judges the trajectory that the real control took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consensus_opt.acceleration import accelerate
from consensus_opt.averaging import Gossip
from consensus_opt.mixing import MixingMatrix
from consensus_opt.telemetry import RoundRecord
from consensus_opt.transport import Transport

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """One controlled round.

    Attributes:
        made: Exchanges that were made.
        needed: The fewest that meet the target; None where `most` do not.
        held: Whether the exact distance after the round met the target.
    """

    made: int
    needed: int | None
    held: bool


class Oracle:
    """Judges the controlled rounds of stacked workers; a telemetry sink.

    Args:
        mixing: The symmetric W.
        most: Most exchanges in a round.
        accelerated: Whether exchanges made together are.
    """

    def __init__(self, mixing: MixingMatrix, most: int, accelerated: bool) -> None:
        self.judged: list[Judged] = []
        self._most, self._accelerated, self._mixing = most, accelerated, mixing
        self._modes = np.linalg.eigh(mixing.weights)[1][:, :-1]
        self._table = np.stack([self._factors(q) for q in range(1, most + 1)])
        self._energies: Array | None = None
        self._left = np.ones(0)

    def see(self, flats: Sequence[Tensor], exchanges: int) -> None:
        """Take note of parameters of shape (n, P) that are about to make exchanges."""
        if self._energies is None:
            modes = torch.from_numpy(self._modes).to(flats[0].dtype)
            each = [(modes.T @ flat).double().square().sum(1) for flat in flats]
            self._energies = torch.stack(each).sum(0).numpy()
            self._left = np.ones(len(modes.T))
        self._left = self._left * self._factors(exchanges)

    def __call__(self, record: RoundRecord) -> None:
        """Judge the round that has ended."""
        energies, self._energies = self._energies, None
        if energies is None or record.target is None:
            return
        n = self._mixing.n
        reached = np.sqrt(self._table**2 @ energies / n) <= record.target
        needed = int(np.argmax(reached)) + 1 if reached.any() else None
        exact = float(np.sqrt(self._left**2 @ energies / n))
        self.judged.append(Judged(record.exchanges, needed, exact <= record.target))

    def _factors(self, exchanges: int) -> Array:
        """P(l) of each mode but the mean, in the order of `_modes`."""
        matrices = [self._mixing] * exchanges
        if self._accelerated:
            matrices = list(accelerate(self._mixing, exchanges))
        each = [(self._modes * (m.weights @ self._modes)).sum(0) for m in matrices]
        factors: Array = np.prod(each, axis=0)
        return factors


@dataclass(frozen=True)
class WatchedGossip(Gossip):
    """Gossip that shows an oracle what it is about to exchange."""

    oracle: Oracle | None = field(default=None, repr=False)

    def form(
        self,
        flats: Sequence[Tensor],
        outs: Sequence[Tensor],
        transport: Transport,
        first: int,
        exchanges: int,
    ) -> None:
        """Show, then exchange."""
        if self.oracle is not None:
            self.oracle.see(flats, exchanges)
        super().form(flats, outs, transport, first, exchanges)
