"""Mixing matrices, against closed forms, published numbers and products of matrices."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consensus_opt.base_graph import base_graph
from consensus_opt.topology import (
    BaseGraph,
    Complete,
    FromGraph,
    FromMatrix,
    Grid,
    Hypercube,
    MixingMatrix,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    StaticExponential,
    Topology,
    Torus,
    exchanges_to,
    topology,
)

SIZES = [*range(1, 10), 12, 16, 25, 32, 64]
FOR_ANY_SIZE = [
    Complete(),
    Ring(),
    Star(),
    Torus(),
    Grid(),
    StaticExponential(),
    OnePeerExponential(),
    BaseGraph(),
    BaseGraph(2),
    BaseGraph(3),
    RandomMatching(),
    RandomMatching(seed=7),
]
EVERY_CASE = [
    *((t, n) for t in FOR_ANY_SIZE for n in SIZES),
    *((Hypercube(), n) for n in SIZES if n & (n - 1) == 0),
]
A_GRAPH = nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3)])
A_MATRIX = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]


def matrices(topology: Topology, n: int) -> list[MixingMatrix]:
    """One cycle, or ten phases of what never repeats."""
    return [topology.mixing(n, phase) for phase in range(topology.cycle(n) or 10)]


def left_over(topology: Topology, n: int, phases: int) -> float:
    """||W ... W - J||_2, what is left of the worst difference between workers."""
    return float(np.linalg.norm(topology.product(n, phases) - 1 / n, 2))


def peers(matrix: MixingMatrix, rank: int) -> set[int]:
    return {peer for peer, _ in matrix.receives(rank)}


# Mixing matrices


@pytest.mark.parametrize(("topology", "n"), EVERY_CASE, ids=str)
def test_R082_R083_every_phase_is_doubly_stochastic_and_keeps_a_part_of_its_own(
    topology: Topology, n: int
) -> None:
    for matrix in matrices(topology, n):
        weights = matrix.weights
        assert weights.shape == (n, n)
        assert (weights >= 0).all()
        assert (weights.diagonal() > 0).all()
        np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=0, atol=1e-14)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("topology", "n"), EVERY_CASE, ids=str)
def test_R075_R084_sends_and_receives_rebuild_the_matrix_and_match_each_other(
    topology: Topology, n: int
) -> None:
    for matrix in matrices(topology, n):
        rebuilt = np.diag([matrix.self_weight(rank) for rank in range(n)])
        for rank in range(n):
            for peer, weight in matrix.receives(rank):
                rebuilt[rank, peer] = weight
                assert rank in matrix.sends(peer)
            assert list(matrix.receives(rank)) == sorted(matrix.receives(rank))
            assert list(matrix.sends(rank)) == sorted(matrix.sends(rank))
            assert rank not in peers(matrix, rank) | set(matrix.sends(rank))
        np.testing.assert_array_equal(rebuilt, matrix.weights)
        assert matrix.messages == sum(len(matrix.sends(rank)) for rank in range(n))
        assert matrix.messages == sum(len(matrix.receives(rank)) for rank in range(n))


@pytest.mark.parametrize(("topology", "n"), EVERY_CASE, ids=str)
def test_phases_repeat_after_a_cycle(topology: Topology, n: int) -> None:
    cycle = topology.cycle(n)
    if cycle is None:
        assert isinstance(topology, RandomMatching)
        return
    for phase in range(cycle):
        assert topology.mixing(n, phase + 5 * cycle) is topology.mixing(n, phase)


@pytest.mark.parametrize(("topology", "n"), EVERY_CASE, ids=str)
def test_workers_reach_the_mean(topology: Topology, n: int) -> None:
    t = exchanges_to(topology, n, 1e-3)
    assert left_over(topology, n, t) <= 1e-3 * (1 + 1e-6)


def test_messages_of_a_directed_matrix_go_one_way() -> None:
    matrix = FromMatrix(A_MATRIX).mixing(3)
    assert matrix.receives(0) == ((1, 0.5),)
    assert matrix.sends(0) == (2,)
    assert matrix.self_weight(0) == 0.5
    assert matrix.messages == 3


def test_a_zero_on_the_diagonal_is_no_message() -> None:
    swap = MixingMatrix(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert swap.messages == 2
    assert swap.self_weight(0) == 0


def test_weights_cannot_be_written_and_do_not_follow_the_array_they_came_from() -> None:
    source = np.array([[0.5, 0.5], [0.5, 0.5]])
    matrix = MixingMatrix(source)
    source[0, 0] = 9
    for same in (matrix, copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix))):
        np.testing.assert_array_equal(same.weights, np.full((2, 2), 0.5))
        with pytest.raises(ValueError, match="read-only"):
            same.weights[0, 0] = 1.0


def test_neighbours_and_matrices_are_computed_once() -> None:
    matrix = Ring().mixing(8)
    assert Ring().mixing(8, 3) is matrix
    assert matrix.receives(2) is matrix.receives(2)
    assert matrix.sends(2) is matrix.sends(2)
    assert matrix.spectrum() is matrix.spectrum()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0.9]], r"row 0 .*sums to 0\.9; .*must sum to 1.*; put the difference"),
        ([[0.5, 0.5], [1.0, 0.0]], r"column 0 .*sums to 1\.5; .*must sum to 1.*; put the diff"),
        ([[math.nan]], r"NaN.*; all must be finite; write 0"),
        ([[1.0, 0.0]], r"shape \(1, 2\); it must be \(n, n\).*; write one row"),
        ([], r"shape \(0,\); it must be \(n, n\)"),
        ([[1.0], [0.0, 1.0]], r"no table of numbers; it must be .*; write rows of equal length"),
    ],
)
def test_what_is_no_mixing_matrix_is_refused(weights: list[list[float]], message: str) -> None:
    for make in (MixingMatrix, FromMatrix):
        with pytest.raises(ValueError, match=message):
            make(weights)  # type: ignore[arg-type]


def test_sums_may_be_off_by_rounding_only() -> None:
    MixingMatrix(np.array([[1 + 0.9e-9]]))
    with pytest.raises(ValueError, match="sums to"):
        MixingMatrix(np.array([[1 + 1.1e-9]]))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_matrix_is_refused(rank: int) -> None:
    matrix = Ring().mixing(4)
    for ask in (matrix.self_weight, matrix.receives, matrix.sends):
        with pytest.raises(ValueError, match=rf"rank {rank} .*; ranks are 0\.\.3; build"):
            ask(rank)


# Spectra


@pytest.mark.parametrize(
    ("n", "lambda_2"), [(4, 0.3333), (8, 0.8047), (16, 0.9493), (32, None), (64, None)]
)
def test_ring_has_its_closed_form_lambda_2(n: int, lambda_2: float | None) -> None:
    exact = (1 + 2 * math.cos(2 * math.pi / n)) / 3
    assert Ring().mixing(n).spectrum().lambda_2 == pytest.approx(exact, abs=1e-12)
    if lambda_2 is not None:
        assert exact == pytest.approx(lambda_2, abs=5e-5)


@pytest.mark.parametrize(("n", "p"), [(8, 0.3524), (16, 0.0989), (32, 0.02546), (64, 0.00641)])
def test_ring_has_the_published_p(n: int, p: float) -> None:
    assert Ring().mixing(n).spectrum().p == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize(
    ("n", "lambda_2"), [(4, 1 / 3), (6, 1 / 2), (8, 1 / 2), (12, 0.6), (16, 0.6)]
)
def test_static_exponential_lambda_2(n: int, lambda_2: float) -> None:
    spectrum = StaticExponential().mixing(n).spectrum()
    assert spectrum.lambda_2 == pytest.approx(lambda_2, abs=1e-12)
    assert spectrum.sigma_2 == pytest.approx(lambda_2, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "lambda_2"), [(4, 0.3333), (6, 0.75), (8, 0.8536), (12, 0.8636), (16, 0.8686)]
)
def test_grid_lambda_2(n: int, lambda_2: float) -> None:
    assert Grid().mixing(n).spectrum().lambda_2 == pytest.approx(lambda_2, abs=5e-5)


@pytest.mark.parametrize("n", [n for n in SIZES if n > 2])
def test_star_lambda_2(n: int) -> None:
    assert Star().mixing(n).spectrum().lambda_2 == pytest.approx(1 - 1 / n, abs=1e-12)


@pytest.mark.parametrize("d", range(1, 7))
def test_hypercube_lambda_2(d: int) -> None:
    """Eigenvalues of a d-cube with weights 1/(d + 1) are 1 - 2 j/(d + 1), j = 0..d."""
    spectrum = Hypercube().mixing(2**d).spectrum()
    assert spectrum.lambda_2 == pytest.approx((d - 1) / (d + 1), abs=1e-12)
    assert spectrum.lambda_min == pytest.approx((1 - d) / (d + 1), abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 4), (3, 7)])
def test_torus_lambda_2(rows: int, columns: int) -> None:
    """A torus with sides over 2 is a product of circles: (1 + 2 cos a + 2 cos b)/5."""
    values = [
        (1 + 2 * math.cos(2 * math.pi * i / rows) + 2 * math.cos(2 * math.pi * j / columns)) / 5
        for i in range(rows)
        for j in range(columns)
    ]
    spectrum = Torus(rows).mixing(rows * columns).spectrum()
    assert spectrum.lambda_2 == pytest.approx(sorted(map(abs, values))[-2], abs=1e-12)
    assert spectrum.lambda_min == pytest.approx(min(values), abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_complete_graph_is_the_mean(n: int) -> None:
    matrix = Complete().mixing(n)
    np.testing.assert_allclose(matrix.weights, np.full((n, n), 1 / n), rtol=0, atol=1e-15)
    assert matrix.spectrum().gap == pytest.approx(1, abs=1e-12)
    assert matrix.spectrum().p == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("topology", "n"), EVERY_CASE, ids=str)
def test_spectrum_agrees_with_the_definitions(topology: Topology, n: int) -> None:
    for matrix in matrices(topology, n):
        spectrum = matrix.spectrum()
        moduli = sorted([*np.abs(np.linalg.eigvals(matrix.weights)), 0.0])
        singular = sorted([*np.linalg.svd(matrix.weights, compute_uv=False), 0.0])
        assert moduli[-1] == pytest.approx(1, abs=1e-9)
        assert spectrum.lambda_2 == pytest.approx(moduli[-2] if n > 1 else 0, abs=1e-7)
        assert spectrum.sigma_2 == pytest.approx(singular[-2] if n > 1 else 0, abs=1e-9)
        assert spectrum.gap == 1 - spectrum.lambda_2
        assert 0 <= spectrum.p <= 1


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_distance_shrinks_by_p_and_edges_bound_it(data: st.DataObject) -> None:
    """Xi'^2 <= (1 - p) Xi^2; (1 - lambda_2) n Xi^2 <= E <= (1 - lambda_min) n Xi^2."""
    topology, n = data.draw(st.sampled_from(EVERY_CASE))
    x = np.random.default_rng(data.draw(st.integers(0, 2**32))).standard_normal((n, 3))
    matrix = topology.mixing(n, data.draw(st.integers(0, 20)))
    spectrum = matrix.spectrum()
    n_xi2 = ((x - x.mean(axis=0)) ** 2).sum()
    mixed = matrix.weights @ x
    np.testing.assert_allclose(mixed.mean(axis=0), x.mean(axis=0), atol=1e-13)
    assert ((mixed - x.mean(axis=0)) ** 2).sum() <= (1 - spectrum.p) * n_xi2 + 1e-9
    squares = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    energy = (matrix.weights * squares).sum() / 2
    assert (1 - spectrum.lambda_2) * n_xi2 - 1e-9 <= energy
    assert energy <= (1 - spectrum.lambda_min) * n_xi2 + 1e-9


def test_p_holds_where_eigenvalues_promise_too_much() -> None:
    """Two pair averages that do not commute: eigenvalues 1, 1/4, 0, but half a difference stays."""
    pair = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    spectrum = FromMatrix(pair @ pair[[2, 1, 0]][:, [2, 1, 0]]).mixing(3).spectrum()
    assert spectrum.lambda_2 == pytest.approx(0.25, abs=1e-9)
    assert spectrum.sigma_2 == pytest.approx(0.5, abs=1e-12)
    assert spectrum.p == pytest.approx(0.75, abs=1e-12)


# Graphs


@pytest.mark.parametrize(
    ("topology", "n", "rank", "neighbours"),
    [
        (Ring(), 2, 0, {1}),
        (Ring(), 5, 0, {1, 4}),
        (Star(), 5, 0, {1, 2, 3, 4}),
        (Star(), 5, 3, {0}),
        (Hypercube(), 8, 5, {4, 7, 1}),
        (Torus(3), 12, 5, {1, 9, 4, 6}),
        (Torus(3), 12, 0, {1, 3, 4, 8}),
        (Torus(2), 8, 0, {1, 3, 4}),
        (Torus(1), 2, 0, {1}),
        (Torus(2), 4, 0, {1, 2}),
        (Torus(), 7, 0, {1, 6}),
        (Grid(3), 12, 0, {1, 4}),
        (Grid(3), 12, 5, {1, 9, 4, 6}),
        (Grid(columns=3), 12, 4, {1, 3, 5, 7}),
        (StaticExponential(), 6, 5, {0, 1, 3}),
        (StaticExponential(), 2, 1, {0}),
        (FromGraph(A_GRAPH), 4, 2, {0, 1, 3}),
    ],
    ids=str,
)
def test_neighbours(topology: Topology, n: int, rank: int, neighbours: set[int]) -> None:
    assert peers(topology.mixing(n), rank) == neighbours


@pytest.mark.parametrize("topology", [Ring(), Torus(), Torus(2), Torus(columns=2)], ids=str)
def test_a_side_of_two_counts_a_neighbour_once(topology: Topology) -> None:
    np.testing.assert_array_equal(topology.mixing(2).weights, np.full((2, 2), 0.5))


def test_torus_of_one_row_is_a_ring() -> None:
    np.testing.assert_array_equal(Torus().mixing(13).weights, Ring().mixing(13).weights)


def test_a_graph_gets_metropolis_hastings_weights() -> None:
    """w_ij = 1/(1 + max(d_i, d_j)), written out for a triangle with a tail."""
    expected = [
        [5 / 12, 1 / 3, 1 / 4, 0],
        [1 / 3, 5 / 12, 1 / 4, 0],
        [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        [0, 0, 1 / 4, 3 / 4],
    ]
    np.testing.assert_allclose(FromGraph(A_GRAPH).mixing(4).weights, expected, atol=1e-15)


@pytest.mark.parametrize(
    ("n", "sides"), [(1, (1, 1)), (8, (2, 4)), (12, (3, 4)), (13, (1, 13)), (36, (6, 6))]
)
def test_sides_are_as_square_as_can_be(n: int, sides: tuple[int, int]) -> None:
    assert Torus().sides(n) == Grid().sides(n) == sides


def test_one_given_side_fixes_the_other() -> None:
    assert Grid(2).sides(12) == (2, 6)
    assert Grid(columns=2).sides(12) == (6, 2)
    assert Grid(4, 3).sides(12) == (4, 3)


# One-peer exponential graphs


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_one_peer_reaches_the_mean_for_powers_of_two(n: int) -> None:
    assert OnePeerExponential().cycle(n) == max(1, round(math.log2(n)))
    assert left_over(OnePeerExponential(), n, OnePeerExponential().cycle(n)) < 1e-14


@pytest.mark.parametrize(
    ("n", "exchanges", "left"), [(6, 3, 0.217), (6, 6, 0.0469), (12, 4, 0.209), (12, 8, 0.0437)]
)
def test_one_peer_leaves_the_published_rest_otherwise(n: int, exchanges: int, left: float) -> None:
    assert exchanges % OnePeerExponential().cycle(n) == 0
    assert left_over(OnePeerExponential(), n, exchanges) == pytest.approx(left, rel=3e-3)


@pytest.mark.parametrize("n", SIZES[1:])
def test_one_peer_receives_half_from_the_rank_ahead(n: int) -> None:
    for phase in range(OnePeerExponential().cycle(n)):
        matrix = OnePeerExponential().mixing(n, phase)
        for rank in range(n):
            assert matrix.receives(rank) == (((rank + 2**phase) % n, 0.5),)
            assert matrix.sends(rank) == ((rank - 2**phase) % n,)


# Base-(k+1) graphs


@pytest.mark.parametrize("k", range(1, 5))
def test_base_graph_reaches_the_mean_within_k_peers(k: int) -> None:
    for n in range(1, 71):
        cycle = BaseGraph(k).cycle(n)
        product = BaseGraph(k).product(n, cycle)
        np.testing.assert_allclose(product, np.full((n, n), 1 / n), rtol=0, atol=1e-12)
        for matrix in matrices(BaseGraph(k), n):
            assert max(len(matrix.receives(rank)) for rank in range(n)) <= k
            np.testing.assert_array_equal(matrix.weights, matrix.weights.T)


@pytest.mark.parametrize(
    ("n", "exchanges"),
    [(3, 3), (5, 5), (6, 4), (8, 3), (12, 5), (16, 4), (22, 8), (25, 9), (32, 5), (48, 7), (64, 6)],
)
def test_base_graph_has_the_published_length(n: int, exchanges: int) -> None:
    assert BaseGraph().cycle(n) == exchanges
    assert left_over(BaseGraph(), n, exchanges - 1) > 1e-3


def test_base_graph_of_smooth_numbers_is_a_hyper_hypercube() -> None:
    """As few phases as factors up to k + 1; 12 = 4 x 3 and 64 = 4 x 4 x 4."""
    assert [BaseGraph(3).cycle(n) for n in (4, 12, 64)] == [1, 2, 3]
    assert [BaseGraph(2).cycle(n) for n in (3, 9, 12)] == [1, 2, 3]


def test_base_graph_of_three_written_out() -> None:
    """3 = 2 + 1: the pair averages, rank 0 shares 1/3 with rank 2, and the pair averages again."""
    assert base_graph(3, 1) == (((0, 1, 1 / 2),), ((0, 2, 2 / 3),), ((0, 1, 1 / 2),))


@given(n=st.integers(1, 150), k=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_base_graph_links_each_pair_once_and_never_idles_all_ranks(n: int, k: int) -> None:
    phases = base_graph(n, k)
    for links in phases:
        pairs = {frozenset((i, j)) for i, j, _ in links}
        assert len(pairs) == len(links)
        assert all(0 <= i < n and 0 <= j < n and i != j and 0 < w < 1 for i, j, w in links)
        assert links or n == 1
    bound = 2 * math.log(n, k + 1) + 2
    assert len(phases) <= max(1, bound)
    assert left_over(BaseGraph(k), n, len(phases)) < 1e-12


# Random matchings


@given(
    seed=st.integers(0, 2**63), phase=st.integers(0, 2**63), n=st.sampled_from([1, 2, 3, 8, 9, 33])
)
@settings(max_examples=60, deadline=None)
def test_matching_pairs_all_but_the_odd_one(seed: int, phase: int, n: int) -> None:
    matrix = RandomMatching(seed).mixing(n, phase)
    alone = 0
    for rank in range(n):
        assert matrix.sends(rank) == tuple(peers(matrix, rank))
        alone += matrix.receives(rank) == ()
        assert matrix.self_weight(rank) == (0.5 if matrix.receives(rank) else 1.0)
    assert alone == n % 2


def test_matching_changes_with_phase_and_seed_and_never_repeats() -> None:
    assert RandomMatching().cycle(16) is None
    drawn = [RandomMatching(seed).mixing(16, t) for seed in (0, 1) for t in range(50)]
    assert len({matrix.weights.tobytes() for matrix in drawn}) == 100


def test_every_pair_meets_about_equally_often() -> None:
    """Each of the 5 peers of a rank in 1/5 of 2000 phases: 400, standard deviation 18."""
    met = np.sum([RandomMatching().mixing(6, t).weights for t in range(2000)], axis=0)
    often = 2 * met[~np.eye(6, dtype=bool)]
    assert (abs(often - 400) < 5 * 18).all()


# Values


DISTINCT = [
    *FOR_ANY_SIZE,
    Hypercube(),
    Torus(2),
    Torus(columns=2),
    Torus(2, 3),
    Grid(2),
    FromGraph(A_GRAPH),
    FromGraph([(0, 1)]),
    FromMatrix(A_MATRIX),
    FromMatrix([[0.5, 0.5], [0.5, 0.5]]),
]


@pytest.mark.parametrize("topology", DISTINCT, ids=repr)
def test_repr_and_pickle_give_the_same_value_back(topology: Topology) -> None:
    for same in (
        eval(repr(topology)),
        pickle.loads(pickle.dumps(topology)),
        copy.deepcopy(topology),
    ):
        assert same == topology
        assert hash(same) == hash(topology)
        assert repr(same) == repr(topology)


def test_different_topologies_differ_in_value_and_repr() -> None:
    assert len(set(DISTINCT)) == len({repr(t) for t in DISTINCT}) == len(DISTINCT)


def test_repr_does_not_depend_on_how_the_same_value_was_given() -> None:
    backwards = nx.MultiGraph([(np.int64(3), 2), (0, 2), (1, 2), (2, 1), (1, 0), (0, 0)])
    assert repr(FromGraph(backwards)) == repr(FromGraph(A_GRAPH))
    assert repr(FromGraph(A_GRAPH)) == "FromGraph(edges=((0, 1), (0, 2), (1, 2), (2, 3)))"
    negative_zeros = np.array(A_MATRIX, dtype=np.float32)
    negative_zeros[negative_zeros == 0] = -0.0
    assert repr(FromMatrix(negative_zeros)) == repr(FromMatrix(A_MATRIX))
    assert repr(Torus(np.int64(2))) == "Torus(rows=2, columns=None)"
    assert repr(BaseGraph(np.int32(2))) == "BaseGraph(k=2)"


def test_another_process_builds_the_same_bits() -> None:
    """Ranks build their matrices on their own; string hashing differs between processes."""
    program = (
        "import hashlib; from consensus_opt.topology import *\n"
        "def bits(t, n): return b''.join(t.mixing(n, p).weights.tobytes() for p in range(5))\n"
        "star = FromGraph([(4, 0), (1, 4), (2, 4), (3, 4)])\n"
        "every = [RandomMatching(3), BaseGraph(2), Torus(), star]\n"
        "print(hashlib.sha256(b''.join(bits(t, 5) for t in every)).hexdigest(), every)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent.parent,
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            timeout=120,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("complete", Complete()),
        ("ring", Ring()),
        ("star", Star()),
        ("torus", Torus()),
        ("torus:4x2", Torus(4, 2)),
        ("grid", Grid()),
        ("grid:3x4", Grid(3, 4)),
        ("grid:3x*", Grid(3)),
        ("grid:*x4", Grid(columns=4)),
        ("hypercube", Hypercube()),
        ("exponential", StaticExponential()),
        ("one_peer_exponential", OnePeerExponential()),
        ("base2", BaseGraph(1)),
        ("base3", BaseGraph(2)),
        ("base12", BaseGraph(11)),
        ("random_matching", RandomMatching()),
        ("random_matching:7", RandomMatching(7)),
    ],
)
def test_a_name_means_a_topology_and_back(name: str, expected: Topology) -> None:
    assert topology(name) == expected
    assert expected.name == name


def test_topologies_and_graphs_resolve() -> None:
    assert topology(Torus(3)) == Torus(3)
    assert topology(A_GRAPH) == FromGraph(A_GRAPH)
    assert topology(A_GRAPH).name == "graph"
    assert FromMatrix(A_MATRIX).name == "matrix"


@pytest.mark.parametrize("name", ["", "Ring", "rings", "torus:4", "torus:4x", "base", "base-2"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    known = "complete, ring, star, torus, grid, hypercube, exponential, one_peer_exponential, base2"
    with pytest.raises(ValueError, match=f"'{name}' is not known; known are {known}.*; write one"):
        topology(name)


def test_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"from list; it takes .*; write FromMatrix\(weights\)"):
        topology([[1.0]])


# What does not fit


@pytest.mark.parametrize(
    ("topology", "n", "message"),
    [
        (
            Ring(),
            0,
            r"number of workers is 0; it must be an integer of at least 1; write 1 or more",
        ),
        (BaseGraph(), -3, r"number of workers is -3; .*at least 1"),
        (
            Hypercube(),
            6,
            r"hypercube does not fit 6 workers; .*power of two.*; write BaseGraph\(\)",
        ),
        (
            Torus(5),
            12,
            r"Torus\(rows=5, columns=None\) does not fit 12 workers; rows x columns must be one of "
            r"1x12, 2x6, 3x4, 4x3, 6x2, 12x1; write Torus\(\)",
        ),
        (Grid(4, 2), 12, r"Grid\(rows=4, columns=2\) does not fit 12 workers; .*; write Grid\(\)"),
        (FromGraph(A_GRAPH), 5, r"this graph has 4 ranks and does not fit 5 workers; start 4 w"),
        (FromMatrix(A_MATRIX), 4, r"this matrix has 3 ranks and does not fit 4 workers; start 3 w"),
    ],
    ids=str,
)
def test_a_number_of_workers_that_does_not_fit_says_which_do(
    topology: Topology, n: int, message: str
) -> None:
    for ask in (topology.validate, topology.mixing):
        with pytest.raises(ValueError, match=message):
            ask(n)
    with pytest.raises(ValueError, match=message):
        exchanges_to(topology, n, 0.5)


@pytest.mark.parametrize("n", [2.0, True, "2", None, np.array([1, 2])], ids=str)
def test_a_number_of_workers_of_the_wrong_kind_is_refused(n: int) -> None:
    for ask in (Ring().validate, Ring().mixing):
        with pytest.raises(TypeError, match=r"number of workers is .*; it must be an integer of"):
            ask(n)


def test_a_cached_matrix_does_not_let_bad_arguments_through() -> None:
    Ring().mixing(4, 0)
    with pytest.raises(TypeError, match=r"number of workers is 4\.0"):
        Ring().mixing(4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"phase is -1; it must be an integer of at least 0"):
        Ring().mixing(4, -1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Torus(0), "torus rows is 0; it must be an integer of at least 1; write 1 or more"),
        (lambda: Grid(2, -1), "grid columns is -1; it must be"),
        (lambda: BaseGraph(0), r"k of a Base-\(k\+1\) graph is 0; it must be"),
        (lambda: topology("base1"), r"k of a Base-\(k\+1\) graph is 0; it must be"),
        (lambda: RandomMatching(-1), "seed of a random matching is -1; it must be"),
    ],
)
def test_bad_configuration_fails_at_construction(
    make: Callable[[], Topology], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_configuration_of_the_wrong_kind_fails_at_construction() -> None:
    with pytest.raises(TypeError, match=r"torus rows is 2\.0; it must be an integer"):
        Torus(2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed of a random matching is None; it must be"):
        RandomMatching(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            nx.Graph([(0, 1), (2, 3), (3, 4)]),
            r"into 2 components: \{0, 1\}, \{2, 3, 4\}; it must be connected.*; add .*as \(0, 2\)",
        ),
        (nx.empty_graph(2), r"falls into 2 components: \{0\}, \{1\}; it must be connected"),
        (
            nx.disjoint_union(nx.path_graph(20), nx.path_graph(2)),
            r"\{0, 1, .*, 11, \.\.\. \(20 in all\)\}, \{20, 21\}; it must be connected",
        ),
        (nx.DiGraph([(0, 1)]), r"directed graph; it must be undirected.*; write .*to_undirected"),
        (nx.Graph([(1, 2)]), r"nodes \{1, 2\}; they must be exactly .* 0\.\.n-1; write .*convert"),
        (nx.Graph([("a", "b")]), r"nodes \{a, b\}; they must be exactly the ranks"),
        (nx.Graph(), r"nodes \{\}; they must be exactly the ranks"),
    ],
    ids=str,
)
def test_a_graph_that_cannot_work_is_refused(graph: nx.Graph, message: str) -> None:
    for make in (FromGraph, topology):
        with pytest.raises(ValueError, match=message):
            make(graph)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.eye(3), r"3 components: \{0\}, \{1\}, \{2\}; it must be connected"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"weight \[0, 1\] .* is -0\.5; weights must be >= 0; write 0"),
        (
            np.roll(np.eye(3), 1, axis=1),
            r"only passes parameters around .*; workers must come to agree.*; write \(W \+ I\)/2",
        ),
    ],
)
def test_a_matrix_that_never_agrees_is_refused(weights: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FromMatrix(weights)


@pytest.mark.parametrize("edges", [7, "ring", [1, 2], [(0, 1, 2, 3)]])
def test_what_is_no_list_of_edges_is_refused(edges: object) -> None:
    with pytest.raises(ValueError, match=r"was given .*; it takes .* pairs of ranks; write FromG"):
        FromGraph(edges)


def test_one_worker_may_come_as_a_graph_or_matrix() -> None:
    for alone in (FromGraph(nx.empty_graph(1)), FromMatrix([[1.0]])):
        np.testing.assert_array_equal(alone.mixing(1).weights, [[1.0]])


@given(n=st.integers(2, 12), seed=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_connected_graph_mixes_and_a_disconnected_one_is_refused(n: int, seed: int) -> None:
    graph = nx.gnp_random_graph(n, 0.35, seed=seed)
    if nx.is_connected(graph):
        matrix = FromGraph(graph).mixing(n)
        assert matrix.spectrum().lambda_2 < 1
        assert all(peers(matrix, rank) == set(graph[rank]) for rank in range(n))
    else:
        with pytest.raises(ValueError, match="components"):
            FromGraph(graph)


# How many exchanges


@pytest.mark.parametrize(
    ("topology", "n", "fraction"),
    [
        (Ring(), 5, 0.01),
        (Ring(), 16, 0.1),
        (Star(), 8, 0.3),
        (Torus(), 12, 1e-6),
        (OnePeerExponential(), 6, 0.3),
        (OnePeerExponential(), 6, 0.01),
        (OnePeerExponential(), 12, 1e-5),
        (BaseGraph(), 25, 0.4),
        (BaseGraph(), 25, 1e-12),
        (RandomMatching(), 8, 0.05),
        (FromMatrix(A_MATRIX), 3, 1e-4),
    ],
    ids=str,
)
def test_exchanges_to_is_the_first_product_below_the_fraction(
    topology: Topology, n: int, fraction: float
) -> None:
    t = exchanges_to(topology, n, fraction)
    assert left_over(topology, n, t) <= fraction * (1 + 1e-6)
    assert left_over(topology, n, t - 1) > fraction


@pytest.mark.parametrize("fraction", [0.5, 0.1, 1e-3, 1e-10])
@pytest.mark.parametrize("n", [8, 32, 64])
def test_a_ring_needs_the_logarithm_over_that_of_lambda_2(n: int, fraction: float) -> None:
    lambda_2 = (1 + 2 * math.cos(2 * math.pi / n)) / 3
    assert exchanges_to(Ring(), n, fraction) == math.ceil(math.log(fraction) / math.log(lambda_2))


def test_exact_topologies_need_one_cycle() -> None:
    assert exchanges_to(Complete(), 12, 1e-12) == 1
    assert exchanges_to(OnePeerExponential(), 32, 1e-12) == 5
    assert exchanges_to(BaseGraph(), 25, 1e-12) == 9


def test_nothing_needs_no_exchange() -> None:
    assert exchanges_to(Ring(), 1, 1e-12) == 0
    assert exchanges_to(Ring(), 64, 1.0) == 0


@pytest.mark.parametrize("topology", [Ring(), OnePeerExponential(), RandomMatching()], ids=str)
def test_exchanges_to_stops_at_its_limit(topology: Topology) -> None:
    needed = exchanges_to(topology, 12, 1e-3)
    assert exchanges_to(topology, 12, 1e-3, limit=needed) == needed
    message = rf"{re.escape(repr(topology))} needs more than limit={needed - 1} .*; write a larger"
    with pytest.raises(ValueError, match=message):
        exchanges_to(topology, 12, 1e-3, limit=needed - 1)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, 1e-13, math.nan])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction is .*; it must lie in \[1e-12, 1\]; write"):
        exchanges_to(Ring(), 4, fraction)
