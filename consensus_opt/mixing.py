"""Mixing matrices: what one exchange does to the workers, and how fast it brings them together.

What a rank sends and what it waits for are both read off one matrix, so that two ranks cannot
disagree on whether a message is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

_SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Spectrum:
    """How fast a mixing matrix W (J = 11^T/n is the exact mean) brings workers together.

    Attributes:
        lambda_2: Second largest modulus of an eigenvalue of W, 0 for n = 1.
        lambda_min: Smallest eigenvalue of (W + W^T)/2, which is lambda_n of a symmetric W.
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
        ValueError: If W is not square or not finite, or a row or column does not sum to 1.
    """

    weights: Matrix
    _receives: dict[int, tuple[tuple[int, float], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _sends: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        weights = square(self.weights)
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
        """Return W[rank, rank]: what ``rank`` keeps of its own."""
        return float(self.weights[self._checked(rank), rank])

    def receives(self, rank: int) -> tuple[tuple[int, float], ...]:
        """Return the (peer, weight) pairs that ``rank`` mixes in, ascending, without itself."""
        if rank not in self._receives:
            row = self.weights[self._checked(rank)]
            peers = (int(j) for j in np.flatnonzero(row))
            self._receives[rank] = tuple((j, float(row[j])) for j in peers if j != rank)
        return self._receives[rank]

    def sends(self, rank: int) -> tuple[int, ...]:
        """Return the peers that mix in what ``rank`` sends, ascending, without itself."""
        if rank not in self._sends:
            peers = np.flatnonzero(self.weights[:, self._checked(rank)])
            self._sends[rank] = tuple(int(m) for m in peers if m != rank)
        return self._sends[rank]

    def spectrum(self) -> Spectrum:
        """Return what the eigenvalues of W say, computed once in O(n^3)."""
        return self._spectrum

    @cached_property
    def _spectrum(self) -> Spectrum:
        off_mean = self.weights - 1.0 / self.n
        lambda_2 = float(np.abs(np.linalg.eigvals(off_mean)).max())
        lambda_min = float(np.linalg.eigvalsh((self.weights + self.weights.T) / 2)[0])
        return Spectrum(min(lambda_2, 1.0), lambda_min, min(spectral_norm(off_mean), 1.0))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.n:
            raise ValueError(
                f"rank {rank} is not in this matrix; ranks are 0..{self.n - 1}; "
                "build the matrix for the number of workers that run: topology.mixing(n, phase)"
            )
        return rank


def spectral_norm(matrix: Matrix) -> float:
    """Return ``||A||_2``, the largest singular value."""
    return float(np.linalg.norm(matrix, 2))


def square(weights: npt.ArrayLike) -> Matrix:
    """Return an own copy of ``weights`` as a finite square float64 matrix.

    Raises:
        ValueError: If it is none.
    """
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
