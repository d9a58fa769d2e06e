"""Who averages with whom: graphs over the workers, their mixing matrices and spectra.

A topology is a value that turns (number of workers, phase) into one doubly stochastic matrix. What
a rank sends and what it waits for are both read off that one matrix, so that two ranks cannot
disagree on whether a message is on its way; and `repr` writes a topology out in full, so that ranks
can compare theirs.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import networkx as nx  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from consensus_opt.base_graph import base_graph

Matrix = npt.NDArray[np.float64]

_SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Spectrum:
    """How fast a mixing matrix W (J = 11^T/n is the exact mean) brings workers together.

    Attributes:
        lambda_2: second largest modulus of an eigenvalue of W, 0 for n = 1.
        lambda_min: smallest eigenvalue of (W + W^T)/2, which is lambda_n of a symmetric W.
        sigma_2: ||W - J||_2, what one exchange leaves of the consensus distance at worst. It equals
            lambda_2 for symmetric W and for the exponential graphs (W W^T = W^T W).
    """

    lambda_2: float
    lambda_min: float
    sigma_2: float

    @property
    def gap(self) -> float:
        """The spectral gap 1 - lambda_2."""
        return 1.0 - self.lambda_2

    @property
    def p(self) -> float:
        """1 - sigma_2^2 (symmetric W: 1 - lambda_2^2); an exchange leaves <= (1 - p) of Xi^2."""
        return 1.0 - self.sigma_2**2


@dataclass(frozen=True, eq=False)
class MixingMatrix:
    """One exchange: x_m <- sum_j W[m, j] x_j. Row m weighs what worker m keeps and receives.

    Attributes:
        weights: W, (n, n) float64, read-only. Rows and columns sum to 1, so the mean is kept.

    Raises:
        ValueError: `weights` is not square, not finite, or a row or column does not sum to 1.
    """

    weights: Matrix
    _receives: dict[int, tuple[tuple[int, float], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _sends: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        weights = _square(self.weights)
        for axis, line in ((1, "row"), (0, "column")):
            sums = weights.sum(axis=axis)
            worst = int(np.argmax(np.abs(sums - 1.0)))
            if abs(sums[worst] - 1.0) > _SUM_TOLERANCE:
                raise ValueError(
                    f"{line} {worst} of the mixing matrix sums to {sums[worst]:.12g}; rows and "
                    f"columns must sum to 1 within {_SUM_TOLERANCE:g} or the mean drifts; put the "
                    "difference on the diagonal, or let FromGraph(graph) choose the weights"
                )
        weights.setflags(write=False)
        object.__setattr__(self, "weights", weights)

    def __reduce__(self) -> tuple[type[MixingMatrix], tuple[Matrix]]:
        # A pickled or copied array would come back writable.
        return MixingMatrix, (self.weights,)

    @property
    def n(self) -> int:
        """Number of workers."""
        return len(self.weights)

    @property
    def messages(self) -> int:
        """Messages that one exchange sends in all: the non-zeros off the diagonal."""
        return int(np.count_nonzero(self.weights) - np.count_nonzero(self.weights.diagonal()))

    def self_weight(self, rank: int) -> float:
        """W[rank, rank]."""
        return float(self.weights[self._checked(rank), rank])

    def receives(self, rank: int) -> tuple[tuple[int, float], ...]:
        """The (peer, weight) pairs that `rank` mixes in, by ascending peer, without itself."""
        if rank not in self._receives:
            row = self.weights[self._checked(rank)]
            peers = (int(j) for j in np.flatnonzero(row))
            self._receives[rank] = tuple((j, float(row[j])) for j in peers if j != rank)
        return self._receives[rank]

    def sends(self, rank: int) -> tuple[int, ...]:
        """The peers that mix in what `rank` sends, ascending, without itself."""
        if rank not in self._sends:
            peers = np.flatnonzero(self.weights[:, self._checked(rank)])
            self._sends[rank] = tuple(int(m) for m in peers if m != rank)
        return self._sends[rank]

    def spectrum(self) -> Spectrum:
        """Eigenvalues of W, computed once, O(n^3)."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Spectrum:
        off_mean = self.weights - 1.0 / self.n
        lambda_2 = float(np.abs(np.linalg.eigvals(off_mean)).max())
        lambda_min = float(np.linalg.eigvalsh((self.weights + self.weights.T) / 2)[0])
        return Spectrum(min(lambda_2, 1.0), lambda_min, min(_norm(off_mean), 1.0))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.n:
            raise ValueError(
                f"rank {rank} is not in this matrix; ranks are 0..{self.n - 1}; "
                "build the matrix for the number of workers that run: topology.mixing(n, phase)"
            )
        return rank


@dataclass(frozen=True)
class Topology(ABC):
    """Who exchanges with whom, for every number of workers that fits.

    Topologies compare by value, pickle, and `repr` writes them out in full.
    """

    _label: ClassVar[str]

    @property
    def name(self) -> str:
        """A short name; `topology(name)` gives the topology back unless it was made from data."""
        return self._label

    def validate(self, n: int) -> None:
        """Raises ValueError where n workers do not fit, saying which numbers do."""
        _whole(n, "the number of workers", 1)

    def cycle(self, n: int) -> int | None:
        """Number of phases after which they repeat; None where they never do."""
        return 1

    def mixing(self, n: int, phase: int = 0) -> MixingMatrix:
        """The matrix of the exchange numbered `phase` (0, 1, ...), from a bounded cache.

        Raises:
            ValueError: n does not fit (see `validate`), or phase is negative.
        """
        self.validate(n)
        _whole(phase, "the phase", 0)
        cycle = self.cycle(n)
        return _mixing(self, n, phase if cycle is None else phase % cycle)

    def product(self, n: int, phases: int) -> Matrix:
        """W_{phases-1} ... W_1 W_0, (n, n): what the first `phases` exchanges do together."""
        self.validate(n)
        total: Matrix = np.eye(n)
        for phase in range(phases):
            total = self.mixing(n, phase).weights @ total
        return total

    @abstractmethod
    def _weights(self, n: int, phase: int) -> Matrix:
        """The (n, n) weights; n fits, and 0 <= phase < cycle(n)."""


# 32 holds a cycle of every periodic topology up to n = 16384; at n = 1024 it is 256 MB at most.
@lru_cache(maxsize=32)
def _mixing(topology: Topology, n: int, phase: int) -> MixingMatrix:
    return MixingMatrix(topology._weights(n, phase))


class _Undirected(Topology):
    """One fixed undirected graph with Metropolis-Hastings weights w_ij = 1/(1 + max(d_i, d_j))."""

    def _weights(self, n: int, phase: int) -> Matrix:
        graph = self._graph(n)
        linked = nx.to_numpy_array(graph, nodelist=sorted(graph), weight=None) > 0
        np.fill_diagonal(linked, False)
        degree = linked.sum(axis=1)
        return _fill_diagonal(np.where(linked, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0))

    @abstractmethod
    def _graph(self, n: int) -> nx.Graph:
        """The graph; its sorted nodes are the ranks."""


@dataclass(frozen=True)
class Complete(_Undirected):
    """Everybody with everybody, weights 1/n: the exact mean in one exchange."""

    _label = "complete"

    def _graph(self, n: int) -> nx.Graph:
        return nx.complete_graph(n)


@dataclass(frozen=True)
class Ring(_Undirected):
    """Neighbours on a circle, weights 1/3: lambda_2 = (1 + 2 cos(2 pi/n))/3."""

    _label = "ring"

    def _graph(self, n: int) -> nx.Graph:
        return nx.cycle_graph(n)


@dataclass(frozen=True)
class Star(_Undirected):
    """Rank 0 with everybody, weights 1/n: lambda_2 = 1 - 1/n from three workers on."""

    _label = "star"

    def _graph(self, n: int) -> nx.Graph:
        return nx.star_graph(n - 1)


@dataclass(frozen=True)
class _Rectangle(_Undirected):
    """Ranks row by row, rank = row * columns + column; a side of None makes it most square."""

    rows: int | None = None
    columns: int | None = None
    _periodic: ClassVar[bool]

    def __post_init__(self) -> None:
        for side in ("rows", "columns"):
            if (value := getattr(self, side)) is not None:
                object.__setattr__(self, side, _whole(value, f"{self._label} {side}", 1))

    @property
    def name(self) -> str:
        if self.rows is None and self.columns is None:
            return self._label
        return f"{self._label}:{self.rows or '*'}x{self.columns or '*'}"

    def validate(self, n: int) -> None:
        super().validate(n)
        self.sides(n)

    def sides(self, n: int) -> tuple[int, int]:
        """(rows, columns) for n workers."""
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
class Hypercube(_Undirected):
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

    Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
    NeurIPS 2021.
    """

    _label = "exponential"

    def _weights(self, n: int, phase: int) -> Matrix:
        offsets = [0, *(2**k for k in range(_doublings(n)))]
        return sum((_shift(n, offset) for offset in offsets), np.zeros((n, n))) / len(offsets)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In phase k, half from oneself and half from rank i + 2^k (mod n): one message each, directed.

    The cycle of ceil(log2 n) phases gives the exact mean if n is a power of two (Ying et al.,
    NeurIPS 2021).
    """

    _label = "one_peer_exponential"

    def cycle(self, n: int) -> int:
        return max(1, _doublings(n))

    def _weights(self, n: int, phase: int) -> Matrix:
        return (np.eye(n) + _shift(n, 2**phase)) / 2


@dataclass(frozen=True)
class BaseGraph(Topology):
    """The Base-(k+1) graph: at most k peers in a phase, the exact mean after a cycle, for every n.

    Takezawa et al., NeurIPS 2023, arXiv 2305.11420; the construction is in `base_graph`.
    """

    k: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", _whole(self.k, "k of a Base-(k+1) graph", 1))

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
        object.__setattr__(self, "seed", _whole(self.seed, "the seed of a random matching", 0))

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


@dataclass(frozen=True)
class _OfFixedSize(Topology):
    """A topology made from data, for one number of workers."""

    @property
    @abstractmethod
    def n(self) -> int:
        """The number of workers that fits."""

    def validate(self, n: int) -> None:
        super().validate(n)
        if n != self.n:
            raise ValueError(
                f"this {self._label} has {self.n} ranks and does not fit {n} workers; start "
                f"{self.n} workers, or write {type(self).__name__}(...) with ranks 0..{n - 1}"
            )


@dataclass(frozen=True, init=False)
class FromGraph(_Undirected, _OfFixedSize):
    """A user's connected undirected graph, with Metropolis-Hastings weights.

    Edge attributes are not read (`FromMatrix` takes weights); self-loops and double edges change
    nothing.

    Attributes:
        edges: sorted pairs of ranks i < j.

    Raises:
        ValueError: the graph is directed or disconnected, or its nodes are not exactly 0..n-1.
    """

    edges: tuple[tuple[int, int], ...]
    _label = "graph"

    def __init__(self, edges: nx.Graph | Iterable[tuple[int, int]]) -> None:
        graph = edges if isinstance(edges, nx.Graph) else _joined(edges)
        if graph.is_directed():
            raise ValueError(
                "FromGraph was given a directed graph; it must be undirected, as both ends average;"
                " write FromGraph(graph.to_undirected()), or FromMatrix(weights) for one-way links"
            )
        if not graph or set(graph) != set(range(len(graph))):
            raise ValueError(
                f"the graph has nodes {_listed(graph)}; they must be exactly the ranks 0..n-1; "
                "write FromGraph(networkx.convert_node_labels_to_integers(graph))"
            )
        _check_connected(graph)
        pairs = {(int(min(edge)), int(max(edge))) for edge in graph.edges() if edge[0] != edge[1]}
        object.__setattr__(self, "edges", tuple(sorted(pairs)))

    @property
    def n(self) -> int:
        # Connected, so the last rank ends an edge.
        return 1 + max((j for _, j in self.edges), default=0)

    def _graph(self, n: int) -> nx.Graph:
        return nx.Graph(self.edges) if self.edges else nx.empty_graph(1)


@dataclass(frozen=True, init=False)
class FromMatrix(_OfFixedSize):
    """A user's mixing matrix, symmetric or not.

    Attributes:
        weights: W as a tuple of rows.

    Raises:
        ValueError: W is not square, finite and non-negative with rows and columns that sum to 1
            within 1e-9, or never reaches consensus: disconnected, or a mere swap of parameters.
    """

    weights: tuple[tuple[float, ...], ...]
    _label = "matrix"

    def __init__(self, weights: npt.ArrayLike) -> None:
        # Adding 0.0 turns -0.0 into 0.0: equal matrices must have equal reprs.
        matrix = MixingMatrix(_square(weights) + 0.0).weights
        if (matrix < 0.0).any():
            i, j = (int(index) for index in np.argwhere(matrix < 0.0)[0])
            raise ValueError(
                f"weight [{i}, {j}] of the matrix is {matrix[i, j]:g}; weights must be >= 0; write "
                "0 and correct the diagonal, or let FromGraph(graph) choose the weights"
            )
        graph = nx.DiGraph(np.argwhere(matrix).tolist())
        _check_connected(graph.to_undirected())
        if not nx.is_aperiodic(graph):
            raise ValueError(
                "the matrix only passes parameters around (lambda_2 = 1); workers must come to "
                "agree, so some rank has to keep a part of its own; write (W + I)/2"
            )
        object.__setattr__(self, "weights", tuple(tuple(row) for row in matrix.tolist()))

    @property
    def n(self) -> int:
        return len(self.weights)

    def _weights(self, n: int, phase: int) -> Matrix:
        return np.array(self.weights)


def topology(spec: str | nx.Graph | Topology) -> Topology:
    """The topology that `spec` means.

    Args:
        spec: a topology; an undirected networkx graph over ranks 0..n-1; or a name: "complete",
            "ring", "star", "torus", "torus:4x2", "grid", "grid:3x*", "hypercube", "exponential",
            "one_peer_exponential", "base2" (k = 1), "base3", ..., "random_matching",
            "random_matching:7" (the seed).

    Raises:
        ValueError: the name is not known, or the graph is refused by `FromGraph`.
        TypeError: `spec` is something else.
    """
    if isinstance(spec, Topology):
        return spec
    if isinstance(spec, nx.Graph):
        return FromGraph(spec)
    if isinstance(spec, str):
        return _named(spec)
    raise TypeError(
        f"a topology cannot be made from {type(spec).__name__}; it takes a name, a networkx graph "
        "or a Topology; write FromMatrix(weights) for a matrix, FromGraph(edges) for edges"
    )


def _named(name: str) -> Topology:
    plain: list[Topology] = [Complete(), Ring(), Star(), Torus(), Grid(), Hypercube()]
    plain += [StaticExponential(), OnePeerExponential(), BaseGraph(), RandomMatching()]
    known = {topology.name: topology for topology in plain}
    if name in known:
        return known[name]
    if match := re.fullmatch(r"(torus|grid):(\d+|\*)x(\d+|\*)", name):
        rows, columns = (None if side == "*" else int(side) for side in match.groups()[1:])
        return (Torus if match[1] == "torus" else Grid)(rows, columns)
    if match := re.fullmatch(r"base(\d+)", name):
        return BaseGraph(int(match[1]) - 1)
    if match := re.fullmatch(r"random_matching:(\d+)", name):
        return RandomMatching(int(match[1]))
    raise ValueError(
        f"the topology {name!r} is not known; known are {', '.join(known)}, and with parameters "
        "torus:4x2, grid:3x*, base3, random_matching:7; write one of these or pass a networkx graph"
    )


def exchanges_to(topology: Topology, n: int, fraction: float, limit: int = 100_000) -> int:
    """Exchanges after which at most `fraction` of any consensus distance is left.

    The smallest t with ||W_{t-1} ... W_0 - J||_2 <= fraction; most differences vanish earlier.

    Args:
        topology: its phases are taken from 0.
        n: number of workers.
        fraction: from 1e-12 (exact but for rounding) to 1.
        limit: most exchanges to try.

    Raises:
        ValueError: `fraction` is out of range, or `limit` exchanges are not enough.
    """
    if not 1e-12 <= fraction <= 1.0:
        raise ValueError(
            f"fraction is {fraction}; it must lie in [1e-12, 1]; write 1e-12 for the exact mean"
        )
    topology.validate(n)
    target = fraction * (1.0 + 1e-9)
    done, left = _whole_cycles_above(topology, n, target, limit)
    while _norm(left) > target:
        if done >= limit:
            raise ValueError(
                f"{topology!r} needs more than limit={limit} exchanges among {n} workers to leave "
                f"{fraction:g} of a distance; write a larger limit or a larger fraction, or take a "
                "topology that mixes faster: StaticExponential(), BaseGraph()"
            )
        left = topology.mixing(n, done).weights @ left
        done += 1
    return done


def _whole_cycles_above(
    topology: Topology, n: int, target: float, limit: int
) -> tuple[int, Matrix]:
    """Most exchanges, in whole cycles, that still leave more than `target`, and what they leave.

    Found by squaring, since (P - J)^m = P^m - J; a slow ring would otherwise take minutes.
    """
    left: Matrix = np.eye(n) - 1.0 / n
    if (cycle := topology.cycle(n)) is None:
        return 0, left
    powers = [topology.product(n, cycle) - 1.0 / n]
    while _norm(powers[-1]) > target and cycle * 2 ** len(powers) <= limit:
        powers.append(powers[-1] @ powers[-1])
    cycles = 0
    for exponent, power in reversed(list(enumerate(powers))):
        further = power @ left
        if _norm(further) > target:
            cycles, left = cycles + 2**exponent, further
    return cycle * cycles, left


def _doublings(n: int) -> int:
    """ceil(log2 n): how many powers of two lie below n."""
    return (n - 1).bit_length()


def _shift(n: int, offset: int) -> Matrix:
    """The permutation matrix by which rank i takes what rank i + offset (mod n) has."""
    return np.roll(np.eye(n), offset, axis=1)


def _fill_diagonal(weights: Matrix) -> Matrix:
    """Lets every rank keep what it does not give; `weights` has a zero diagonal."""
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def _norm(matrix: Matrix) -> float:
    """The spectral norm."""
    return float(np.linalg.norm(matrix, 2))


def _square(weights: npt.ArrayLike) -> Matrix:
    """An own copy of `weights` as a float64 matrix."""
    try:
        matrix = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "the mixing matrix is no table of numbers; it must be (n, n) and real; write rows of "
            "equal length"
        ) from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(
            f"the mixing matrix has shape {matrix.shape}; it must be (n, n) with n >= 1; "
            "write one row and one column for each worker"
        )
    if not np.isfinite(matrix).all():
        raise ValueError(
            "the mixing matrix has NaN or infinite weights; all must be finite; write 0 where two "
            "ranks do not exchange"
        )
    return matrix


def _joined(edges: Iterable[tuple[int, int]]) -> nx.Graph:
    """The graph of these edges; a single rank if there are none."""
    try:
        return nx.Graph(list(edges) or nx.empty_graph(1))
    except (TypeError, nx.NetworkXError) as error:
        raise ValueError(
            f"FromGraph was given {edges!r}; it takes a networkx graph or pairs of ranks; "
            "write FromGraph([(0, 1), (1, 2)])"
        ) from error


def _check_connected(graph: nx.Graph) -> None:
    components = sorted(sorted(component) for component in nx.connected_components(graph))
    if len(components) > 1:
        raise ValueError(
            f"the graph falls into {len(components)} components: "
            f"{', '.join(map(_listed, components))}; it must be connected or they never agree; "
            f"add edges between the components, such as ({components[0][0]}, {components[1][0]})"
        )


def _listed(items: Iterable[Any], most: int = 12) -> str:
    """The items in braces, cut after `most`."""
    texts = [str(item) for item in items]
    cut = [f"... ({len(texts)} in all)"] if len(texts) > most else []
    return "{" + ", ".join(texts[:most] + cut) + "}"


def _whole(value: int, what: str, least: int) -> int:
    """`value` as a plain int, so that reprs do not depend on the integer type given."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(
            f"{what} is {value!r}; it must be an integer of at least {least}; write {least} or more"
        )
    return operator.index(value)
