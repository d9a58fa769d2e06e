"""How far apart a method keeps the workers in the long run: the steady consensus distance.

The model is that of training dominated by noise. In every step, each worker moves by an independent
random vector with ``E ||u||^2 = s^2``; what the workers have in common does not count. With S the
covariance of the workers' differences, summed over the parameters, a round of matrices with product
R, after tau steps, does ``S <- R (S + tau s^2 (I - J)) R^T``. Its fixed point gives
``Xi^2 = tr(S)/n``. For a fixed symmetric W, q exchanges multiply the mode of eigenvalue l_i by
P(l_i) = l_i^q, or by the accelerated polynomial; with ``f_i = P(l_i)^2``

    Xi^2 / (tau s^2) = (1/n) sum_i f_i / (1 - f_i)        over the n - 1 modes of difference.

Gradients are taken between rounds, where the differences grow by ``s^2 (1 - 1/n)`` in a step. The
distance that counts is the root mean square over the tau places where a gradient is taken,

    distance^2 / s^2 = Xi^2 / s^2 + (tau - 1)/2 * (1 - 1/n),

which for tau = 1 is Xi itself, and 0 for an all-reduce in each step. Curvature, heterogeneous data
and changes of the learning rate are left out, and s is unknown: only ratios mean something.

The model is derived here; tests hold it to simulated workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from consensus_opt import acceleration
from consensus_opt.graphs import Topology, Undirected
from consensus_opt.mixing import Matrix

_SETTLING, _AVERAGED = 64, 256
_DOUBLINGS = 60


def is_fixed_and_symmetric(graph: Topology) -> bool:
    """Tell whether exchanges over this topology can be accelerated."""
    return isinstance(graph, Undirected)


def distance(
    graph: Topology, n: int, period: int = 1, exchanges: int = 1, accelerated: bool = False
) -> float:
    """Return the steady distance at the gradients, in units of s (see the module).

    Args:
        graph: The topology; its exchanges go through its phases one after the other.
        n: Number of workers.
        period: Steps between rounds, tau.
        exchanges: Exchanges in a round.
        accelerated: Whether they are weighted to mix best together; needs a fixed symmetric W.
    """
    after = _steady(graph, n, exchanges, accelerated)
    return math.sqrt(period * after + between_rounds(n, period))


def between_rounds(n: int, period: int) -> float:
    """Return the mean of the squared distance that the steps between two rounds add, for s = 1."""
    return (period - 1) / 2 * (1 - 1 / n)


@lru_cache(maxsize=1024)
def _steady(graph: Topology, n: int, exchanges: int, accelerated: bool) -> float:
    """Return Xi^2 after a round, for tau = 1 and s = 1, as a mean over the topology's cycle."""
    if is_fixed_and_symmetric(graph):
        left = mode_factors(graph, n, exchanges, accelerated) ** 2
        return float(np.sum(left / (1 - left))) / n
    rounds = _rounds(graph, n, exchanges)
    noise: Matrix = np.eye(n) - 1 / n
    start = np.zeros((n, n))
    if graph.cycle(n) is None:
        for mixing in rounds[:_SETTLING]:
            start = mixing @ (start + noise) @ mixing.T
        rounds = rounds[_SETTLING:]
    else:
        start = _fixed_point(rounds, noise)
    total = 0.0
    for mixing in rounds:
        start = mixing @ (start + noise) @ mixing.T
        total += float(np.trace(start)) / n
    return max(0.0, total / len(rounds))


def mode_factors(graph: Topology, n: int, exchanges: int, accelerated: bool) -> Matrix:
    """Return P(l_i) for the n - 1 modes of a fixed symmetric W: what a round leaves of each."""
    mixing = graph.mixing(n)
    if accelerated:
        return acceleration.mode_factors(mixing, exchanges)[:-1]
    return acceleration.modes(mixing)[0][:-1] ** exchanges


def _rounds(graph: Topology, n: int, exchanges: int) -> list[Matrix]:
    """Return the products of the rounds, without J, until they repeat."""
    cycle = graph.cycle(n)
    count = _SETTLING + _AVERAGED if cycle is None else math.lcm(cycle, exchanges) // exchanges
    products = []
    for number in range(count):
        product: Matrix = np.eye(n) - 1 / n
        for phase in range(number * exchanges, (number + 1) * exchanges):
            product = graph.mixing(n, phase).weights @ product
        products.append(product)
    return products


def _fixed_point(rounds: Sequence[Matrix], noise: Matrix) -> Matrix:
    """Return S at the start of a cycle: ``S = A S A^T + B``, by doubling the number of cycles."""
    through: Matrix = np.eye(len(noise))
    added = np.zeros_like(noise)
    for mixing in rounds:
        added = mixing @ (added + noise) @ mixing.T
        through = mixing @ through
    for _ in range(_DOUBLINGS):
        more = through @ added @ through.T
        if np.trace(more) < 1e-13:
            break
        added, through = added + more, through @ through
    return added
