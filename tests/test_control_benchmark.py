"""The benchmark of consensus control: its oracle, its resuming, and what it shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import control, control_report, control_runs
from benchmarks.oracle import Oracle, WatchedGossip
from consensus_opt.acceleration import accelerate
from consensus_opt.telemetry import RoundRecord
from consensus_opt.topology import topology
from consensus_opt.transport import StackedTransport

N = 8
SMALL = ("--data=digits", "--workers", "32", "--epochs", "1", "--seeds", "0")


def _round(exchanges: int, target: float | None) -> RoundRecord:
    return RoundRecord(1, 1, exchanges, None, None, target, None, 1.0, 0.0, True, 0, 0.0)


def _distance(x: np.ndarray) -> float:
    return float(np.sqrt(((x - x.mean(0)) ** 2).sum(1).mean()))


def _after(x: np.ndarray, exchanges: int, accelerated: bool) -> np.ndarray:
    """The same exchanges as products of matrices, in fp64."""
    mixing = topology("ring").mixing(N, 0)
    matrices = accelerate(mixing, exchanges) if accelerated else [mixing] * exchanges
    for each in matrices:
        x = each.weights @ x
    return x


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("made", [(1,), (3,), (2, 1, 1)])
def test_the_oracle_counts_what_matrix_products_need(
    made: tuple[int, ...], accelerated: bool
) -> None:
    x = np.random.default_rng(0).normal(size=(N, 50))
    reached = [_distance(_after(x, q, accelerated)) for q in range(1, 7)]
    graph = topology("ring")
    for needed in range(1, 6):
        target = (reached[needed - 1] + reached[needed - 2]) / 2 if needed > 1 else reached[0] * 1.1
        oracle = Oracle(graph.mixing(N, 0), most=6, accelerated=accelerated)
        gossip = WatchedGossip(graph, accelerated, oracle)
        flats = [torch.from_numpy(x.copy())]
        for exchanges in made:
            gossip.form(flats, flats, StackedTransport(N), 0, exchanges)
        oracle(_round(sum(made), target))
        (judged,) = oracle.judged
        held = _distance(flats[0].numpy()) <= target
        assert (judged.made, judged.needed, judged.held) == (sum(made), needed, held)


def test_the_oracle_leaves_rounds_without_target_and_knows_what_is_out_of_reach() -> None:
    oracle = Oracle(topology("ring").mixing(N, 0), most=2, accelerated=True)
    x = torch.randn(N, 5)
    oracle.see([x], 1)
    oracle(_round(1, None))
    assert oracle.judged == []
    oracle.see([x], 2)
    oracle(_round(2, 1e-9))
    assert [(j.needed, j.held) for j in oracle.judged] == [(None, False)]


def test_every_rule_makes_a_method_that_fits_a_ring() -> None:
    phases = ((0.0, 0.5, 2.0), (0.5, 1.0, 1.0))
    for rule in control_runs.RULES.values():
        method = rule(phases)
        method.average.validate(32)
        method.control.validate(100)


@pytest.mark.timeout(120)
def test_runs_are_kept_extended_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "control.json"
    names = ["sync", "Xi_max/8, first half"]
    assert control.main([f"--json={file}", *SMALL, "--runs", *names]) == 0
    before = {run["name"]: run for run in json.loads(file.read_text())["runs"]}
    assert set(before) == {"ring", *names}  # the ring is what Xi_max refers to
    capsys.readouterr()
    assert control.main([f"--json={file}", *SMALL, "--runs", *names, "ring"]) == 0
    after = {run["name"]: run for run in json.loads(file.read_text())["runs"]}
    assert after == before  # seconds among it: nothing ran again
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    kept = file.read_bytes()
    assert control.main([f"--json={file}", "--kept"]) == 0
    assert file.read_bytes() == kept
    assert "Xi_max/8" in capsys.readouterr().out

    ring, held = before["ring"], before["Xi_max/8, first half"]
    steps = 1437 // 64
    assert (ring["steps"], ring["exchanges"]) == (steps, 1.0)
    assert held["controlled"] == steps // 2
    assert held["held"] == 1.0
    limit = ring["xi_max"][0]["largest"] / 8
    step, distance, target, exchanges = held["curve"][0]
    assert (step, target) == (control_runs.EVERY, pytest.approx(limit, rel=1e-3))
    assert distance <= 1.05 * limit
    assert exchanges > 1


def test_to_show_kept_runs_there_have_to_be_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        control.main([f"--json={tmp_path / 'none.json'}", "--kept"])
    assert "holds none; leave --kept out" in " ".join(capsys.readouterr().err.split())


def test_the_table_compares_seeds_in_common() -> None:
    setting = control_runs.setting_of("digits", 32)

    def run(name: str, seed: int, accuracy: float) -> dict:
        return {
            **dataclasses.asdict(setting),
            "name": name,
            "seed": seed,
            "accuracy": accuracy,
            "steps": 1,
            "parameters": 1,
            "exchanges": 2.0,
            "exchanges_first_half": 3.0,
            "curve": [],
        }

    runs = [run("sync", 0, 0.9), run("ring", 0, 0.8), run("ring", 1, 0.1), run("x", 0, 0.88)]
    found = control_report.by_name(runs, ("digits", 32))
    assert control_report.gap_closed("x", found) == pytest.approx(0.8)
    console = Console(width=160, record=True)
    console.print(control_report.table(runs, ("digits", 32)))
    text = console.export_text()
    assert "80%" in text
    assert "45.00 ± 49.50" in text


@pytest.mark.parametrize("wrong", [["--workers", "5"], ["--runs", "hogwild"], ["--seeds", "-1"]])
def test_bad_options_end_the_program(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        control.parse(wrong)
    assert wrong[1] in capsys.readouterr().err
