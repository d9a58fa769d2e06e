"""The consensus distance ``Xi = sqrt((1/n) sum_m ||x_m - x_A||^2)``: exact, sketched, or bounded.

Exact costs a mean over all workers. The *sketch* costs one pass over memory and a few kilobytes:
with random signs, the same on all ranks, the vector is folded onto K values, ``y_k = sum_b s_kb
x_kb``. It is linear, so sketches differ as the vectors do, and ``E ||y_i - y_A||^2 = ||x_i -
x_A||^2``; and what exchanges will do to the vectors they do to the sketches, so that one
measurement tells the distance after any number of exchanges that are not made yet. The *bound*
costs nothing beside gossip, but is only as tight as the spectrum of the graph: no one factor turns
what neighbours see into Xi, because gossip kills fast modes first.

Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021 (the distance,
the bound); Alon, Matias & Szegedy, "The Space Complexity of Approximating the Frequency Moments",
1999 (the sketch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from consensus_opt.checks import real, whole_field
from consensus_opt.mixing import Matrix, Spectrum
from consensus_opt.transport import SoloTransport, Transport, arithmetic_dtype, total

_FOLD = 1 << 20
_SPAN = 256
_BLOCK = 512
_STARTS = 1 << 16
_BETWEEN_PIECES = 0x9E3779B9
"""Odd and of 32 bits, which are all that torch takes of a seed."""


@dataclass(frozen=True)
class Distance:
    """A measured consensus distance.

    Attributes:
        value: Xi, in units of the parameters.
        error: Its standard error, relative; 0 for an exact one.
        source: "exact" or "sketch".
        extra: Means over the workers of what was measured beside it.
    """

    value: float
    error: float
    source: str
    extra: tuple[float, ...] = ()

    @property
    def upper(self) -> float:
        """The value and two standard errors."""
        return self.value * (1 + 2 * self.error)


def root_mean(squared: Tensor, transport: Transport) -> float:
    """Return ``sqrt(mean_m squared_m)`` over all workers, the same bits on every rank."""
    return transport.gather(squared.unsqueeze(-1)).mean().sqrt().item()


def of_squares(squares: Matrix, extra: tuple[float, ...] = ()) -> Distance:
    """Return Xi from the mean squared differences of each of K sketched values, shape (K,).

    They are K estimates of ``Xi^2 / K``; their spread gives the standard error.
    """
    total = float(squares.sum())
    spread = float(squares.std(ddof=1))
    error = 0.5 * math.sqrt(len(squares)) * spread / total if total > 0 else 0.0
    return Distance(math.sqrt(total), error, "sketch", extra)


@dataclass(frozen=True)
class Sketch:
    """Estimates Xi from K random projections of each worker.

    Args:
        values: K. A rank sends ``8 K`` bytes to each other, in a small all-gather.
        seed: Of the signs; the same on all ranks.
        fraction: Part of the parameters that is looked at, 1, 1/2, ..., 1/64: of so many
            neighbouring blocks of 512, one at random, anew each time. The estimate stays unbiased;
            its own error does not count what differences that are few and far between add.

    Raises:
        TypeError: If ``values`` or ``seed`` is no integer.
        ValueError: If ``values`` is not a power of two from 16 to 65,536, the seed is negative, or
            the fraction is another one.
    """

    values: int = 512
    seed: int = 0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        example = "Sketch(values=512)"
        whole_field(self, "values", example, name="the number of values of a sketch")
        whole_field(self, "seed", "Sketch(seed=0)", least=0, name="the seed of a sketch")
        if self.values not in {2**k for k in range(4, 17)}:
            raise ValueError(
                f"a sketch has {self.values!r} values; it must be a power of two from 16 to 65536; "
                f"write {example}"
            )
        wrong = (
            f"a sketch looks at the fraction {self.fraction!r} of the parameters; it must be 1 or "
            "a half of it, halved up to five times; write Sketch(fraction=1/8)"
        )
        object.__setattr__(self, "fraction", real(self.fraction, wrong))
        if self.fraction not in {0.5**k for k in range(7)}:
            raise ValueError(wrong)

    def measure(
        self,
        flats: Sequence[Tensor],
        transport: Transport,
        turn: int = 0,
        shards: Transport | None = None,
    ) -> Distance:
        """Return an estimate of Xi; a collective call, with the arguments of :meth:`gather`."""
        rows, _ = self.gather(flats, transport, turn, shards=shards)
        return of_squares(((rows - rows.mean(0)) ** 2).mean(0))

    def gather(
        self,
        flats: Sequence[Tensor],
        transport: Transport,
        turn: int = 0,
        beside: Tensor | None = None,
        shards: Transport | None = None,
    ) -> tuple[Matrix, tuple[float, ...]]:
        """Return all workers' sketches, ``(n, K)`` and the same bits everywhere; collective.

        Args:
            flats: Buffers of shape ``batch + (P,)``.
            transport: The way to the other workers.
            turn: Number of the measurement, the same on all ranks. Each takes other signs, so that
                no direction stays hidden.
            beside: Values of shape ``batch + (j,)`` whose means over the workers are returned too.
            shards: The way to the other pieces of this replica, over which all values are summed.
        """
        shards = shards or SoloTransport()
        own = self.project(flats, turn, shards.rank) if flats else self._nothing(transport)
        row = own if beside is None else torch.cat([own, beside.to(own)], dim=-1)
        for way in (shards, transport):
            way.bytes_sent += (way.size - 1) * row.numel() * row.element_size()
        rows = transport.gather(total(row, shards))
        return rows[:, : self.values].numpy(), tuple(rows[:, self.values :].mean(0).tolist())

    def project(self, flats: Sequence[Tensor], turn: int = 0, piece: int = 0) -> Tensor:
        """Return ``y``, shape ``batch + (K,)``, fp64; each piece of a replica has other signs."""
        batch = flats[0].shape[:-1]
        seed = self.seed * 1_000_003 + turn + 1 + piece * _BETWEEN_PIECES
        generator = torch.Generator().manual_seed(seed)
        folds = torch.zeros(batch.numel(), self.values, dtype=torch.float64, device=flats[0].device)
        for flat in (flat for flat in flats if flat.numel()):
            rows = flat.reshape(-1, flat.shape[-1])
            start = int(torch.randint(_STARTS, (), generator=generator))
            signs = _signs(self.seed, flat.device, arithmetic_dtype(flat.dtype))[start:]
            chosen = self._choose(rows.shape[-1], generator).to(flat.device)
            left = rows.shape[-1] - len(chosen) * _BLOCK * (self._every - 1)
            turns = _random_signs(-(-left // _SPAN), generator).to(signs).unsqueeze(-1)
            turns[: len(chosen) * (_BLOCK // _SPAN)] *= math.sqrt(self._every)
            folded = [self._fold(_sample(row, chosen, self._every), signs, turns) for row in rows]
            folds += torch.stack(folded).to(folds)
        return folds.reshape(*batch, self.values)

    def _nothing(self, transport: Transport) -> Tensor:
        return torch.zeros(*transport.batch, self.values, dtype=torch.float64)

    @property
    def _every(self) -> int:
        return round(1 / self.fraction)

    def _choose(self, width: int, generator: torch.Generator) -> Tensor:
        """Return the number of one block of each group; the rest of the vector has no group."""
        groups = width // (_BLOCK * self._every) if self.fraction < 1 else 0
        within = torch.randint(self._every, (groups,), generator=generator)
        return torch.arange(groups) * self._every + within

    def _fold(self, vector: Tensor, signs: Tensor, turns: Tensor) -> Tensor:
        """Fold one vector onto K values.

        Value p gets the sign of its place, ``p mod _FOLD``, times that of its span of 256. Signs of
        places alone would let values err together that lie a multiple of ``_FOLD`` apart. This way
        the pass reads the vector once, at the speed of memory.
        """
        unit = max(self.values, _SPAN)
        places = signs.new_zeros(min(_FOLD, -(-len(vector) // unit) * unit))
        for number, part in enumerate(torch.split(vector, _FOLD)):
            count = len(part) // _SPAN
            spans, rest = part[: count * _SPAN].reshape(count, _SPAN), part[count * _SPAN :]
            first = number * (_FOLD // _SPAN)
            own_turns = turns[first : first + count]
            places.view(-1, _SPAN)[:count].addcmul_(spans.to(places.dtype), own_turns)
            places[count * _SPAN : len(part)].add_(rest)
        return places.mul_(signs[: len(places)]).view(-1, self.values).sum(0)


def _sample(vector: Tensor, chosen: Tensor, every: int) -> Tensor:
    """Return the chosen blocks of a vector and what belongs to no group."""
    if not len(chosen):
        return vector
    grouped = len(chosen) * every * _BLOCK
    blocks, rest = vector[:grouped].reshape(-1, _BLOCK), vector[grouped:]
    sample = vector.new_empty(len(chosen) * _BLOCK + len(rest))
    torch.index_select(blocks, 0, chosen, out=sample[: len(chosen) * _BLOCK].view(-1, _BLOCK))
    sample[len(chosen) * _BLOCK :] = rest
    return sample


def bound(theta: float, spectrum: Spectrum) -> tuple[float, float]:
    """Return the range of Xi that neighbours' differences allow, for a fixed symmetric W.

    ``Theta / (1 + sqrt(1 - p)) <= Xi <= Theta / (1 - sqrt(1 - p))``, with
    ``Theta^2 = mean_m ||sum_j w_mj x_j - x_m||^2`` (Kong et al., 2021).

    Args:
        theta: Theta, of the parameters before the exchange, as Xi is.
        spectrum: Of the mixing matrix.
    """
    rest = math.sqrt(max(0.0, 1.0 - spectrum.p))
    return theta / (1 + rest), theta / (1 - rest) if rest < 1 else math.inf


@lru_cache(maxsize=4)
def _signs(seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return _random_signs(_FOLD + _STARTS, generator).to(device, dtype)


def _random_signs(count: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randint(0, 2, (count,), generator=generator) - 1
