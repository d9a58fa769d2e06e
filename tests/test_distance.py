"""The sketched consensus distance, against the exact one in fp64, and the free bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from consensus_opt import MixingMatrix, Sketch, StackedTransport, consensus_control, local_sgd
from consensus_opt.averaging import AllReduce, Gossip
from consensus_opt.distance import Distance, bound, of_squares
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import random_rows, same, stacked

WIDTH = 300_000  # many of the sketch's spans, and a part of one
SEEDS = 40


def exact(rows: Tensor) -> float:
    """Xi by its definition."""
    wide = rows.double()
    return float((wide - wide.mean(0)).square().sum(1).mean().sqrt())


def spread(n: int, width: int) -> Tensor:
    return random_rows(n, width)


def two_directions(n: int, width: int) -> Tensor:
    return random_rows(n, 2, seed=1) @ random_rows(2, width, seed=2)


def constant(n: int, width: int) -> Tensor:
    return random_rows(n, 1, seed=1).expand(n, width).clone()


def sine(n: int, width: int) -> Tensor:
    return random_rows(n, 1, seed=1) * torch.sin(0.001 * torch.arange(width))


def sparse(n: int, width: int) -> Tensor:
    rows = torch.zeros(n, width)
    places = torch.randperm(width, generator=torch.Generator().manual_seed(0))[:40]
    rows[:, places] = random_rows(n, 40, seed=1)
    return rows


STRUCTURES: dict[str, Callable[[int, int], Tensor]] = {
    f.__name__: f for f in (spread, two_directions, constant, sine, sparse)
}


def measure(rows: Tensor, values: int = 512, seed: int = 0) -> Distance:
    return Sketch(values, seed).measure([rows], StackedTransport(len(rows)))


# ------------------------------------------------------------------ what a sketch is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sketch_is_linear(dtype: torch.dtype) -> None:
    x, y = random_rows(2, WIDTH, dtype=dtype)
    sketch = Sketch(512)
    both = sketch.project([2 * x - 3 * y])
    torch.testing.assert_close(
        both, 2 * sketch.project([x]) - 3 * sketch.project([y]), rtol=0, atol=1e-3
    )


def test_each_value_of_a_vector_goes_to_one_place_with_a_sign() -> None:
    sketch = Sketch(16)
    places = [0, 1, 15, 16, 70_000, 1_048_576, 1_048_589]
    for place in places:
        vector = torch.zeros(1_048_590)
        vector[place] = 3.0
        expected = torch.zeros(16, dtype=torch.float64)
        expected[place % 16] = 3.0
        assert same(sketch.project([vector]).abs(), expected)


def test_stacked_workers_are_projected_each_for_itself() -> None:
    rows = random_rows(3, 70_000)
    sketch = Sketch(64)
    assert same(sketch.project([rows]), torch.stack([sketch.project([row]) for row in rows]))


def test_signs_are_balanced_and_differ_from_seed_to_seed() -> None:
    ones = torch.ones(1 << 16)
    first, second = (Sketch(1 << 16, seed).project([ones]) for seed in (0, 1))
    for signs in (first, second):
        assert set(signs.tolist()) == {-1.0, 1.0}
        assert abs(float(signs.mean())) < 4 / 256
    assert abs(float((first * second).mean())) < 4 / 256


# ------------------------------------------------------------------ how good it is


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_square_is_unbiased(structure: str) -> None:
    rows = STRUCTURES[structure](4, WIDTH)
    truth = exact(rows) ** 2
    squares = [measure(rows, 128, seed).value ** 2 / truth for seed in range(SEEDS)]
    deviation = np.std(squares, ddof=1)
    assert abs(np.mean(squares) - 1) < 4 * max(deviation, 0.01) / math.sqrt(SEEDS)


@pytest.mark.parametrize("n", [4, 16, 64])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_error_is_what_the_sketch_says_it_is(structure: str, n: int) -> None:
    rows = STRUCTURES[structure](n, WIDTH if n < 64 else 100_000)
    truth = exact(rows)
    for seed in range(5):
        measured = measure(rows, seed=seed)
        assert measured.source == "sketch"
        assert abs(measured.value / truth - 1) < 4 * measured.error
        # Only the sparse one has so few values that they may meet in few places of the sketch.
        assert measured.error < (0.3 if structure == "sparse" else 0.05)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_over_many_seeds_the_errors_have_the_size_that_the_sketch_says(structure: str) -> None:
    rows = STRUCTURES[structure](4, WIDTH)
    truth = exact(rows)
    measured = [measure(rows, 128, seed) for seed in range(SEEDS)]
    errors = math.sqrt(np.mean([(m.value / truth - 1) ** 2 for m in measured]))
    said = math.sqrt(np.mean([m.error**2 for m in measured]))
    assert errors < 1.4 * said
    below = sum(measure(rows, 512, seed).upper < truth for seed in range(SEEDS))
    assert below < 0.1 * SEEDS, "two standard errors on top hardly ever fall short"


def test_smooth_differences_of_a_large_model_err_no_more_than_those_of_a_small_one() -> None:
    # 6 folds share one set of signs: were they reused alike, errors would add up.
    ones = torch.ones(6 << 20)
    squares = [float(Sketch(512, seed).project([ones]).square().sum()) for seed in range(24)]
    relative = np.array(squares) / len(ones)
    assert abs(relative.mean() - 1) < 0.06
    assert relative.std(ddof=1) < 1.6 * math.sqrt(2 / 512)


@pytest.mark.parametrize("values", [16, 128, 512, 2048, 65_536])
def test_the_error_of_one_direction_falls_with_the_root_of_the_size(values: int) -> None:
    rows = constant(4, WIDTH)
    said = np.mean([measure(rows, values, seed).error for seed in range(10)])
    assert said == pytest.approx(1 / math.sqrt(2 * values), rel=0.25)


def test_a_large_common_offset_does_not_hurt() -> None:
    differences = 1e-3 * random_rows(8, WIDTH)
    offset = random_rows(1, WIDTH, seed=5)
    together = offset + differences
    plain, measured = measure(together - offset), measure(together)
    assert exact(together) / float(offset.norm()) < 0.002
    assert measured.value == pytest.approx(plain.value, rel=1e-3)
    assert abs(measured.value / exact(together) - 1) < 4 * measured.error


def test_workers_that_are_equal_are_at_no_distance() -> None:
    rows = random_rows(1, WIDTH).expand(8, WIDTH)
    measured = measure(rows)
    assert measured.value < 1e-6 * float(rows[0].norm())
    assert measure(torch.zeros(8, 100)) == Distance(0.0, 0.0, "sketch")


# ------------------------------------------------------------------ a part of the parameters


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("fraction", [1 / 2, 1 / 8, 1 / 64])
def test_the_square_of_a_part_is_unbiased_too(structure: str, fraction: float) -> None:
    rows = STRUCTURES[structure](4, WIDTH)
    truth = exact(rows) ** 2
    sketch = Sketch(512, fraction=fraction)
    squares = [
        sketch.measure([rows], StackedTransport(4), turn).value ** 2 / truth for turn in range(60)
    ]
    deviation = np.std(squares, ddof=1)
    assert abs(np.mean(squares) - 1) < 4 * max(deviation, 0.01) / math.sqrt(60)


def test_differences_all_over_a_model_are_told_from_a_part_of_it() -> None:
    rows = spread(4, 1_000_000)
    measured = Sketch(512, fraction=1 / 8).measure([rows], StackedTransport(4))
    assert abs(measured.value / exact(rows) - 1) < 4 * measured.error < 0.2


def test_a_part_weighs_each_of_its_values_by_how_many_it_stands_for() -> None:
    width = 8 * 512 + 100

    def weight(place: int) -> float:
        one = torch.zeros(width)
        one[place] = 1.0
        return float(Sketch(16, fraction=1 / 8).project([one]).abs().sum())

    # What is in no group of blocks is always looked at.
    assert [weight(place) for place in (width - 100, width - 1)] == [1.0, 1.0]
    for within in (0, 255, 256, 511):
        weights = [weight(512 * block + within) for block in range(8)]
        assert sorted(weights) == pytest.approx([0.0] * 7 + [math.sqrt(8)])


def test_other_parts_are_looked_at_each_time_and_small_models_as_a_whole() -> None:
    vector = random_rows(1, 64 * 512)[0]
    sketch, whole = Sketch(16, fraction=1 / 4), Sketch(16)
    assert len({tuple(sketch.project([vector], turn).tolist()) for turn in range(5)}) == 5
    small = vector[: 4 * 512 - 1]
    assert same(sketch.project([small]), whole.project([small]))


# ------------------------------------------------------------------ dtypes, buffers, bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_real_dtype_is_measured_in_at_least_fp32(dtype: torch.dtype) -> None:
    rows = random_rows(4, WIDTH, dtype=dtype)
    measured = measure(rows)
    assert abs(measured.value / exact(rows) - 1) < 4 * measured.error
    assert measured.value == pytest.approx(measure(rows.double()).value, rel=1e-5)


def test_several_buffers_are_one_vector() -> None:
    parts = [
        spread(4, 70_000),
        two_directions(4, 3).double(),
        10 * random_rows(4, 20_000, seed=7, dtype=torch.bfloat16),
    ]
    truth = math.hypot(*(exact(part) for part in parts))
    measured = Sketch(2048).measure(parts, StackedTransport(4))
    assert abs(measured.value / truth - 1) < 4 * measured.error
    # Equal buffers must not have equal signs: then their sketches would add up, not their squares.
    rows = constant(4, 200)
    twice = [measure_of(Sketch(128, seed), [rows, rows]) ** 2 for seed in range(20)]
    assert np.mean(twice) == pytest.approx(2 * exact(rows) ** 2, rel=0.15)


def measure_of(sketch: Sketch, buffers: list[Tensor]) -> float:
    return sketch.measure(buffers, StackedTransport(len(buffers[0]))).value


def test_what_is_sent_beside_comes_back_as_means_over_the_workers() -> None:
    rows, beside = random_rows(4, 100), random_rows(4, 3, seed=1, dtype=torch.float64)
    alone, nothing = Sketch(64).gather([rows], StackedTransport(4))
    sketches, means = Sketch(64).gather([rows], StackedTransport(4), beside=beside)
    assert np.array_equal(sketches, alone)
    assert means == pytest.approx(beside.mean(0).tolist())
    assert nothing == ()


@pytest.mark.parametrize("values", [128, 512])
def test_a_rank_sends_its_values_in_fp64_to_each_other(values: int) -> None:
    transport = StackedTransport(4)
    Sketch(values).measure([random_rows(4, 1000)], transport)
    assert transport.bytes_sent == 4 * 3 * values * 8


def test_a_round_counts_the_bytes_of_its_measurement() -> None:
    method = consensus_control("ring", target=math.inf, during=(0.0, 1.0), accelerated=False)
    _, optimizer = stacked(random_rows(4, 100), method)
    optimizer.step()
    exchange, sketch = 4 * 2 * 100 * 4, 4 * 3 * 512 * 8
    assert optimizer.bytes_sent == exchange + sketch


# ------------------------------------------------------------------ what it foretells


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", ["ring", "torus", "complete", "star", "one_peer_exponential"])
@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_a_sketch_foretells_the_sketches_after_any_number_of_exchanges(
    name: str, n: int, accelerated: bool
) -> None:
    gossip = Gossip(topology(name), accelerated and name != "one_peer_exponential")
    rows = random_rows(n, 5000, dtype=torch.float64)
    foreseen = gossip.foresee(Sketch(64).gather([rows], StackedTransport(n))[0], first=3)
    for exchanges, squares in zip(range(6), foreseen, strict=False):
        after = rows.clone()
        if exchanges:
            gossip.form([rows], [after], StackedTransport(n), 3, exchanges)
        sketches = Sketch(64).gather([after], StackedTransport(n))[0]
        expected = ((sketches - sketches.mean(0)) ** 2).mean(0)
        np.testing.assert_allclose(squares, expected, rtol=1e-6, atol=1e-12)


def test_an_all_reduce_leaves_no_distance() -> None:
    rows = random_rows(4, 500)
    foreseen = AllReduce().foresee(Sketch(64).gather([rows], StackedTransport(4))[0], 0)
    first, second, third = (of_squares(next(foreseen)).value for _ in range(3))
    assert first == measure(rows, 64).value
    assert (second, third) == (0.0, 0.0)


def test_each_measurement_looks_from_another_side() -> None:
    rows = two_directions(4, WIDTH)
    found = np.array([Sketch(512).measure([rows], StackedTransport(4), t).value for t in range(60)])
    assert abs(found.mean() / exact(rows) - 1) < 4 * 0.03 / math.sqrt(60)
    neighbours = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(neighbours) < 0.4


# ------------------------------------------------------------------ real ranks


def measure_rank(rank: int) -> list[Distance]:
    transport = TorchTransport(timeout=30)
    found = []
    for turn, structure in enumerate(STRUCTURES.values()):
        row = structure(4, 70_000)[rank]
        before = transport.bytes_sent
        found.append(Sketch(512).measure([row], transport, turn))
        assert transport.bytes_sent - before == 3 * 512 * 8
    return found


def test_four_processes_have_the_same_bits_and_stacked_workers_the_same_values() -> None:
    ranks = run_ranks(4, measure_rank)
    assert all(found == ranks[0] for found in ranks)
    for turn, (name, measured) in enumerate(zip(STRUCTURES, ranks[0], strict=True)):
        rows = STRUCTURES[name](4, 70_000)
        expected = Sketch(512).measure([rows], StackedTransport(4), turn)
        assert measured.value == pytest.approx(expected.value, rel=1e-9), name
        assert measured.error == pytest.approx(expected.error, rel=1e-9), name


# ------------------------------------------------------------------ the bound


@pytest.mark.parametrize("name", ["ring", "torus", "grid", "star", "complete"])
@pytest.mark.parametrize("n", [4, 9, 16, 36])
def test_what_neighbours_differ_by_bounds_the_distance(name: str, n: int) -> None:
    mixing = topology(name).mixing(n)
    rng = np.random.default_rng(n)
    _, vectors = np.linalg.eigh(mixing.weights)
    states = [rng.standard_normal((n, 5)) for _ in range(20)]
    states += [np.linalg.matrix_power(mixing.weights, 6) @ state for state in states]
    states += [vectors[:, [k]] for k in range(n - 1)]  # one mode alone: the ends of the range
    for state in states:
        theta = float(np.sqrt(np.square(mixing.weights @ state - state).sum(1).mean()))
        low, high = bound(theta, mixing.spectrum())
        xi = exact(torch.tensor(state))
        assert low * (1 - 1e-9) - 1e-14 <= xi <= high * (1 + 1e-9) + 1e-14


def test_the_ends_of_the_bound_are_those_of_its_formula() -> None:
    spectrum = topology("ring").mixing(8).spectrum()  # p = .3524, so that sqrt(1 - p) = .8047
    low, high = bound(1.0, spectrum)
    assert low == pytest.approx(1 / 1.8047, rel=1e-4)
    assert high == pytest.approx(1 / (1 - 0.8047), rel=1e-3)
    assert bound(0.0, spectrum) == (0.0, 0.0)


def test_a_bound_of_workers_that_never_agree_has_no_upper_end() -> None:
    low, high = bound(1.0, MixingMatrix(np.eye(3)).spectrum())
    assert (low, high) == (0.5, math.inf)


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize("values", [0, 1, 8, 100, 511, -512, 1 << 17])
def test_sizes_that_are_no_power_of_two_in_range_are_refused(values: int) -> None:
    with pytest.raises(ValueError, match=r"values=512"):
        Sketch(values)


@pytest.mark.parametrize("options", [{"values": 512.0}, {"values": "512"}, {"seed": 0.5}])
def test_what_is_no_integer_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"write Sketch\("):
        Sketch(**options)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 2.0, -0.5, 1 / 128])
def test_other_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction .* must be 1 or .*write Sketch\(fraction=1/8"):
        Sketch(fraction=fraction)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed of a sketch is -1.*write Sketch\(seed=0\)"):
        Sketch(seed=-1)


def test_numpy_integers_make_the_same_sketch() -> None:
    assert repr(Sketch(np.int64(512), np.int32(3))) == repr(Sketch(512, 3))


def test_the_exact_distance_of_the_optimizer_is_the_definition() -> None:
    rows = random_rows(8, 1000)
    _, optimizer = stacked(rows, local_sgd(1))
    assert optimizer.consensus_distance() == pytest.approx(exact(rows), rel=1e-6)
