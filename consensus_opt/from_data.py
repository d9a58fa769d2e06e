"""Topologies made from a user's own graph or matrix.

Everything is checked when it is made: a graph that falls apart, or a matrix under which workers
never agree, would otherwise show only as a model that does not learn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from consensus_opt.graphs import Topology, Undirected
from consensus_opt.mixing import Matrix, MixingMatrix, square


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
class FromGraph(Undirected, _OfFixedSize):
    """A user's connected undirected graph, with Metropolis-Hastings weights.

    Edge attributes are not read (``FromMatrix`` takes weights); self-loops and double edges change
    nothing.

    Attributes:
        edges: Sorted pairs of ranks i < j.

    Raises:
        ValueError: If the graph is directed or disconnected, or its nodes are not exactly 0..n-1.
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
        ValueError: If W is not square, finite and non-negative with rows and columns that sum to
            1 within 1e-9, or never reaches consensus: disconnected, or a mere swap of parameters.
    """

    weights: tuple[tuple[float, ...], ...]
    _label = "matrix"

    def __init__(self, weights: npt.ArrayLike) -> None:
        # Adding 0.0 turns -0.0 into 0.0: equal matrices must have equal reprs.
        matrix = MixingMatrix(square(weights) + 0.0).weights
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


def _joined(edges: Iterable[tuple[int, int]]) -> nx.Graph:
    """Return the graph of these edges; a single rank if there are none."""
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


def _listed(items: Iterable[object], most: int = 12) -> str:
    """Return the items in braces, cut after ``most``."""
    texts = [str(item) for item in items]
    cut = [f"... ({len(texts)} in all)"] if len(texts) > most else []
    return "{" + ", ".join(texts[:most] + cut) + "}"
