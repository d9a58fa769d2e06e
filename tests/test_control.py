"""Control of the consensus distance: what it decides, that all ranks decide alike, and how well."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.oracle import Oracle, WatchedGossip
from consensus_opt import (
    ConsensusOptimizer,
    GradientNorm,
    JsonLines,
    KeepBelow,
    Method,
    OfReference,
    RoundRecord,
    StackedTransport,
    consensus_control,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.control import Forecast, Outcome
from consensus_opt.distance import Distance
from consensus_opt.optimizer import KEY
from consensus_opt.targets import Constant, Recorder, as_target
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import loss_of, mlp, random_rows, same, stacked

N, WIDTH, ALWAYS = 8, 400, (0.0, 1.0)


def run(
    method: Method,
    steps: int,
    rows: Tensor | None = None,
    lr: float = 0.1,
    check: Callable[[RoundRecord, Tensor], Any] = lambda record, rows: None,
    judge: Callable[[RoundRecord], Any] = lambda record: None,
    **options: Any,
) -> tuple[Tensor, list[RoundRecord]]:
    """Workers with a target of their own each, pulled there by noisy gradients."""
    rows = random_rows(1, WIDTH).repeat(N, 1) if rows is None else rows
    records: list[RoundRecord] = []
    parameter, optimizer = stacked(rows, method, lr, telemetry=[records.append, judge], **options)
    targets = random_rows(len(rows), rows.shape[1], seed=9, dtype=rows.dtype)
    for step in range(steps):
        noise = random_rows(len(rows), rows.shape[1], seed=100 + step, dtype=rows.dtype)
        parameter.grad = parameter.detach() - targets + noise
        optimizer.step()
        check(records[-1], parameter.detach())
    return parameter.detach(), records


def exact(rows: Tensor) -> float:
    wide = rows.double()
    return float((wide - wide.mean(0)).square().sum(1).mean().sqrt())


# ------------------------------------------------------------------ ends of the range


@pytest.mark.parametrize("name", ["ring", "torus", "exponential", "one_peer_exponential", "base3"])
def test_without_limit_it_is_plain_gossip_bit_for_bit(name: str) -> None:
    control = consensus_control(name, math.inf, during=ALWAYS, accelerated=False)
    controlled, records = run(control, 9)
    assert same(controlled, run(gossip_sgd(name), 9)[0])
    assert [r.exchanges for r in records] == [1] * 9
    assert all(r.target is None and r.distance is not None for r in records)


def test_without_limit_each_round_reports_the_distance_after_its_exchange() -> None:
    def check(record: RoundRecord, rows: Tensor) -> None:
        assert record.distance == pytest.approx(exact(rows), rel=0.1)
        assert record.distance_source == "sketch"

    run(consensus_control("ring", math.inf, during=ALWAYS), 9, check=check)


def test_a_target_of_zero_on_a_complete_graph_is_averaging_in_each_step() -> None:
    controlled, _ = run(consensus_control("complete", 0.0, during=ALWAYS, most=3), 9)
    averaged, _ = run(local_sgd(1), 9)
    torch.testing.assert_close(controlled, averaged, rtol=1e-5, atol=1e-6)


def test_equal_workers_meet_a_target_of_zero_with_one_exchange() -> None:
    parameter, optimizer = stacked(
        torch.zeros(N, 5), consensus_control("ring", 0.0, during=ALWAYS), telemetry=(r := []).append
    )
    for _ in range(5):
        optimizer.step()
    assert [(record.exchanges, record.distance) for record in r] == [(1, 0.0)] * 5
    assert same(parameter, torch.zeros(N, 5))


def test_a_target_out_of_reach_is_left_after_the_most_exchanges_and_training_goes_on() -> None:
    method = consensus_control("ring", 1e-4, during=ALWAYS, most=3, accelerated=False)
    rows, records = run(method, 12)
    assert [r.exchanges for r in records] == [3] * 12
    assert all(r.distance is not None and r.distance > 1e-4 == r.target for r in records)
    assert same(rows, run(gossip_sgd("ring", exchanges=3), 12)[0])


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize("name", ["ring", "torus", "one_peer_exponential", "random_matching"])
@pytest.mark.parametrize("target", [2.0, 0.7, 0.3])
def test_the_exact_distance_stays_below_a_reachable_target(name: str, target: float) -> None:
    held: list[bool] = []

    def check(record: RoundRecord, rows: Tensor) -> None:
        held.append(exact(rows) <= target)
        assert record.target == target
        assert 1 <= record.exchanges <= 64

    run(consensus_control(name, target, during=ALWAYS, most=64), 100, check=check)
    assert sum(held) >= 0.99 * len(held)


def forecast(*distances: float, error: float = 0.0, extra: tuple[float, ...] = ()) -> Forecast:
    """What 0, 1, 2, ... exchanges lead to; the last one stays."""
    shape = np.array([1 + 4 * error, 1, 1, 1 - 4 * error])
    endless = chain(distances, repeat(distances[-1]))
    return Forecast((d**2 * shape / shape.sum() for d in endless), extra)


def test_each_round_makes_the_first_number_that_is_enough() -> None:
    halves = forecast(8.0, 4.0, 2.0, 1.0, 0.5)
    outcome = KeepBelow(Constant(1.0), ALWAYS).decide(1, None, halves, {})
    assert outcome == Outcome(3, Distance(1.0, 0.0, "sketch"), 1.0)


def test_a_distance_counts_with_two_standard_errors_on_top() -> None:
    error = forecast(1.0, error=0.1).after(0).error
    assert 0.01 < error < 0.5
    for limit, exchanges in ((1 + 2.01 * error, 1), (1 + 1.99 * error, 2)):
        given = forecast(2.0, 1.0, 0.5, error=0.1)
        outcome = KeepBelow(Constant(limit), ALWAYS).decide(1, None, given, {})
        assert outcome.exchanges == exchanges


def test_what_is_no_number_is_not_exchanged_for() -> None:
    outcome = KeepBelow(Constant(1.0), ALWAYS).decide(1, None, forecast(math.nan), {})
    assert outcome.exchanges == 1


def test_no_more_exchanges_are_made_than_the_exact_distance_needs_by_much() -> None:
    """The oracle of the benchmark, on the trajectory that the control took."""
    ring = topology("ring")
    oracle = Oracle(ring.mixing(N, 0), most=16, accelerated=True)
    control = consensus_control("ring", 0.4, during=ALWAYS)
    watched = replace(control, average=WatchedGossip(ring, True, oracle))
    run(watched, 100, judge=oracle)
    made, needed = (sum(getattr(j, name) for j in oracle.judged) for name in ("made", "needed"))
    assert len(oracle.judged) == 100
    assert needed > 200
    assert made <= 1.2 * needed
    assert sum(judged.held for judged in oracle.judged) >= 99


def test_outside_of_its_part_of_training_a_round_makes_one_exchange_and_measures_nothing() -> None:
    method = consensus_control("ring", 0.3, during=(0.2, 0.6), accelerated=False)
    _, records = run(method, 10, total_steps=10)
    on = [r.step for r in records if r.target is not None]
    assert on == [3, 4, 5, 6]
    for record in records:
        if record.step in on:
            assert record.exchanges > 1
            assert record.distance_source == "sketch"
        else:
            assert (record.exchanges, record.distance, record.distance_source) == (1, None, None)


@pytest.mark.parametrize(
    ("during", "on"),
    [
        ((2, 5), [3, 4, 5]),
        ((0, 3), [1, 2, 3]),
        ((7, 1.0), [8, 9, 10]),
        ((0.2, 5), [3, 4, 5]),
        ((np.int64(2), np.float32(0.5)), [3, 4, 5]),
        ((4, 1000), [5, 6, 7, 8, 9, 10]),
    ],
)
def test_its_part_of_training_is_told_in_steps_or_in_fractions(
    during: tuple[float, float], on: list[int]
) -> None:
    method = consensus_control("ring", 0.3, during=during)
    assert [r.step for r in run(method, 10, total_steps=10)[1] if r.target is not None] == on


def test_a_part_in_steps_needs_no_length_of_training() -> None:
    method = consensus_control("ring", 0.3, during=(2, 5), at_least=0.1)
    assert [r.step for r in run(method, 9)[1] if r.target is not None] == [3, 4, 5]
    method = consensus_control("ring", 0.3, during=(5, 1.0))
    assert [r.step for r in run(method, 9)[1] if r.target is not None] == [6, 7, 8, 9]


def test_after_its_part_of_training_a_lower_limit_skips_exchanges_below_it() -> None:
    def exchanges(floor: float | None) -> list[int]:
        method = consensus_control("ring", math.inf, during=(0.0, 0.5), at_least=floor)
        return [r.exchanges for r in run(method, 12, total_steps=12)[1]]

    assert exchanges(None) == exchanges(0.0) == [1] * 12
    assert exchanges(math.inf) == [1] * 6 + [0] * 6
    below = exchanges(6.0)
    assert below[:6] == [1] * 6
    assert set(below[6:]) == {0, 1}


def test_exchanges_are_made_together_so_that_they_can_be_accelerated() -> None:
    plain, accelerated = (
        sum(r.exchanges for r in run(method, 60)[1][20:])
        for method in (
            consensus_control("ring", 0.5, during=ALWAYS, accelerated=False),
            consensus_control("ring", 0.5, during=ALWAYS),
        )
    )
    assert accelerated < 0.8 * plain


# ------------------------------------------------------------------ targets


def test_the_gradient_target_is_rho_times_the_corrected_moving_average() -> None:
    target, memory = GradientNorm(rho=0.25, decay=0.9), dict[str, float]()
    squares = [4.0, 1.0, 9.0, 2.0]
    weights = [0.9**age * 0.1 for age in range(4)]
    for k, square in enumerate(squares):
        measured = Distance(1.0, 0.0, "sketch", (square, 1.0))
        terms = zip(weights, reversed(squares[: k + 1]), strict=False)
        expected = sum(w * s for w, s in terms) / sum(weights[: k + 1])
        limit = target.at(k + 1, None, measured, memory)
        assert limit == pytest.approx(0.25 * math.sqrt(expected))


def test_a_round_after_several_steps_weighs_as_much_as_they_do() -> None:
    target = GradientNorm(rho=1.0, decay=0.9)
    once, one_by_one = dict[str, float](), dict[str, float]()
    target.at(3, None, Distance(1.0, 0.0, "sketch", (12.0, 3.0)), once)
    for step in range(3):
        target.at(step, None, Distance(1.0, 0.0, "sketch", (4.0, 1.0)), one_by_one)
    assert once == pytest.approx(one_by_one)


def test_without_any_gradient_the_gradient_target_sets_no_limit() -> None:
    target, memory = GradientNorm(), dict[str, float]()
    assert target.at(1, None, Distance(1.0, 0.0, "sketch", (0.0, 0.0)), memory) == math.inf


def test_the_gradient_target_of_a_round_is_in_its_record() -> None:
    rows = random_rows(1, WIDTH).repeat(N, 1)
    parameter, optimizer = stacked(
        rows,
        consensus_control("ring", GradientNorm(0.1, decay=0.0), during=ALWAYS),
        0.1,
        telemetry=(records := []).append,
    )
    for step in range(5):
        parameter.grad = random_rows(N, WIDTH, seed=step)
        phi = float(parameter.grad.double().square().sum(1).mean().sqrt())
        optimizer.step()
        assert records[-1].target == pytest.approx(0.1 * phi)


def test_a_reference_is_recorded_by_phase_and_limits_the_next_run(tmp_path: Path) -> None:
    file, steps = tmp_path / "reference.json", 16
    recorder = Recorder(file, steps)
    sinks = [recorder, (records := []).append]
    watch = consensus_control("ring", math.inf, during=ALWAYS)
    parameter, optimizer = stacked(random_rows(N, WIDTH), watch, telemetry=sinks, total_steps=steps)
    for step in range(steps):
        parameter.grad = random_rows(N, WIDTH, seed=step)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
    largest = [
        max(r.distance for r in records if start < r.step / steps <= end)
        for start, end in ((0.0, 0.5), (0.5, 0.75), (0.75, 1.0))
    ]
    target = OfReference.load(0.25, file)
    assert [phase[2] for phase in target.phases] == largest
    assert [phase[:2] for phase in target.phases] == [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]
    _, controlled = run(consensus_control("ring", target, during=ALWAYS), steps, total_steps=steps)
    expected = [0.25 * largest[0]] * 8 + [0.25 * largest[1]] * 4 + [0.25 * largest[2]] * 4
    assert [r.target for r in controlled] == expected


def test_a_phase_that_was_not_recorded_has_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    watch_half = consensus_control("ring", math.inf)
    run(watch_half, 8, total_steps=8)
    recorder = Recorder(file, 8)
    for record in run(watch_half, 8, total_steps=8)[1]:
        recorder(record)
    target = OfReference.load(0.5, file)
    anything = Distance(1.0, 0.0, "sketch")
    assert target.at(4, 8, anything, {}) < math.inf
    assert [target.at(step, 8, anything, {}) for step in (5, 8)] == [math.inf, math.inf]


def test_records_say_what_was_measured_how_and_what_was_aimed_at(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    _, optimizer = stacked(
        random_rows(N, WIDTH),
        consensus_control("ring", 0.5, during=(0.0, 0.5)),
        telemetry=JsonLines(file),
        total_steps=2,
    )
    for _ in range(2):
        optimizer.step()
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["target"], first["distance_source"]) == (0.5, "sketch")
    assert 0 < first["distance"] <= 0.5
    assert (second["target"], second["distance_source"], second["distance"]) == (None,) * 3


# ------------------------------------------------------------------ all ranks decide alike


@dataclass(frozen=True)
class Watching(KeepBelow):
    """Keeps what it compares with the limit after one exchange."""

    uppers: list[float] = field(default_factory=list, repr=False, compare=False)

    def decide(
        self, step: int, total: int | None, forecast: Forecast | None, memory: dict[str, float]
    ) -> Outcome:
        self.uppers.append(forecast.after(1).upper)
        return super().decide(step, total, forecast, memory)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def one_step(rank: int, method: Method) -> list[RoundRecord]:
    model, records = mlp(), []
    optimizer = ConsensusOptimizer(
        sgd(model.parameters()), method, telemetry=records.append, timeout=30
    )
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return records


def at_the_threshold(rank: int) -> dict[str, Any]:
    watching = Watching(Constant(math.inf), ALWAYS)
    one_step(rank, replace(gossip_sgd("ring"), control=watching))
    (upper,) = watching.uppers
    found: dict[str, Any] = {"upper": upper}
    limits = {"equal": upper, "just below": math.nextafter(upper, 0), "above": 2 * upper}
    for name, limit in limits.items():
        method = consensus_control("ring", limit, during=ALWAYS, accelerated=False)
        (record,) = one_step(rank, method)
        found[name] = record.exchanges
    return found


def test_R128_at_a_threshold_equal_to_the_measurement_all_ranks_decide_alike() -> None:
    ranks = run_ranks(4, at_the_threshold)
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0]["upper"] > 0
    assert [ranks[0][name] for name in ("equal", "above", "just below")] == [1, 1, 2]


STEPS = 20
METHODS = {
    "constant": consensus_control("ring", 0.08, during=(0.0, 0.7)),
    "plain": consensus_control("ring", 0.08, during=ALWAYS, accelerated=False, most=6),
    "gradient": consensus_control("ring", GradientNorm(0.05, 0.9), during=(0.1, 0.9)),
    "seldom": consensus_control(
        "ring", GradientNorm(0.1, 0.9), during=ALWAYS, period=3, accelerated=False
    ),
    "changing": consensus_control("random_matching", 0.2, during=ALWAYS),
    "floor": consensus_control("ring", 0.1, during=(0.0, 0.5), at_least=GradientNorm(0.3)),
}


def train_rank(rank: int, name: str) -> tuple[Tensor, list[RoundRecord]]:
    model, records = mlp(), []
    optimizer = ConsensusOptimizer(
        sgd(model.parameters()),
        METHODS[name],
        total_steps=STEPS,
        telemetry=records.append,
        timeout=30,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), records


def train_all(rank: int) -> dict[str, tuple[Tensor, list[RoundRecord]]]:
    return {name: train_rank(rank, name) for name in METHODS}


def train_stacked(name: str, n: int) -> tuple[Tensor, list[RoundRecord]]:
    model, records = mlp(), []
    rows = torch.cat([p.detach().flatten() for p in model.parameters()]).repeat(n, 1)
    flat = nn.Parameter(rows)
    optimizer = ConsensusOptimizer(
        sgd([flat]),
        METHODS[name],
        transport=StackedTransport(n),
        total_steps=STEPS,
        telemetry=records.append,
    )
    shapes = [(key, p.shape, p.numel()) for key, p in model.named_parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(n):
            pieces = flat[rank].split([size for _, _, size in shapes])
            weights = {
                key: piece.view(shape)
                for (key, shape, _), piece in zip(shapes, pieces, strict=True)
            }
            loss_of(_WithWeights(model, weights), rank, step).backward()
        optimizer.step()
    return flat.detach(), records


class _WithWeights(nn.Module):
    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.weights = model, weights

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.model, self.weights, (x,))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Tensor, list[RoundRecord]]]]:
    return run_ranks(4, train_all, timeout=120)


@pytest.mark.parametrize("name", METHODS)
def test_four_processes_decide_as_four_stacked_workers(
    ranks: list[dict[str, tuple[Tensor, list[RoundRecord]]]], name: str
) -> None:
    parameters, records = train_stacked(name, 4)
    decisions = [(r.step, r.exchanges) for r in records]
    assert len({exchanges for _, exchanges in decisions}) > 1, "there was something to decide"
    for rank, found in enumerate(ranks):
        row, log = found[name]
        assert [(r.step, r.exchanges) for r in log] == decisions
        for ours, theirs in zip(log, records, strict=True):
            assert ours.distance_source == theirs.distance_source
            for mine, other in (
                (ours.distance, theirs.distance),
                (ours.target, theirs.target),
            ):
                assert mine == (None if other is None else pytest.approx(other, rel=1e-4))
        torch.testing.assert_close(row, parameters[rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_what_ranks_decide_on_is_the_same_bits_on_all_of_them(
    ranks: list[dict[str, tuple[Tensor, list[RoundRecord]]]], name: str
) -> None:
    logs = [[(r.distance, r.target, r.exchanges) for r in found[name][1]] for found in ranks]
    assert all(log == logs[0] for log in logs)


# ------------------------------------------------------------------ checkpoints


def resume_rank(rank: int, name: str) -> None:
    """Stop after each step, and go on from the file in a new optimizer."""

    def wrap(model: nn.Module) -> ConsensusOptimizer:
        return ConsensusOptimizer(
            sgd(model.parameters()),
            METHODS[name],
            total_steps=STEPS,
            telemetry=records.append,
            timeout=30,
        )

    def train(model: nn.Module, optimizer: ConsensusOptimizer, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()

    records: list[RoundRecord] = []
    model, files = mlp(), []
    optimizer = wrap(model)
    for step in range(STEPS):
        train(model, optimizer, step)
        files.append(saved(model, optimizer))
    whole, records = records, []
    for stop in range(0, STEPS, 3):
        records.clear()
        model = mlp(seed=5)
        optimizer = wrap(model)
        state = torch.load(io.BytesIO(files[stop]), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for step in range(stop + 1, STEPS):
            train(model, optimizer, step)
        later = [r for r in whole if r.step > stop + 1]
        assert [decided(r) for r in records] == [decided(r) for r in later]
        assert files[-1] == saved(model, optimizer) or same(
            torch.load(io.BytesIO(files[-1]), weights_only=True),
            torch.load(io.BytesIO(saved(model, optimizer)), weights_only=True),
        )


def decided(record: RoundRecord) -> tuple[Any, ...]:
    return record.step, record.round, record.exchanges, record.distance, record.target


def saved(model: nn.Module, optimizer: ConsensusOptimizer) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["gradient", "seldom", "floor"])
def test_a_resumed_run_has_the_same_bits_and_decisions_as_one_that_never_stopped(name: str) -> None:
    run_ranks(2, resume_rank, name, timeout=120)


def test_the_memory_is_in_the_checkpoint_as_plain_numbers() -> None:
    parameter, optimizer = stacked(random_rows(N, WIDTH), METHODS["gradient"], total_steps=10)
    parameter.grad = random_rows(N, WIDTH)
    for _ in range(3):
        optimizer.step()
    memory = optimizer.state_dict()[KEY]["control"]
    assert memory["phi_sum"] > 0
    assert all(isinstance(value, (int, float)) for value in memory.values())
    _, twin = stacked(parameter.detach(), METHODS["gradient"], total_steps=10)
    twin.load_state_dict(optimizer.state_dict())
    assert same(twin.state_dict()[KEY], optimizer.state_dict()[KEY])


# ------------------------------------------------------------------ configuration


def test_a_control_of_a_part_of_training_asks_for_its_length_at_construction() -> None:
    rows = random_rows(4, 3)
    with pytest.raises(ValueError, match=r"\(0.0, 0.5\).*not known.*pass total_steps"):
        stacked(rows, consensus_control("ring", 0.5))
    stacked(rows, consensus_control("ring", 0.5), total_steps=10)
    stacked(rows, consensus_control("ring", 0.5, during=ALWAYS))


def test_a_target_with_phases_asks_for_the_length_of_training_at_construction() -> None:
    target = OfReference(0.5, ((0.0, 1.0, 2.0),))
    with pytest.raises(ValueError, match=r"phases.*not known.*pass total_steps"):
        stacked(random_rows(4, 3), consensus_control("ring", target, during=ALWAYS))


def test_a_part_that_turns_out_to_be_no_time_is_refused_when_the_length_is_known() -> None:
    method = consensus_control("ring", 0.5, during=(60, 0.5))
    stacked(random_rows(4, 3), method, total_steps=130)
    with pytest.raises(ValueError, match=r"\(60, 0.5\) of 100 steps.*come later; write during="):
        stacked(random_rows(4, 3), method, total_steps=100)


def test_a_lower_limit_that_has_no_time_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at_least is .* must end before training does; write"):
        consensus_control("ring", 0.5, during=ALWAYS, at_least=0.1)


@pytest.mark.parametrize("during", [("0", 0.5), (False, True), (0.0, None)])
def test_bounds_that_are_no_numbers_are_refused(during: Any) -> None:
    with pytest.raises(TypeError, match=r"during is .* two numbers; write during="):
        consensus_control("ring", 0.5, during=during)


NO_PARTS = [(0.5, 0.5), (0.6, 0.2), (-0.1, 0.5), (0.0, 1.1), (0, 1), (5, 5), (9, 2), (-3, 9)]


@pytest.mark.parametrize("during", NO_PARTS)
def test_what_is_no_part_of_training_is_refused(during: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"during is .* rising fractions .* write during="):
        consensus_control("ring", 0.5, during=during)


@pytest.mark.parametrize("most", [0, -1])
def test_a_round_of_no_exchange_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match=r"most is .* at least 1; write consensus_control"):
        consensus_control("ring", 0.5, most=most)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_negative_targets_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"the target distance is .* at least 0; write"):
        consensus_control("ring", value)
    with pytest.raises(ValueError, match=r"rho is .* at least 0; write"):
        GradientNorm(value)
    with pytest.raises(ValueError, match=r"fraction of Xi_max is .* at least 0; write"):
        OfReference(value, ())


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_an_average_that_never_moves_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay of phi is .*; write 0.99"):
        GradientNorm(decay=decay)


@pytest.mark.parametrize("target", ["0.5", True, GradientNorm, [0.5]])
def test_what_is_neither_a_number_nor_a_target_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="it must be a number or a target; write"):
        as_target(target)


def test_numbers_and_targets_are_targets() -> None:
    assert as_target(2) == Constant(2.0)
    assert as_target(GradientNorm(0.5)) == GradientNorm(0.5)
    assert consensus_control("ring").control == KeepBelow(GradientNorm(0.25))
