"""A job whose worker was killed restarts from the last state and ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import launchers
from tests.problems import same

# 12 steps an epoch of two workers; the states are at steps 12, 24, 36, 48.
TASK = ["--limit", "384", "--batch-size", "16", "--epochs", "4", "--model", "mlp", "--period", "5"]


def run(workers: int, target: str, folder: Path, *options: str, restarts: int = 0) -> str:
    line = launchers.command("torchrun", workers, target, [*TASK, *options])
    line.insert(line.index("-m", 3), f"--max-restarts={restarts}")
    paths = ["--checkpoint", str(folder / "states"), "--out", str(folder / "out")]
    environment = {"DIE_AFTER_STEP": "24", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = launchers.execute([*line, *paths], 200, environment)
    assert job.status == 0, job.output
    return job.output


def final(folder: Path, workers: int = 2) -> list[Any]:
    state = max((folder / "states").iterdir())
    names = ["mean.pt", *(f"worker-{m}-of-{workers}.pt" for m in range(workers))]
    return [torch.load(state / name, weights_only=True) for name in names]


def test_a_killed_worker_restarts_with_the_job_and_fewer_workers_go_on(tmp_path: Path) -> None:
    run(2, "benchmarks.train", tmp_path / "whole", "--method", "dppf")
    output = run(2, "tests.restart_worker", tmp_path / "killed", "--method", "dppf", restarts=1)
    assert "Signal 9" in output or "-9" in output
    assert same(final(tmp_path / "killed"), final(tmp_path / "whole"))
    lines = (tmp_path / "killed" / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]
    for state in ("step-00000048", "step-00000036"):
        (tmp_path / "killed" / "states" / state / "complete.json").unlink()
    run(1, "benchmarks.train", tmp_path / "killed", "--method", "dppf")
    lines = (tmp_path / "killed" / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]
    assert [json.loads(line)["step"] for line in lines] == [12, 24, 72, 96]
