"""The planner's models, against hand calculations, closed forms and simulated workers."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch

from consensus_opt import gossip_sgd, local_sgd
from consensus_opt.acceleration import accelerate
from consensus_opt.averaging import AllReduce, Gossip
from consensus_opt.control import Fixed
from consensus_opt.planner import Candidate, Job, Network, plan, recommend
from consensus_opt.steady import distance, mode_factors
from consensus_opt.timing import Every
from consensus_opt.topology import OnePeerExponential, Ring, Star, exchanges_to, topology
from consensus_opt.topology_profile import FRACTIONS, profile
from consensus_opt.transport import StackedTransport

NETWORK = Network(bandwidth=1.25e9, latency=50e-6)
JOB = Job(25_600_000, 64, NETWORK, 0.25)
EVERY_NAME = [
    "complete",
    "ring",
    "star",
    "torus",
    "grid",
    "hypercube",
    "exponential",
    "one_peer_exponential",
    "base2",
    "base3",
    "random_matching",
]


# Time


def test_exchange_time_is_latency_and_the_messages_of_the_busiest_worker() -> None:
    size = 102_400_000
    ring = NETWORK.exchange_seconds(Ring().mixing(64), size)
    one_peer = NETWORK.exchange_seconds(OnePeerExponential().mixing(64), size)
    star = NETWORK.exchange_seconds(Star().mixing(64), size)
    assert ring == pytest.approx(50e-6 + 2 * 0.08192)
    assert one_peer == pytest.approx(50e-6 + 0.08192)
    assert star == pytest.approx(50e-6 + 63 * 0.08192)
    assert NETWORK.exchange_seconds(Ring().mixing(1), size) == 0


def test_all_reduce_time_is_that_of_the_ring_algorithm() -> None:
    # 126 latencies, and 126/64 of the model at 1.25 GB/s.
    assert NETWORK.all_reduce_seconds(64, 102_400_000) == pytest.approx(0.0063 + 0.16128)
    assert NETWORK.all_reduce_seconds(1, 102_400_000) == 0


def test_a_step_takes_its_time_and_its_share_of_a_round() -> None:
    _, every, _, rarely = plan(JOB, ["ring"], [1, 4], target=9.0).candidates
    assert every.seconds == pytest.approx(0.25 + 50e-6 + 0.16384)
    assert every.share == pytest.approx(1 - 0.25 / every.seconds)
    assert rarely.seconds == pytest.approx(0.25 + (50e-6 + 0.16384) / 4)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_bytes_are_what_a_transport_counts(name: str) -> None:
    n, params, cycles = 8, 1000, 64
    transport, graph = StackedTransport(n), topology(name)
    for phase in range(cycles):
        transport.exchange(torch.zeros(n, params), graph.mixing(n, phase))
    job = Job(params, n, NETWORK, 1.0)
    found = [each for each in plan(job, [name], [1]).candidates if each.average == name]
    assert found[0].bytes == pytest.approx(transport.bytes_sent / n / cycles)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_bytes_of_an_all_reduce_are_what_a_transport_counts(
    dtype: str, torch_dtype: torch.dtype
) -> None:
    transport = StackedTransport(8)
    transport.mean(torch.zeros(8, 1000, dtype=torch_dtype))
    job = Job(1000, 8, NETWORK, 1.0, dtype)
    assert plan(job, [], [1]).candidates[0].bytes == transport.bytes_sent / 8


def test_half_precision_halves_gossip_and_not_an_all_reduce() -> None:
    half = Job(JOB.params, JOB.workers, NETWORK, JOB.step_seconds, "bf16")
    sync, ring = plan(half, ["ring"], [1], target=1.0).candidates
    wide_sync, wide_ring = plan(JOB, ["ring"], [1], target=1.0).candidates
    assert ring.bytes == wide_ring.bytes / 2
    assert sync.bytes == wide_sync.bytes


# Distance


def simulated(name: str | None, n: int, period: int, exchanges: int, accelerated: bool) -> float:
    """Distance at the gradients of workers that take random unit steps and average."""
    average = Gossip(topology(name), accelerated) if name else AllReduce()
    generator = torch.Generator().manual_seed(1)
    params, settling, rounds = 1024, 60, 240
    transport, x = StackedTransport(n), torch.zeros(n, params, dtype=torch.float64)
    squared: list[float] = []
    for number in range(settling + rounds):
        for _ in range(period):
            if number >= settling:
                squared.append(float((x - x.mean(0)).square().sum(1).mean()))
            x += torch.randn(x.shape, generator=generator, dtype=x.dtype) / math.sqrt(params)
        average.form([x], [x], transport, number * exchanges, exchanges)
    return math.sqrt(sum(squared) / len(squared))


@pytest.mark.parametrize(
    ("name", "n", "period", "exchanges", "accelerated"),
    [
        ("ring", 8, 1, 1, False),
        ("ring", 8, 3, 2, False),
        ("ring", 12, 1, 3, True),
        ("grid", 12, 2, 2, True),
        ("star", 5, 1, 1, False),
        ("exponential", 12, 1, 1, False),
        ("one_peer_exponential", 8, 1, 1, False),
        ("one_peer_exponential", 12, 2, 3, False),
        ("base2", 6, 1, 1, False),
        ("base3", 22, 1, 4, False),
        ("random_matching", 9, 1, 1, False),
        (None, 8, 4, 1, False),
    ],
)
def test_distance_is_that_of_simulated_workers(
    name: str | None, n: int, period: int, exchanges: int, accelerated: bool
) -> None:
    graph = topology(name or "complete")
    predicted = distance(graph, n, period, exchanges, accelerated)
    assert predicted == pytest.approx(simulated(name, n, period, exchanges, accelerated), rel=0.02)


@pytest.mark.parametrize("n", [4, 8, 32, 64])
def test_distance_of_the_ring_is_the_sum_over_its_eigenvalues(n: int) -> None:
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n)]
    energy = sum(each**2 / (1 - each**2) for each in eigenvalues) / n
    assert distance(Ring(), n) == pytest.approx(math.sqrt(energy))


def test_distance_of_random_pairs_is_that_of_their_expectation() -> None:
    # A pair keeps half of its difference's energy: f = (n/2 - 1)/(n - 1) on average, for even n.
    n = 16
    left = (n / 2 - 1) / (n - 1)
    expected = math.sqrt(left / (1 - left) * (1 - 1 / n))
    assert distance(topology("random_matching"), n) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["ring", "torus", "grid", "star", "complete", "hypercube"])
@pytest.mark.parametrize("exchanges", [1, 2, 5])
def test_modes_are_left_as_the_accelerated_matrices_leave_them(name: str, exchanges: int) -> None:
    mixing = topology(name).mixing(16)
    matrices = [each.weights for each in accelerate(mixing, exchanges)]
    product = reduce(np.matmul, matrices)
    eigenvalues = np.sort(np.linalg.eigvalsh(product - 1 / 16))
    factors = np.append(mode_factors(topology(name), 16, exchanges, True), 0.0)
    np.testing.assert_allclose(np.sort(factors), eigenvalues, atol=1e-9)


# Plans


def test_the_uncontrolled_ring_is_the_unit_of_distance() -> None:
    found = plan(JOB, ["ring"], [1])
    sync, ring, *_ = found.candidates
    assert (sync.relative, ring.relative) == (0.0, 1.0)
    assert found.xi_max == ring.distance == distance(Ring(), 64)


def test_further_exchanges_are_the_fewest_that_meet_the_target() -> None:
    _, once, more = plan(JOB, ["ring"], [1], target=0.3).candidates
    assert (once.exchanges, once.meets, more.meets, more.accelerated) == (1, False, True, True)
    limit = 0.3 * distance(Ring(), 64)
    assert more.distance <= limit < distance(Ring(), 64, 1, more.exchanges - 1, True)


def test_no_exchanges_are_added_where_even_the_exact_mean_would_miss() -> None:
    assert [each.exchanges for each in plan(JOB, ["ring"], [16]).candidates] == [1, 1]


def test_what_meets_the_target_is_within_it_and_the_recommended_is_fastest() -> None:
    found = plan(JOB, EVERY_NAME, [1, 2, 4], target=0.3)
    for each in found.candidates:
        assert each.meets == (each.distance <= 0.3 * found.xi_max)
    fastest = min(each.seconds for each in found.candidates if each.meets)
    assert found.recommended is not None
    assert found.recommended.meets
    assert found.recommended.seconds <= 1.01 * fastest


def test_a_faster_network_or_a_looser_target_never_makes_the_step_slower() -> None:
    slow = plan(Job(10**9, 16, Network(1e8, 1e-3), 0.1), target=0.25).recommended
    fast = plan(Job(10**9, 16, Network(1e9, 1e-3), 0.1), target=0.25).recommended
    loose = plan(Job(10**9, 16, Network(1e8, 1e-3), 0.1), target=2.5).recommended
    assert slow is not None
    assert fast is not None
    assert loose is not None
    assert fast.seconds < slow.seconds
    assert loose.seconds < slow.seconds


def candidate(seconds: float, away: float, meets: bool) -> Candidate:
    return Candidate("ring", 1, 1, False, seconds, 0.5, 1e6, away, away, meets)


def test_recommended_is_the_closest_of_those_within_a_percent_of_the_fastest_that_meets() -> None:
    misses = candidate(0.5, 0.9, False)
    fast, near, far = (
        candidate(1.0, 0.2, True),
        candidate(1.009, 0.1, True),
        candidate(1.02, 0.0, True),
    )
    assert recommend([misses, fast, near, far]) is near
    assert recommend([misses, fast, far]) is fast
    assert recommend([misses]) is None


def test_recipes_make_the_methods_that_were_predicted() -> None:
    names = {"gossip_sgd": gossip_sgd, "local_sgd": local_sgd}
    for each in plan(JOB, EVERY_NAME, [1, 4], target=0.3).candidates:
        method = eval(each.recipe, names)
        assert method.timing == Every(each.period)
        if each.average == "all_reduce":
            assert method == local_sgd(each.period)
            continue
        assert method.average == Gossip(topology(each.average), each.accelerated)
        assert method.control == Fixed(each.exchanges)
        method.average.validate(64)


def test_two_workers_have_no_ratio_and_exact_candidates_meet() -> None:
    found = plan(Job(1000, 2, NETWORK, 1.0), ["ring"], [1, 4])
    assert found.xi_max == pytest.approx(0, abs=1e-9)
    assert [each.relative for each in found.candidates] == [None] * 4
    assert [each.meets for each in found.candidates] == [True, True, False, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Network(0.0, 0.0), "bandwidth is 0.0; it must be"),
        (lambda: Network(1.0, -1.0), "latency is -1.0; it must be"),
        (lambda: Job(1, 1, NETWORK, 1.0), "workers is 1; it must be an integer of at least 2"),
        (lambda: Job(0, 2, NETWORK, 1.0), "parameters is 0; it must be"),
        (lambda: Job(1, 2, NETWORK, 0.0), "time of a step is 0.0; it must be"),
        (lambda: Job(1, 2, NETWORK, 1.0, "int8"), "dtype is 'int8'; it must be one of"),
        (lambda: plan(JOB, target=0.0), "target is 0.0; it must be"),
        (lambda: plan(JOB, periods=[0]), "period is 0; it must be"),
        (lambda: plan(JOB, most=0), "exchanges of a round is 0; it must be"),
        (lambda: plan(JOB, ["rong"]), "'rong' is not known; known are"),
    ],
)
def test_bad_numbers_are_refused_with_what_to_write(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()  # type: ignore[operator]
    assert "write" in str(caught.value)


# What a topology does


def brute_force(matrices: list[np.ndarray], norm: str, fraction: float) -> int | None:
    """The first number of exchanges that leaves at most ``fraction``, by multiplying matrices."""
    n = len(matrices[0])
    left = np.eye(n) - 1 / n
    for number, weights in enumerate([np.eye(n), *matrices]):
        left = weights @ left
        worst, random = np.linalg.norm(left, 2), np.linalg.norm(left) / math.sqrt(n - 1)
        if (worst if norm == "worst" else random) <= fraction * (1 + 1e-9):
            return number
    return None


@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("n", [2, 8, 16])
def test_exchanges_to_a_fraction_are_those_of_multiplied_matrices(name: str, n: int) -> None:
    graph = topology(name)
    matrices = [graph.mixing(n, phase).weights for phase in range(120)]
    for row, fraction in zip(profile(graph, n, 4).reach, FRACTIONS, strict=True):
        assert row.worst == brute_force(matrices, "worst", fraction)
        assert row.random == brute_force(matrices, "random", fraction)
        assert row.worst == exchanges_to(graph, n, fraction)


@pytest.mark.parametrize(("name", "n"), [("ring", 12), ("torus", 16), ("grid", 9), ("star", 6)])
def test_accelerated_exchanges_to_a_fraction_are_those_of_their_matrices(name: str, n: int) -> None:
    mixing = topology(name).mixing(n)

    def fewest(norm: str, fraction: float) -> int:
        for exchanges in range(1, 20):
            product = reduce(lambda a, w: w.weights @ a, accelerate(mixing, exchanges), np.eye(n))
            if brute_force([product], norm, fraction) is not None:
                return exchanges
        raise AssertionError("too many")

    for row in profile(topology(name), n, 4).reach:
        assert row.accelerated_worst == fewest("worst", row.fraction)
        assert row.accelerated_random == fewest("random", row.fraction)


def test_profile_counts_links_messages_and_spectrum() -> None:
    ring = profile(Ring(), 32, 100)
    assert (ring.degree, ring.messages, ring.worker_bytes, ring.cycle) == ((2, 2), 64, 200, 1)
    assert ring.lambda_2 == pytest.approx((1 + 2 * math.cos(2 * math.pi / 32)) / 3)
    assert ring.p == pytest.approx(0.02546, abs=5e-6)
    star = profile(Star(), 5, 100)
    assert (star.degree, star.messages) == ((1, 4), 8)
    pairs = profile(topology("random_matching"), 5, 100)
    assert (pairs.cycle, pairs.lambda_2, pairs.gap, pairs.degree) == (None, None, None, (0, 1))
    exact = profile(OnePeerExponential(), 16, 100)
    assert exact.lambda_2 == pytest.approx(0, abs=1e-3)
    assert exact.cycle == 4
