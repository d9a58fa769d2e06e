"""What methods compute, against formulas: stacked workers that get known gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from consensus_opt import (
    Method,
    RoundRecord,
    dppf,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from consensus_opt.schedules import Constant, CosineDown, CosineUp, Linear, schedule
from consensus_opt.timing import Every, PostLocal, QuadraticSync, Timing
from consensus_opt.topology import topology
from tests.problems import random_rows, same, stacked

N, WIDTH = 8, 33
TOPOLOGIES = [
    "complete",
    "ring",
    "star",
    "torus",
    "torus:4x2",
    "grid",
    "grid:2x*",
    "hypercube",
    "exponential",
    "one_peer_exponential",
    "base2",
    "base3",
    "random_matching",
    "random_matching:7",
]


def run(rows: torch.Tensor, method: Method, steps: int, lr: float = 0.0) -> torch.Tensor:
    """Workers after some steps on ``||x - target||^2 / 2``, with a target for each worker."""
    parameter, optimizer = stacked(rows, method, lr)
    targets = random_rows(len(rows), rows.shape[1], seed=9, dtype=rows.dtype)
    for _ in range(steps):
        parameter.grad = parameter.detach() - targets
        optimizer.step()
    return parameter.detach()


def radii(rows: torch.Tensor) -> torch.Tensor:
    return (rows - rows.mean(0)).norm(dim=1)


@pytest.mark.parametrize("period", [1, 3])
def test_dppf_that_pulls_fully_and_never_pushes_is_local_sgd_bit_for_bit(period: int) -> None:
    rows = random_rows(N, WIDTH)
    without_force = dppf(alpha=1.0, lam=0.0, period=period)
    assert same(run(rows, without_force, 7, lr=0.1), run(rows, local_sgd(period), 7, lr=0.1))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_gossip_on_the_complete_graph_is_the_all_reduce_mean_to_rounding(n: int) -> None:
    rows = random_rows(n, WIDTH)
    gossiped = run(rows, gossip_sgd("complete"), 5, lr=0.1)
    torch.testing.assert_close(gossiped, run(rows, local_sgd(1), 5, lr=0.1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_one_peer_exponential_is_the_exact_mean_after_log2_n_exchanges(n: int) -> None:
    rows = random_rows(n, WIDTH, dtype=torch.float64)
    mixed = run(rows, gossip_sgd("one_peer_exponential", exchanges=n.bit_length() - 1), 1)
    torch.testing.assert_close(mixed, rows.mean(0).expand_as(rows), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("n", "rounds"), [(3, 3), (5, 5), (6, 4), (12, 5)])
def test_base_2_graphs_reach_the_exact_mean_for_every_n(n: int, rounds: int) -> None:
    rows = random_rows(n, WIDTH, dtype=torch.float64)
    mixed = run(rows, gossip_sgd("base2"), rounds)
    torch.testing.assert_close(mixed, rows.mean(0).expand_as(rows), rtol=0, atol=1e-14)
    assert not torch.allclose(run(rows, gossip_sgd("base2"), rounds - 1), mixed)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_decentralized_sgd_is_a_gradient_step_and_then_the_mixing_matrix(name: str) -> None:
    rows = random_rows(N, WIDTH, dtype=torch.float64)
    targets = random_rows(N, WIDTH, seed=9, dtype=torch.float64).numpy()
    expected = rows.numpy().copy()
    graph = topology(name)
    for step in range(1, 9):
        expected -= 0.1 * (expected - targets)
        if step % 2 == 0:
            for exchange in (step - 2, step - 1):
                expected = graph.mixing(N, exchange).weights @ expected
    result = run(rows, gossip_sgd(name, period=2, exchanges=2), 8, lr=0.1)
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_exchange_keeps_the_mean_and_brings_workers_together(name: str) -> None:
    rows = random_rows(N, WIDTH, dtype=torch.float64)
    mixed = run(rows, gossip_sgd(name), 1)
    torch.testing.assert_close(mixed.mean(0), rows.mean(0), rtol=0, atol=1e-14)
    assert radii(mixed).norm() < radii(rows).norm()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("lam", [0.1, 0.5, 2.0])
def test_the_radius_follows_its_recursion_and_settles_at_lambda_over_alpha(
    alpha: float, lam: float
) -> None:
    # Two workers: their pushes cancel in the mean, so that the recursion is exact.
    rows = random_rows(2, WIDTH, dtype=torch.float64)
    parameter, optimizer = stacked(rows, dppf(alpha, lam, period=1, schedule="constant"))
    for _ in range(100):
        expected = abs((1 - alpha) * radii(parameter.detach()) + lam)
        optimizer.step()
        torch.testing.assert_close(radii(parameter.detach()), expected)
    settled = radii(parameter.detach())
    torch.testing.assert_close(settled, torch.full_like(settled, lam / alpha), rtol=0.01, atol=0)
    torch.testing.assert_close(parameter.detach().mean(0), rows.mean(0))


def test_each_of_many_workers_moves_on_its_line_to_the_mean() -> None:
    rows = random_rows(N, WIDTH, dtype=torch.float64)
    mean, radius = rows.mean(0), radii(rows).unsqueeze(1)
    moved = run(rows, dppf(0.3, 0.7, period=1, schedule="constant"), 1)
    torch.testing.assert_close(moved, rows + (mean - rows) * (0.3 - 0.7 / radius))


def test_under_gossip_the_neighbours_average_stands_for_the_mean() -> None:
    rows = random_rows(N, WIDTH, dtype=torch.float64)
    centre = torch.tensor(topology("ring").mixing(N, 0).weights) @ rows
    radius = (rows - centre).norm(dim=1, keepdim=True)
    moved = run(rows, dppf(0.3, 0.7, period=1, schedule="constant", topology="ring"), 1)
    torch.testing.assert_close(moved, rows + (centre - rows) * (0.3 - 0.7 / radius))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_workers_are_not_pushed_and_the_record_says_so(dtype: torch.dtype) -> None:
    records: list[RoundRecord] = []
    rows = random_rows(1, WIDTH, dtype=dtype).expand(N, WIDTH)
    method = dppf(0.5, 0.5, period=1, schedule="constant")
    parameter, optimizer = stacked(rows, method, telemetry=records.append)
    for _ in range(3):
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), rows)
    assert [record.pushed for record in records] == [False] * 3


def test_workers_with_a_distance_are_pushed_and_the_record_says_so() -> None:
    records: list[RoundRecord] = []
    rows = random_rows(N, WIDTH)
    _, optimizer = stacked(rows, dppf(0.5, 0.5, period=1), telemetry=records.append)
    optimizer.step()
    assert records[0].pushed
    assert records[0].radius == pytest.approx(float(radii(rows).square().mean().sqrt()))


def test_schedules_have_the_values_of_their_formulas() -> None:
    for step in range(11):
        part = step / 10
        assert Constant(2.0).at(step, 10) == 2.0
        assert Linear(2.0, start=1.0).at(step, 10) == pytest.approx(1 + part)
        assert CosineUp(2.0).at(step, 10) == pytest.approx(1 - math.cos(math.pi * part))
        assert CosineDown(2.0).at(step, 10) == pytest.approx(1 + math.cos(math.pi * part))
    for shape in ("constant", "linear", "cosine_up", "cosine_down"):
        assert schedule(2.0, shape).at(7, None) == pytest.approx(2.0)
        assert schedule(2.0, shape).at(15, 10) == schedule(2.0, shape).at(10, 10)


def test_pull_and_push_of_each_round_come_from_their_schedules() -> None:
    records: list[RoundRecord] = []
    method = dppf(alpha=Linear(0.9, start=0.1), lam=0.5, period=5, schedule="cosine_up")
    _, optimizer = stacked(random_rows(N, WIDTH), method, telemetry=records.append, total_steps=20)
    for _ in range(20):
        optimizer.step()
    assert [r.step for r in records] == [5, 10, 15, 20]
    assert [r.pull for r in records] == pytest.approx([0.3, 0.5, 0.7, 0.9])
    cosines = [math.cos(math.pi * part) for part in (0.25, 0.5, 0.75, 1.0)]
    assert [r.push for r in records] == pytest.approx([0.25 * (1 - c) for c in cosines])


def round_steps(method: Method, steps: int, total: int | None = None) -> list[int]:
    records: list[RoundRecord] = []
    _, optimizer = stacked(
        random_rows(2, 3), method, lr=0.1, telemetry=records.append, total_steps=total
    )
    for _ in range(steps):
        optimizer.step()
    return [record.step for record in records]


def test_rounds_come_after_the_steps_that_the_timing_names() -> None:
    assert round_steps(local_sgd(4), 12) == [4, 8, 12]
    assert round_steps(post_local(until=3, period=4), 16) == [1, 2, 3, 7, 11, 15]
    # H = max(2, floor((0.1 * 2.3 / 0.1)^2)) = 5
    assert round_steps(quadratic_sync(0.23, min_period=2), 16) == [5, 10, 15]
    assert round_steps(quadratic_sync(0.23, min_period=2), 12, total=12) == [5, 10, 12]
    assert round_steps(quadratic_sync(0.01, min_period=3), 9) == [3, 6, 9]


def test_the_quadratic_period_grows_as_the_learning_rate_falls() -> None:
    records: list[RoundRecord] = []
    _, optimizer = stacked(
        random_rows(2, 3), quadratic_sync(0.2, min_period=1), lr=0.1, telemetry=records.append
    )
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 0.1 if step <= 8 else 0.05
        optimizer.step()
    # Every 4 steps at 0.1 (the period after step 8 began with 0.1 still), every 16 at 0.05.
    assert [record.step for record in records] == [4, 8, 12, 28]


@pytest.mark.parametrize(
    "timing", [Every(3), PostLocal(4, 3), QuadraticSync(0.3, 2)], ids=lambda t: type(t).__name__
)
def test_a_timing_always_names_a_later_step(timing: Timing) -> None:
    for step in range(20):
        for lr in (0.0, 0.01, 1.0):
            for total in (None, 10, 20):
                assert timing.next_round(step, lr, total) > step


def test_a_method_is_a_value_that_compares_and_prints() -> None:
    assert gossip_sgd("ring", 2) == gossip_sgd(topology("ring"), 2)
    assert gossip_sgd("ring") != gossip_sgd("star")
    assert dppf(0.1) != dppf(0.2)
    assert len({local_sgd(2), local_sgd(2), local_sgd(3)}) == 2
    assert repr(gossip_sgd("ring")) == repr(gossip_sgd(topology("ring")))


def test_the_exact_distance_is_the_root_mean_square_over_workers() -> None:
    rows = random_rows(N, WIDTH)
    parameter, optimizer = stacked(rows, local_sgd(1))
    expected = float(radii(rows.double()).square().mean().sqrt())
    assert optimizer.consensus_distance() == pytest.approx(expected)
    assert same(parameter, rows)
    optimizer.synchronize()
    assert optimizer.consensus_distance() == pytest.approx(0, abs=1e-6)
