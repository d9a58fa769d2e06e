"""What one topology does with n workers: its links, its spectrum, and what its exchanges leave.

"What is left of a distance" has two readings, and both are given, because they differ widely on a
ring. *At worst*, the workers differ along the slowest mode: ``||R - J||_2``, where R is the product
of the exchanges. *Random* differences, as gradient noise makes them, are alike in all modes:
``||R - J||_F / sqrt(n - 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from consensus_opt.checks import whole
from consensus_opt.mixing import Matrix, MixingMatrix, spectral_norm
from consensus_opt.steady import is_fixed_and_symmetric, mode_factors
from consensus_opt.topology import Topology

FRACTIONS = (1 / 2, 1 / 8, 1 / 100)
_SAMPLED = 64
_MOST = 1 << 24
_MOST_ACCELERATED = 64


@dataclass(frozen=True)
class Left:
    """What exchanges leave of a consensus distance, as fractions from 0 to 1."""

    worst: float
    random: float


@dataclass(frozen=True)
class Reach:
    """Fewest exchanges that leave at most ``fraction``; None where it takes too many, or none can.

    Attributes:
        fraction: Of the distance before the exchanges.
        worst: For any differences.
        random: For random differences.
        accelerated_worst: With exchanges that are accelerated together, for any differences.
        accelerated_random: The same for random differences.
    """

    fraction: float
    worst: int | None
    random: int | None
    accelerated_worst: int | None
    accelerated_random: int | None


@dataclass(frozen=True)
class Profile:
    """The facts of a topology.

    Attributes:
        name: Its name.
        workers: n.
        cycle: Exchanges after which it repeats; None where it never does, and then what is counted
            is counted over its first 64.
        degree: Fewest and most messages that a worker sends in an exchange.
        messages: Messages of all workers in an exchange, mean over the cycle.
        message_bytes: Size of one.
        lambda_2: Second largest modulus of an eigenvalue of a whole cycle's product; None where it
            never repeats.
        p: 1 - sigma_2^2 of that product: it takes at least this fraction of Xi^2.
        reach: Exchanges to reach each fraction.
    """

    name: str
    workers: int
    cycle: int | None
    degree: tuple[int, int]
    messages: float
    message_bytes: int
    lambda_2: float | None
    p: float | None
    reach: tuple[Reach, ...]

    @property
    def gap(self) -> float | None:
        """1 - lambda_2."""
        return None if self.lambda_2 is None else 1 - self.lambda_2

    @property
    def worker_bytes(self) -> float:
        """What a worker sends in an exchange, mean over the workers."""
        return self.messages * self.message_bytes / self.workers


def profile(graph: Topology, n: int, message_bytes: int) -> Profile:
    """Return the facts of ``graph`` with n workers whose models are ``message_bytes`` large.

    Raises:
        ValueError: If the topology does not fit n workers.
    """
    graph.validate(n)
    cycle = graph.cycle(n)
    phases = [graph.mixing(n, phase) for phase in range(cycle or _SAMPLED)]
    sent = [len(mixing.sends(rank)) for mixing in phases for rank in range(n)]
    spectrum = MixingMatrix(graph.product(n, cycle)).spectrum() if cycle else None
    plain, faster = plain_left(graph, n), accelerated_left(graph, n)
    return Profile(
        graph.name,
        n,
        cycle,
        (min(sent), max(sent)),
        sum(sent) / len(phases),
        whole(message_bytes, "the size of a message"),
        spectrum.lambda_2 if spectrum else None,
        spectrum.p if spectrum else None,
        tuple(_reach(plain, faster, fraction) for fraction in FRACTIONS),
    )


def plain_left(graph: Topology, n: int) -> Callable[[int], Left]:
    """Return the function from a number of exchanges, from phase 0 on, to what they leave."""
    if is_fixed_and_symmetric(graph):
        return lambda exchanges: _of_modes(mode_factors(graph, n, exchanges, False))
    products: list[Matrix] = [np.eye(n) - 1 / n]
    known: dict[int, Left] = {}

    def left(exchanges: int) -> Left:
        while len(products) <= exchanges:
            products.append(graph.mixing(n, len(products) - 1).weights @ products[-1])
        if exchanges not in known:
            rest = products[exchanges]
            typical = float(np.linalg.norm(rest)) / math.sqrt(max(1, n - 1))
            known[exchanges] = Left(spectral_norm(rest), typical)
        return known[exchanges]

    return left


def accelerated_left(graph: Topology, n: int) -> Callable[[int], Left] | None:
    """Return the same for exchanges that are accelerated together; None where they cannot be."""
    if not is_fixed_and_symmetric(graph):
        return None
    return lambda exchanges: _of_modes(mode_factors(graph, n, exchanges, exchanges > 0))


def _of_modes(factors: Matrix) -> Left:
    if not len(factors):
        return Left(0.0, 0.0)
    return Left(float(np.abs(factors).max()), float(np.sqrt(np.mean(factors**2))))


def _reach(
    plain: Callable[[int], Left], faster: Callable[[int], Left] | None, fraction: float
) -> Reach:
    return Reach(
        fraction,
        _fewest(lambda t: plain(t).worst, fraction, _MOST),
        _fewest(lambda t: plain(t).random, fraction, _MOST),
        faster and _fewest(lambda t: faster(t).worst, fraction, _MOST_ACCELERATED),
        faster and _fewest(lambda t: faster(t).random, fraction, _MOST_ACCELERATED),
    )


def _fewest(left: Callable[[int], float], fraction: float, most: int) -> int | None:
    """Return the smallest t <= most with ``left(t) <= fraction``, for a ``left`` that falls."""
    limit = fraction * (1 + 1e-9)
    low, high = -1, 0  # left(low) is above the limit, where low >= 0
    while left(high) > limit:
        if high >= most:
            return None
        low, high = high, min(most, max(1, 2 * high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= limit else (middle, high)
    return high
