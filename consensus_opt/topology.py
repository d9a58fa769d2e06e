"""Who averages with whom: the way in to all topologies, by name or by value.

The rooms behind it: ``mixing`` (matrices and spectra), ``graphs`` (the named ones), ``from_data``
(a user's own). This file is above them, since it knows all.
"""

from __future__ import annotations

import re

import networkx as nx
import numpy as np

from consensus_opt.from_data import FromGraph, FromMatrix
from consensus_opt.graphs import (
    BaseGraph,
    Complete,
    Grid,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    StaticExponential,
    Topology,
    Torus,
)
from consensus_opt.mixing import Matrix, MixingMatrix, Spectrum, spectral_norm

__all__ = [
    "BaseGraph",
    "Complete",
    "FromGraph",
    "FromMatrix",
    "Grid",
    "Hypercube",
    "MixingMatrix",
    "OnePeerExponential",
    "RandomMatching",
    "Ring",
    "Spectrum",
    "Star",
    "StaticExponential",
    "Topology",
    "Torus",
    "exchanges_to",
    "topology",
]


def topology(spec: str | nx.Graph | Topology) -> Topology:
    """Return the topology that ``spec`` means.

    Args:
        spec: A topology; an undirected networkx graph over ranks 0..n-1; or a name: "complete",
            "ring", "star", "torus", "torus:4x2", "grid", "grid:3x*", "hypercube", "exponential",
            "one_peer_exponential", "base2" (k = 1), "base3", ..., "random_matching",
            "random_matching:7" (the seed).

    Raises:
        ValueError: If the name is not known, or the graph is refused by ``FromGraph``.
        TypeError: If ``spec`` is something else.
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
    """Return the exchanges after which at most ``fraction`` of any consensus distance is left.

    The smallest t with ||W_{t-1} ... W_0 - J||_2 <= fraction; most differences vanish earlier.

    Args:
        topology: Its phases are taken from 0.
        n: Number of workers.
        fraction: From 1e-12 (exact but for rounding) to 1.
        limit: Most exchanges to try.

    Raises:
        ValueError: If ``fraction`` is out of range, or ``limit`` exchanges are not enough.
    """
    if not 1e-12 <= fraction <= 1.0:
        raise ValueError(
            f"fraction is {fraction}; it must lie in [1e-12, 1]; write 1e-12 for the exact mean"
        )
    topology.validate(n)
    target = fraction * (1.0 + 1e-9)
    done, left = _whole_cycles_above(topology, n, target, limit)
    while spectral_norm(left) > target:
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
    """Return the most whole cycles, in exchanges, that leave more than ``target``, and the rest.

    Found by squaring, since (P - J)^m = P^m - J; a slow ring would otherwise take minutes.
    """
    left: Matrix = np.eye(n) - 1.0 / n
    if (cycle := topology.cycle(n)) is None:
        return 0, left
    powers = [topology.product(n, cycle) - 1.0 / n]
    while spectral_norm(powers[-1]) > target and cycle * 2 ** len(powers) <= limit:
        powers.append(powers[-1] @ powers[-1])
    cycles = 0
    for exponent, power in reversed(list(enumerate(powers))):
        further = power @ left
        if spectral_norm(further) > target:
            cycles, left = cycles + 2**exponent, further
    return cycle * cycles, left
