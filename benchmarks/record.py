"""What a run leaves behind: `metrics.jsonl` while it trains, `result.json` when it ends.

Numbers that are not finite are written as null, so that the files of a run that diverged are still
JSON to every reader.
"""

from __future__ import annotations

import json
import math
import platform
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

METRICS, ROUNDS, RESULT, REPORT = "metrics.jsonl", "rounds.jsonl", "result.json", "report.png"


@dataclass(frozen=True)
class Epoch:
    """One line of metrics.jsonl.

    Losses are mean cross-entropies, accuracies fractions. `test_*` is the mean model's,
    `worker_accuracy` each worker's own. The counts run from the start of training; bytes are those
    that a worker sent (mean over the workers). Time spent on measuring is in no number.
    """

    epoch: int
    step: int
    lr: float
    train_loss: float
    test_loss: float
    test_accuracy: float
    worker_accuracy: tuple[float, ...]
    consensus_distance: float
    rounds: int
    bytes_per_worker: float
    train_seconds: float


def result(
    last: Epoch,
    options: Namespace,
    *,
    size: int,
    engine: str,
    parameters: int,
    test_images: int,
    seconds: float,
) -> dict[str, Any]:
    """The content of result.json: the last epoch, what to compare it with, how to repeat it."""
    reference = sync_bytes(parameters, size, last.step)
    workers = last.worker_accuracy
    return {
        "method": options.method,
        "workers": size,
        "engine": engine,
        "parameters": parameters,
        "test_images": test_images,
        **asdict(last),
        "worker_accuracy_min": min(workers),
        "worker_accuracy_mean": sum(workers) / size,
        "worker_accuracy_max": max(workers),
        "sync_bytes_per_worker": reference,
        "share_of_sync_bytes": last.bytes_per_worker / reference if reference else None,
        "diverged": not math.isfinite(last.train_loss),
        "seconds": seconds,
        "options": vars(options),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
    }


def sync_bytes(parameters: int, size: int, steps: int) -> int:
    """Bytes one worker sends when fp32 gradients are ring all-reduced in every step.

    A ring all-reduce of b bytes over n workers sends 2 (n - 1)/n b from each of them.
    """
    return 2 * (size - 1) * 4 * parameters // size * steps


def prepare(out: Path, first: bool, done: int = 0) -> Path:
    """The folder of a run, which the first worker makes and clears of an earlier run's files.

    Of a run that goes on after ``done`` epochs, their lines of the metrics stay.
    """
    if first and done and (out / METRICS).exists():
        kept = [line for line in read_metrics(out) if line["epoch"] <= done]
        (out / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    elif first:
        out.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, ROUNDS, RESULT, REPORT):
            (out / name).unlink(missing_ok=True)
    return out


def append(out: Path, epoch: Epoch) -> None:
    """Add one line to the metrics."""
    with (out / METRICS).open("a") as file:
        file.write(json.dumps(_finite(asdict(epoch)), allow_nan=False) + "\n")


def write(out: Path, content: dict[str, Any]) -> None:
    """Write the result as one JSON object."""
    text = json.dumps(_finite(content), allow_nan=False, indent=2)
    (out / RESULT).write_text(text + "\n")


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The epochs of a run, first to last."""
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


def read_result(out: Path) -> dict[str, Any]:
    """The result of a run."""
    content: dict[str, Any] = json.loads((out / RESULT).read_text())
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
