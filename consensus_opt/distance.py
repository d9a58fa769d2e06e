"""The consensus distance ``Xi = sqrt((1/n) sum_m ||x_m - x_A||^2)``: exact, sketched, or bounded.

Exact costs a mean over all workers. The *sketch* costs one pass over memory and a few kilobytes:
with random signs, the same on all ranks, the vector is folded onto K values, ``y_k = sum_b s_kb
x_kb``. It is linear, so sketches differ as the vectors do, and ``E ||y_i - y_A||^2 = ||x_i -
x_A||^2``. The *bound* costs nothing beside gossip, but is only as tight as the spectrum of the
graph: no one factor turns what neighbours see into Xi, because gossip kills fast modes first.

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

from consensus_opt.checks import whole_field
from consensus_opt.mixing import Spectrum
from consensus_opt.transport import Transport, arithmetic_dtype

_CHUNK = 1 << 16
_POOL = 1 << 19
_TURNS = 1 << 16


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


@dataclass(frozen=True)
class Sketch:
    """Estimates Xi from K random projections of each worker.

    The K squares are K estimates of ``Xi^2 / K``; their spread gives the standard error.

    Args:
        values: K. A rank sends ``16 K`` bytes in a small all-reduce.
        seed: Of the signs; the same on all ranks.

    Raises:
        TypeError: If ``values`` or ``seed`` is no integer.
        ValueError: If ``values`` is not a power of two from 16 to 65,536, or the seed is negative.
    """

    values: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        example = "Sketch(values=512)"
        whole_field(self, "values", example, name="the number of values of a sketch")
        whole_field(self, "seed", "Sketch(seed=0)", least=0, name="the seed of a sketch")
        if self.values not in {2**k for k in range(4, 17)}:
            raise ValueError(
                f"a sketch has {self.values!r} values; it must be a power of two from 16 to 65536; "
                f"write {example}"
            )

    def measure(
        self, flats: Sequence[Tensor], transport: Transport, beside: Tensor | None = None
    ) -> Distance:
        """Return an estimate of Xi; a collective call.

        Args:
            flats: Buffers of shape ``batch + (P,)``.
            transport: The way to the other workers.
            beside: Values of shape ``batch + (j,)`` whose means travel along, into ``extra``.
        """
        own = self.project(flats)
        row = torch.cat([own, own.square(), *([] if beside is None else [beside.to(own)])], dim=-1)
        transport.mean(row)
        mean = row.reshape(-1, row.shape[-1])[0].cpu()
        k = self.values
        # In fp64 the difference of squares loses nothing that fp32 parameters hold.
        squares = (mean[k : 2 * k] - mean[:k].square()).clamp_(min=0.0)
        total = float(squares.sum())
        error = 0.5 * math.sqrt(k) * float(squares.std()) / total if total > 0 else 0.0
        return Distance(math.sqrt(total), error, "sketch", tuple(mean[2 * k :].tolist()))

    def project(self, flats: Sequence[Tensor]) -> Tensor:
        """Return ``y``, shape ``batch + (K,)``, fp64."""
        batch = flats[0].shape[:-1]
        rows = [flat.reshape(-1, flat.shape[-1]) for flat in flats]
        each = [self._project_row([row[m] for row in rows]) for m in range(len(rows[0]))]
        return torch.stack(each).reshape(*batch, self.values)

    def _project_row(self, vectors: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(self.values, dtype=torch.float64, device=vectors[0].device)
        chunk = 0
        for vector in vectors:
            wide = arithmetic_dtype(vector.dtype)
            signs = _signs(self.seed, vector.device, wide)
            width = min(_CHUNK, -(-len(vector) // self.values) * self.values)
            folded = vector.new_zeros(width, dtype=wide)
            for part in torch.split(vector, _CHUNK):
                # Each chunk takes its signs from another place, so that no two are alike, and turns
                # them all or none: else pairs of chunks equally far apart would err together, five
                # times as much for smooth differences of 25 M values.
                start, turn = chunk * 40503 % (_POOL - _CHUNK), _turns(self.seed)[chunk % _TURNS]
                part_signs = signs[start : start + len(part)]
                folded[: len(part)].addcmul_(part.to(wide), part_signs, value=turn)
                chunk += 1
            total += folded.double().view(-1, self.values).sum(0).to(total.device)
        return total


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
    return _random_signs(seed)[:_POOL].to(device, dtype)


@lru_cache(maxsize=4)
def _turns(seed: int) -> tuple[int, ...]:
    return tuple(_random_signs(seed)[_POOL:].tolist())


def _random_signs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randint(0, 2, (_POOL + _TURNS,), generator=generator) - 1
