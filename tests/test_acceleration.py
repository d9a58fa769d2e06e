"""Accelerated gossip, against the polynomial that it stands for, computed from eigenvalues."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import Chebyshev
from torch import Tensor

from consensus_opt import MixingMatrix, consensus_control, gossip_sgd
from consensus_opt.acceleration import accelerate
from consensus_opt.averaging import Gossip
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import random_rows, same, stacked

Vector = npt.NDArray[np.float64]
SIZES = {
    "ring": [4, 5, 8, 16, 31, 32, 64],
    "torus": [4, 9, 12, 16, 36, 64],
    "grid": [4, 6, 9, 16, 25, 64],
    "star": [4, 7, 16, 64],
    "hypercube": [4, 8, 16, 64],
    "complete": [4, 16],
}
FITTING = [(name, n) for name, sizes in SIZES.items() for n in sizes]
EXCHANGES = range(1, 13)


def modes_of(mixing: MixingMatrix) -> Vector:
    """Eigenvalues of W without the one of the mean."""
    return np.linalg.eigvalsh(mixing.weights)[:-1]


def product(matrices: tuple[MixingMatrix, ...]) -> Vector:
    total = np.eye(matrices[0].n)
    for matrix in matrices:
        total = matrix.weights @ total
    return total


def factors_of(total: Vector, mixing: MixingMatrix) -> Vector:
    """What is left of each mode of W."""
    vectors = np.linalg.eigh(mixing.weights)[1][:, :-1]
    left = vectors.T @ total @ vectors
    np.testing.assert_allclose(left, np.diag(np.diag(left)), rtol=0, atol=1e-9)
    return np.diag(left)


def steady_distance(factors: Vector) -> float:
    """Xi where each round adds the same to each mode and then multiplies it by its factor."""
    squares = factors**2
    assert (squares < 1).all()
    return float(np.sqrt(np.mean(squares / (1 - squares))))


def chebyshev_factors(modes: Vector, degree: int) -> Vector:
    middle, half = (modes[-1] + modes[0]) / 2, (modes[-1] - modes[0]) / 2
    polynomial = Chebyshev.basis(degree)
    return np.asarray(polynomial((modes - middle) / half) / polynomial((1 - middle) / half))


@pytest.mark.parametrize(("name", "n"), FITTING)
def test_every_matrix_keeps_the_mean_and_sends_over_the_edges_of_w_alone(name: str, n: int) -> None:
    mixing = topology(name).mixing(n)
    edges = (mixing.weights != 0) | np.eye(n, dtype=bool)
    for exchanges in EXCHANGES:
        matrices = accelerate(mixing, exchanges)
        assert len(matrices) == exchanges
        for matrix in matrices:
            weights = matrix.weights
            np.testing.assert_allclose(weights.sum(0), 1, rtol=0, atol=1e-12)
            np.testing.assert_allclose(weights.sum(1), 1, rtol=0, atol=1e-12)
            assert np.array_equal((weights != 0) | np.eye(n, dtype=bool), edges)
            assert matrix.messages == mixing.messages


@pytest.mark.parametrize(("name", "n"), FITTING)
def test_the_product_is_one_polynomial_of_w_that_is_1_at_1(name: str, n: int) -> None:
    mixing = topology(name).mixing(n)
    values, vectors = np.linalg.eigh(mixing.weights)
    for exchanges in EXCHANGES:
        # Each matrix is (W - r I) / (1 - r): its diagonal tells r.
        polynomial = np.ones_like(values)
        matrices = accelerate(mixing, exchanges)
        for matrix in matrices:
            scale = matrix.weights[0, 1] / mixing.weights[0, 1]
            root = 1 - 1 / scale
            expected = scale * (mixing.weights - root * np.eye(n))
            np.testing.assert_allclose(matrix.weights, expected, rtol=0, atol=1e-9)
            polynomial *= (values - root) / (1 - root)
        assert polynomial[-1] == pytest.approx(1)
        expected = vectors @ np.diag(polynomial) @ vectors.T
        np.testing.assert_allclose(product(matrices), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "n"), FITTING)
def test_in_steady_state_it_is_never_worse_than_plain_or_chebyshev_gossip(
    name: str, n: int
) -> None:
    mixing = topology(name).mixing(n)
    modes = modes_of(mixing)
    for exchanges in EXCHANGES:
        factors = factors_of(product(accelerate(mixing, exchanges)), mixing)
        reached = steady_distance(factors)
        assert reached <= steady_distance(modes**exchanges) * (1 + 1e-6) + 1e-9
        if np.ptp(modes) > 1e-9:
            chebyshev = steady_distance(chebyshev_factors(modes, exchanges))
            assert reached <= chebyshev * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("n", "gain"), [(16, 2.0), (32, 1.9), (64, 1.9)])
def test_four_exchanges_on_a_ring_bring_about_twice_as_much(n: int, gain: float) -> None:
    mixing = topology("ring").mixing(n)
    plain = steady_distance(modes_of(mixing) ** 4)
    accelerated = steady_distance(factors_of(product(accelerate(mixing, 4)), mixing))
    assert plain / accelerated > gain


@pytest.mark.parametrize(("name", "n"), [("ring", 16), ("ring", 64), ("grid", 25), ("star", 16)])
@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_no_small_change_of_the_polynomial_has_a_smaller_steady_distance(
    name: str, n: int, exchanges: int
) -> None:
    mixing = topology(name).mixing(n)
    modes = modes_of(mixing)
    if exchanges >= len(np.unique(modes.round(9))):
        exchanges = len(np.unique(modes.round(9))) - 1
    factors = factors_of(product(accelerate(mixing, exchanges)), mixing)
    rng = np.random.default_rng(0)
    for size in (0.1, 0.03):
        for _ in range(50):
            # (l - 1) times any polynomial of a lower degree leaves P(1) = 1.
            change = np.polynomial.Polynomial(rng.standard_normal(exchanges))(modes) * (modes - 1)
            changed = factors + size * change / np.abs(change).max()
            if (np.abs(changed) < 1).all():
                assert steady_distance(factors) <= steady_distance(changed) * 1.0001


# Distinct eigenvalues beside that of the mean: star 1/n..., torus 4x4 sums of cosines, and so on.
@pytest.mark.parametrize(
    ("name", "n", "enough"),
    [
        *[("complete", 8, 1), ("star", 4, 2), ("star", 16, 2), ("star", 64, 2)],
        *[("torus", 16, 4), ("hypercube", 8, 3), ("hypercube", 64, 6)],
        *[("ring", 4, 2), ("ring", 8, 4), ("ring", 9, 4)],
    ],
)
def test_it_is_exact_at_the_number_of_distinct_eigenvalues_and_after(
    name: str, n: int, enough: int
) -> None:
    mixing = topology(name).mixing(n)
    assert len(np.unique(modes_of(mixing).round(9))) == enough
    mean = np.full((n, n), 1 / n)
    for exchanges in (enough, enough + 1, enough + 4):
        total = product(accelerate(mixing, exchanges))
        np.testing.assert_allclose(total, mean, rtol=0, atol=1e-9)
    if enough > 1:
        total = product(accelerate(mixing, enough - 1))
        assert np.abs(total - mean).max() > 1e-3


@pytest.mark.parametrize(("name", "n"), FITTING)
def test_in_fp32_rounding_stays_a_thousandth_of_what_workers_differ_by(name: str, n: int) -> None:
    # Workers that agree to 1%: errors are relative to the parameters.
    rows = 100 + np.random.default_rng(0).standard_normal((n, 50))
    mixing = topology(name).mixing(n)
    for exchanges in (2, 4, 8, 12, 16):
        matrices = accelerate(mixing, exchanges)
        error = np.abs(in_fp32(matrices, rows) - product(matrices) @ rows).max() / 100
        plain = (mixing,) * exchanges
        plain_error = np.abs(in_fp32(plain, rows) - product(plain) @ rows).max() / 100
        assert error < 10 * plain_error
        assert error < 5e-6


def in_fp32(matrices: tuple[MixingMatrix, ...], rows: Vector) -> Vector:
    mixed = rows.astype(np.float32)
    for matrix in matrices:
        mixed = matrix.weights.astype(np.float32) @ mixed
    return mixed.astype(np.float64)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 14), st.integers(1, 12), st.integers(0, 10**6), st.floats(0.1, 0.9))
def test_random_symmetric_matrices_are_mixed_no_worse_than_by_plain_gossip(
    n: int, exchanges: int, seed: int, density: float
) -> None:
    mixing = random_mixing(n, seed, density)
    total = product(accelerate(mixing, exchanges))
    np.testing.assert_allclose(total.sum(0), 1, rtol=0, atol=1e-8)
    reached = steady_distance(factors_of(total, mixing))
    assert reached <= steady_distance(modes_of(mixing) ** exchanges) * (1 + 1e-6) + 1e-7


def random_mixing(n: int, seed: int, density: float) -> MixingMatrix:
    """A ring with random chords and random symmetric weights."""
    rng = np.random.default_rng(seed)
    linked = np.triu(rng.random((n, n)) < density, 1)
    linked |= np.triu(np.roll(np.eye(n, dtype=bool), 1, axis=1), 1)
    weights = np.where(linked, 0.1 + rng.random((n, n)), 0)
    weights = (weights + weights.T) / (2 * (weights + weights.T).sum(0).max())
    np.fill_diagonal(weights, 1 - weights.sum(0))
    return MixingMatrix(weights)


# ------------------------------------------------------------------ as part of a method


@pytest.mark.parametrize("name", ["ring", "torus", "star", "hypercube"])
def test_a_round_multiplies_the_workers_by_the_polynomial_and_keeps_their_mean(name: str) -> None:
    rows = random_rows(16, 33, dtype=torch.float64)
    parameter, optimizer = stacked(rows, gossip_sgd(name, exchanges=3, accelerated=True))
    optimizer.step()
    total = product(accelerate(topology(name).mixing(16), 3))
    np.testing.assert_allclose(parameter.detach().numpy(), total @ rows.numpy(), atol=1e-12)
    np.testing.assert_allclose(parameter.detach().mean(0), rows.mean(0), rtol=0, atol=1e-14)


def test_two_exchanges_on_a_star_are_the_exact_mean_and_cost_the_messages_of_two() -> None:
    rows = random_rows(8, 33, dtype=torch.float64)
    parameter, optimizer = stacked(rows, gossip_sgd("star", exchanges=2, accelerated=True))
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), rows.mean(0).expand_as(rows))
    assert optimizer.bytes_sent == 2 * 14 * 33 * 8


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_smallest_worlds_are_accelerated_too(n: int) -> None:
    rows = random_rows(n, 5, dtype=torch.float64)
    parameter, optimizer = stacked(rows, gossip_sgd("ring", exchanges=2, accelerated=True))
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), rows.mean(0).expand_as(rows))


@pytest.mark.parametrize(
    "name", ["one_peer_exponential", "base2", "random_matching", "exponential"]
)
def test_a_directed_or_changing_topology_is_refused_at_construction(name: str) -> None:
    with pytest.raises(ValueError, match="accelerated=False") as caught:
        stacked(random_rows(8, 5), gossip_sgd(name, exchanges=2, accelerated=True))
    message = str(caught.value)
    assert name in message or "not symmetric" in message, "what was given"
    assert "fixed" in message, "what is allowed"
    assert "'ring'" in message, "what to write instead"


def test_control_accelerates_undirected_graphs_and_leaves_the_others_plain() -> None:
    accelerated = {
        name: consensus_control(name).average == Gossip(topology(name), accelerated=True)
        for name in ("ring", "torus", "star", "exponential", "one_peer_exponential", "base2")
    }
    assert accelerated == {
        **dict.fromkeys(("ring", "torus", "star"), True),
        **dict.fromkeys(("exponential", "one_peer_exponential", "base2"), False),
    }


def mix_rank(rank: int, exchanges: int) -> Tensor:
    row = random_rows(4, 1000)[rank]
    transport = TorchTransport(timeout=30, chunk_bytes=1024)
    average = Gossip(topology("ring"), accelerated=True)
    average.form([row], [row], transport, 0, exchanges)
    return row


@pytest.mark.parametrize("exchanges", [1, 3])
def test_four_processes_and_four_stacked_workers_mix_to_the_same_bits(exchanges: int) -> None:
    rows = random_rows(4, 1000)
    parameter, optimizer = stacked(rows, gossip_sgd("ring", 1, exchanges, accelerated=True))
    optimizer.step()
    assert same(torch.stack(run_ranks(4, mix_rank, exchanges)), parameter.detach())
