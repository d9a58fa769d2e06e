"""What a topology is, and the graphs that have a name.

A topology is a value that turns (number of workers, phase) into one doubly stochastic matrix, and
``repr`` writes it out in full, so that ranks can compare theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import networkx as nx
import numpy as np

from consensus_opt.base_graph import base_graph
from consensus_opt.checks import whole, whole_field
from consensus_opt.mixing import Matrix, MixingMatrix


@dataclass(frozen=True)
class Topology(ABC):
    """Who exchanges with whom, for every number of workers that fits.

    Topologies compare by value, pickle, and ``repr`` writes them out in full.
    """

    _label: ClassVar[str]

    @property
    def name(self) -> str:
        """A short name; ``topology(name)`` gives the topology back unless it was made from data."""
        return self._label

    def validate(self, n: int) -> None:
        """Raise ``ValueError`` (``TypeError``: no integer) where n does not fit; say what does."""
        whole(n, "the number of workers")

    def cycle(self, n: int) -> int | None:
        """Return the number of phases after which they repeat; None where they never do."""
        return 1

    def mixing(self, n: int, phase: int = 0) -> MixingMatrix:
        """Return the matrix of the exchange numbered ``phase`` (0, 1, ...), from a bounded cache.

        Raises:
            TypeError: If n or phase is no integer.
            ValueError: If n does not fit (see ``validate``), or phase is negative.
        """
        self.validate(n)
        whole(phase, "the phase", least=0)
        cycle = self.cycle(n)
        return _mixing(self, n, phase if cycle is None else phase % cycle)

    def product(self, n: int, phases: int) -> Matrix:
        """Return W_{phases-1} ... W_1 W_0, (n, n): what the first ``phases`` exchanges do."""
        self.validate(n)
        total: Matrix = np.eye(n)
        for phase in range(phases):
            total = self.mixing(n, phase).weights @ total
        return total

    @abstractmethod
    def _weights(self, n: int, phase: int) -> Matrix:
        """Return the (n, n) weights; n fits, and 0 <= phase < cycle(n)."""


# 32 holds a cycle of every periodic topology up to n = 16384; at n = 1024 it is 256 MB at most.
@lru_cache(maxsize=32)
def _mixing(topology: Topology, n: int, phase: int) -> MixingMatrix:
    return MixingMatrix(topology._weights(n, phase))


class Undirected(Topology):
    """One fixed undirected graph with Metropolis-Hastings weights w_ij = 1/(1 + max(d_i, d_j))."""

    def _weights(self, n: int, phase: int) -> Matrix:
        graph = self._graph(n)
        linked = nx.to_numpy_array(graph, nodelist=sorted(graph), weight=None) > 0
        np.fill_diagonal(linked, False)
        degree = linked.sum(axis=1)
        return _fill_diagonal(np.where(linked, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0))

    @abstractmethod
    def _graph(self, n: int) -> nx.Graph:
        """Return the graph; its sorted nodes are the ranks."""


@dataclass(frozen=True)
class Complete(Undirected):
    """Everybody with everybody, weights 1/n: the exact mean in one exchange."""

    _label = "complete"

    def _graph(self, n: int) -> nx.Graph:
        return nx.complete_graph(n)


@dataclass(frozen=True)
class Ring(Undirected):
    """Neighbours on a circle, weights 1/3: lambda_2 = (1 + 2 cos(2 pi/n))/3."""

    _label = "ring"

    def _graph(self, n: int) -> nx.Graph:
        return nx.cycle_graph(n)


@dataclass(frozen=True)
class Star(Undirected):
    """Rank 0 with everybody, weights 1/n: lambda_2 = 1 - 1/n from three workers on."""

    _label = "star"

    def _graph(self, n: int) -> nx.Graph:
        return nx.star_graph(n - 1)


@dataclass(frozen=True)
class _Rectangle(Undirected):
    """Ranks row by row, rank = row * columns + column; a side of None makes it most square."""

    rows: int | None = None
    columns: int | None = None
    _periodic: ClassVar[bool]

    def __post_init__(self) -> None:
        for side in ("rows", "columns"):
            if getattr(self, side) is not None:
                whole_field(self, side, name=f"{self._label} {side}")

    @property
    def name(self) -> str:
        if self.rows is None and self.columns is None:
            return self._label
        return f"{self._label}:{self.rows or '*'}x{self.columns or '*'}"

    def validate(self, n: int) -> None:
        super().validate(n)
        self.sides(n)

    def sides(self, n: int) -> tuple[int, int]:
        """Return (rows, columns) for n workers."""
        known = [(rows, n // rows) for rows in range(1, n + 1) if n % rows == 0]
        fitting = [s for s in known if self.rows in (None, s[0]) and self.columns in (None, s[1])]
        if not fitting:
            raise ValueError(
                f"{self!r} does not fit {n} workers; rows x columns must be one of "
                f"{', '.join(f'{r}x{c}' for r, c in known)}; write {type(self).__name__}() for the "
                "most square one"
            )
        return min(fitting, key=lambda sides: (abs(sides[0] - sides[1]), sides[0]))

    def _graph(self, n: int) -> nx.Graph:
        return nx.grid_2d_graph(*self.sides(n), periodic=self._periodic)


@dataclass(frozen=True)
class Torus(_Rectangle):
    """A grid whose edges meet: up to four neighbours. A torus of one row is a ring."""

    _label, _periodic = "torus", True


@dataclass(frozen=True)
class Grid(_Rectangle):
    """A rectangular grid: two to four neighbours."""

    _label, _periodic = "grid", False


@dataclass(frozen=True)
class Hypercube(Undirected):
    """Ranks that differ in one bit; n must be a power of two."""

    _label = "hypercube"

    def validate(self, n: int) -> None:
        super().validate(n)
        if n & (n - 1):
            raise ValueError(
                f"a hypercube does not fit {n} workers; n must be a power of two (1, 2, 4, ...); "
                "write BaseGraph() or StaticExponential(), which take any number"
            )

    def _graph(self, n: int) -> nx.Graph:
        return nx.hypercube_graph(n.bit_length() - 1) if n > 1 else nx.empty_graph(1)


@dataclass(frozen=True)
class StaticExponential(Topology):
    """Rank i weighs itself and ranks i + 1, i + 2, i + 4, ... (mod n) equally; directed.

    Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
    NeurIPS 2021.
    """

    _label = "exponential"

    def _weights(self, n: int, phase: int) -> Matrix:
        offsets = [0, *(2**k for k in range(_doublings(n)))]
        return sum((_shift(n, offset) for offset in offsets), np.zeros((n, n))) / len(offsets)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In phase k, half from oneself and half from rank i + 2^k (mod n): one message each, directed.

    The cycle of ceil(log2 n) phases gives the exact mean if n is a power of two.

    Source: Ying et al., NeurIPS 2021.
    """

    _label = "one_peer_exponential"

    def cycle(self, n: int) -> int:
        return max(1, _doublings(n))

    def _weights(self, n: int, phase: int) -> Matrix:
        return (np.eye(n) + _shift(n, 2**phase)) / 2


@dataclass(frozen=True)
class BaseGraph(Topology):
    """The Base-(k+1) graph: at most k peers in a phase, the exact mean after a cycle, for every n.

    Source: Takezawa et al., NeurIPS 2023, arXiv 2305.11420; constructed in ``base_graph``.
    """

    k: int = 1

    def __post_init__(self) -> None:
        whole_field(self, "k", name="k of a Base-(k+1) graph")

    @property
    def name(self) -> str:
        return f"base{self.k + 1}"

    def cycle(self, n: int) -> int:
        self.validate(n)
        return len(base_graph(n, self.k))

    def _weights(self, n: int, phase: int) -> Matrix:
        weights = np.zeros((n, n))
        for i, j, weight in base_graph(n, self.k)[phase]:
            weights[i, j] = weights[j, i] = weight
        return _fill_diagonal(weights)


@dataclass(frozen=True)
class RandomMatching(Topology):
    """Fresh random pairs in every phase, weights 1/2; with odd n one rank sits out. Never repeats.

    The pairs are a function of (seed, phase) alone, the same on every rank.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        whole_field(self, "seed", least=0, name="the seed of a random matching")

    @property
    def name(self) -> str:
        return f"random_matching:{self.seed}" if self.seed else "random_matching"

    def cycle(self, n: int) -> int | None:
        return None

    def _weights(self, n: int, phase: int) -> Matrix:
        order = np.random.default_rng((self.seed, phase)).permutation(n)
        weights = np.zeros((n, n))
        left, right = order[: n // 2], order[n // 2 : 2 * (n // 2)]
        weights[left, right] = weights[right, left] = 0.5
        return _fill_diagonal(weights)


def _doublings(n: int) -> int:
    """Return ceil(log2 n): how many powers of two lie below n."""
    return (n - 1).bit_length()


def _shift(n: int, offset: int) -> Matrix:
    """Return the permutation by which rank i takes what rank i + offset (mod n) has."""
    return np.roll(np.eye(n), offset, axis=1)


def _fill_diagonal(weights: Matrix) -> Matrix:
    """Let every rank keep what it does not give; ``weights`` has a zero diagonal."""
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights
