"""What a round tells: records, the files they go to, and the profiler's ranges."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from consensus_opt import (
    ConsensusOptimizer,
    JsonLines,
    Method,
    RoundRecord,
    TensorBoard,
    dppf,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.telemetry import Sink
from tests.harness import run_ranks
from tests.problems import mlp, random_rows, stacked, train

N, WIDTH = 4, 33


def run(method: Method, steps: int, *sinks: Sink) -> list[RoundRecord]:
    records: list[RoundRecord] = []
    _, optimizer = stacked(random_rows(N, WIDTH), method, telemetry=[records.append, *sinks])
    for _ in range(steps):
        optimizer.step()
    return records


def test_a_record_of_hard_averaging_knows_that_the_distance_is_zero() -> None:
    first, second = run(local_sgd(3), 7)
    assert (first.step, first.round, first.exchanges) == (3, 1, 1)
    assert (second.step, second.round) == (6, 2)
    assert (first.distance, first.distance_source, first.radius) == (0.0, "exact", None)
    assert (first.pull, first.push, first.pushed) == (1.0, 0.0, True)
    assert first.bytes_sent == N * (2 * (N - 1) * 4 * WIDTH // N)


def test_a_record_of_dppf_has_the_distance_before_the_force() -> None:
    rows = random_rows(N, WIDTH).double()
    expected = float((rows - rows.mean(0)).square().sum(1).mean().sqrt())
    (record,) = run(dppf(0.3, 0.7, period=1), 1)
    assert record.distance == pytest.approx(expected, rel=1e-6)
    assert record.radius == pytest.approx(expected, rel=1e-6)
    assert (record.pull, record.push, record.pushed) == (0.3, 0.7, True)


def test_a_record_of_gossip_knows_no_distance() -> None:
    (record,) = run(gossip_sgd("ring", exchanges=3), 1)
    assert (record.exchanges, record.distance, record.distance_source) == (3, None, None)
    assert record.bytes_sent == 3 * N * 2 * 4 * WIDTH


def test_json_lines_holds_the_records_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rounds.jsonl"
    records = run(dppf(0.3, 0.7, period=2), 6, JsonLines(path))
    records += run(gossip_sgd("ring"), 2, JsonLines(str(path)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [asdict(record) for record in records]
    assert set(lines[0]) == {field.name for field in fields(RoundRecord)}


def test_tensorboard_holds_each_number_at_the_step_of_its_round(tmp_path: Path) -> None:
    records = run(dppf(0.3, 0.7, period=2), 6, TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("distance", "radius", "pull", "push", "pushed", "bytes_sent", "wait_seconds"):
        read = [(event.step, event.value) for event in events.Scalars(f"consensus/{name}")]
        assert [step for step, _ in read] == [2, 4, 6]
        expected = [float(getattr(record, name)) for record in records]
        assert [value for _, value in read] == pytest.approx(expected, rel=1e-6)
    assert "consensus/step" not in events.Tags()["scalars"]


def test_what_is_not_known_is_null_in_json_and_absent_in_tensorboard(tmp_path: Path) -> None:
    run(gossip_sgd("ring"), 1, JsonLines(tmp_path / "rounds.jsonl"), TensorBoard(tmp_path))
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["distance"] is None
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert "consensus/bytes_sent" in tags
    assert "consensus/distance" not in tags


def test_one_sink_or_several_are_called_once_a_round_in_their_order() -> None:
    calls: list[str] = []
    run(
        local_sgd(2),
        4,
        lambda r: calls.append(f"a{r.round}"),
        lambda r: calls.append(f"b{r.round}"),
    )
    assert calls == ["a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(
    "method",
    [local_sgd(1), dppf(period=1), gossip_sgd("ring")],
    ids=["local_sgd", "dppf", "gossip"],
)
def test_the_profiler_sees_ranges_with_stable_names(method: Method) -> None:
    _, optimizer = stacked(random_rows(N, WIDTH), method)
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        optimizer.step()
    counts = {event.key: event.count for event in measured.key_averages()}
    assert counts["consensus_opt::round"] == 1
    assert counts["consensus_opt::average"] == 1
    assert counts.get("consensus_opt::force", 0) == (method.force.push.bounds != (0.0, 0.0))


def train_with_telemetry_on_rank_0(rank: int, folder: str) -> tuple[int, int]:
    model = mlp()
    optimizer = ConsensusOptimizer(
        SGD(model.parameters(), lr=0.1),
        dppf(0.3, 0.7, period=2),
        timeout=60,
        telemetry=JsonLines(f"{folder}/rounds.jsonl") if rank == 0 else None,
    )
    train(model, optimizer, range(6), rank)
    return optimizer.rounds, optimizer.bytes_sent


def test_ranks_may_choose_their_sinks_freely(tmp_path: Path) -> None:
    outcomes = run_ranks(3, train_with_telemetry_on_rank_0, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert outcomes == [(3, sum(line["bytes_sent"] for line in lines))] * 3
    assert all(line["wait_seconds"] > 0 and line["distance"] > 0 for line in lines)
