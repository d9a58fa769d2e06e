"""More consensus from the same number of exchanges: polynomials of the mixing matrix.

``q`` exchanges with one matrix W multiply the graph mode of eigenvalue l by ``l^q``. Any
polynomial P of degree q with ``P(1) = 1`` keeps the mean just as well and costs the same messages.
With its roots r_j it is a product of exchanges with the matrices

    W_j = (W - r_j I) / (1 - r_j),

each over the edges of W and with rows and columns that sum to 1: plain gossip, with other weights.

Which P? Chebyshev's is best for the worst mode, and poor on the others until q is large (on a ring
of 32 it loses to plain gossip below 10 exchanges). Training feeds every mode alike, round after
round: a mode settles at the energy ``P(l)^2 / (1 - P(l)^2)`` of what a round adds, and the sum
over the modes is the consensus distance. The polynomial here makes that sum small, for the
spectrum at hand; it is never worse than plain or Chebyshev gossip in that sense, and exact once q
reaches the number of distinct eigenvalues. (The choice of P is ours; that of Chebyshev is
classical.)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numpy.polynomial import chebyshev

from consensus_opt.mixing import Matrix, MixingMatrix

Vector = npt.NDArray[np.float64]

_SWEEPS = 60


def accelerate(mixing: MixingMatrix, exchanges: int) -> tuple[MixingMatrix, ...]:
    """Return the matrices of ``exchanges`` exchanges that replace ``W^exchanges``.

    Args:
        mixing: A symmetric, connected W.
        exchanges: q, at least 1.

    Raises:
        ValueError: If W is not symmetric: its modes are then not orthogonal.
    """
    weights = mixing.weights
    if not np.allclose(weights, weights.T, rtol=0.0, atol=1e-12):
        raise ValueError(
            "gossip can be accelerated over a fixed symmetric mixing matrix, and this one is not "
            "symmetric; use an undirected topology such as 'ring' or 'torus', or accelerated=False"
        )
    return _matrices(weights.tobytes(), len(weights), exchanges)


def modes(mixing: MixingMatrix) -> tuple[Vector, Matrix]:
    """Return the eigenvalues l_i of a symmetric W, ascending, and its eigenvectors as columns."""
    return _modes(mixing.weights.tobytes(), mixing.n)


def mode_factors(mixing: MixingMatrix, exchanges: int) -> Vector:
    """Return P(l_i), in the order of :func:`modes`: what accelerated exchanges leave of each."""
    return _factors(mixing.weights.tobytes(), mixing.n, exchanges)


@lru_cache(maxsize=16)
def _modes(data: bytes, n: int) -> tuple[Vector, Matrix]:
    values, vectors = np.linalg.eigh(np.frombuffer(data).reshape(n, n))
    return values, vectors


@lru_cache(maxsize=256)
def _factors(data: bytes, n: int, exchanges: int) -> Vector:
    roots = _roots(data, n, exchanges)
    factors: Vector = np.prod([(_modes(data, n)[0] - r) / (1 - r) for r in roots], axis=0)
    return factors


@lru_cache(maxsize=64)
def _matrices(data: bytes, n: int, exchanges: int) -> tuple[MixingMatrix, ...]:
    weights, identity = np.frombuffer(data).reshape(n, n), np.eye(n)
    roots = _roots(data, n, exchanges)
    return tuple(MixingMatrix((weights - r * identity) / (1 - r)) for r in roots)


@lru_cache(maxsize=256)
def _roots(data: bytes, n: int, exchanges: int) -> Vector:
    others = _modes(data, n)[0][:-1]
    others = others[others < 1 - 1e-9]  # workers that have ended exchange nothing
    if not len(others) or np.ptp(others) < 1e-9:
        return np.full(exchanges, others.mean() if len(others) else 0.0)
    return _in_stable_order(polynomial_roots(others, exchanges))


def polynomial_roots(modes: Vector, degree: int) -> Vector:
    """Return the roots of the polynomial with the smallest steady distance.

    From Chebyshev's on, each sweep minimizes ``sum_i w_i P(l_i)^2`` under ``P(1) = 1``, with
    weights that end as ``1 / (1 - P(l_i)^2)^2``: there the steady distance has no slope left. A
    quarter of the way to them (in the logarithm) is taken at a time; the whole of it overshoots.
    """
    distinct = modes[np.r_[True, np.diff(modes) > 1e-9]]
    if degree >= len(distinct):
        rest = np.full(degree - len(distinct), distinct.mean())
        return np.concatenate([distinct, rest])
    low, high = modes[0], modes[-1]
    basis = chebyshev.chebvander((2 * modes - low - high) / (high - low), degree)
    at_one = chebyshev.chebvander([(2 - low - high) / (high - low)], degree)[0]
    best = solution = np.eye(degree + 1)[degree] / at_one[degree]
    importance = _slopes(basis @ solution)
    for _ in range(_SWEEPS):
        gram = basis.T @ (importance[:, None] * basis)
        solution = np.linalg.lstsq(gram, at_one, rcond=None)[0]
        solution /= solution @ at_one
        if _steady(basis @ solution) < _steady(basis @ best):
            best = solution
        importance = importance**0.75 * _slopes(basis @ solution) ** 0.25
    roots = np.real(chebyshev.chebroots(best))
    return np.asarray((roots * (high - low) + low + high) / 2, dtype=np.float64)


def _in_stable_order(roots: Vector) -> Vector:
    """Order the roots so that rounding errors of an exchange do not grow in those after it.

    The exchange of a root near 1 magnifies other modes a hundredfold. It comes first, where it
    meets differences between workers, not rounding errors of whole parameters; after it Leja's
    order (each root the farthest, as a product of distances, from those before) keeps growth low.
    """
    left = sorted(roots)
    ordered = [left.pop()]
    while left:
        distances = np.abs(np.subtract.outer(left, ordered)).prod(axis=1)
        ordered.append(left.pop(int(np.argmax(distances))))
    return np.array(ordered)


def _steady(factors: Vector) -> float:
    squares = np.minimum(factors**2, 1 - 1e-12)
    return float(np.sqrt(np.mean(squares / (1 - squares))))


def _slopes(factors: Vector) -> Vector:
    """Return how fast steady energies ``s / (1 - s)`` grow with ``s``, the factors squared."""
    return 1 / (1 - np.minimum(factors**2, 1 - 1e-9)) ** 2
