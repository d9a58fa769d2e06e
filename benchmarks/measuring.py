"""Timing between ranks: interleaved, the slowest rank counts, medians of several."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.launchers import run
from consensus_opt.transport import Transport

Action = Callable[[], Any]


def slowest(transport: Transport, action: Action) -> float:
    """Seconds that the slowest rank takes, from a common start; a collective call."""
    transport.gather(torch.zeros(1))
    start = time.perf_counter()
    action()
    return float(transport.gather(torch.tensor([time.perf_counter() - start])).max())


def medians(
    transport: Transport, actions: Mapping[str, Action], repetitions: int, warm_up: int = 0
) -> dict[str, float]:
    """Median seconds of each action, all of them in turn; a collective call."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(warm_up + repetitions):
        for name, action in actions.items():
            elapsed = slowest(transport, action)
            if turn >= warm_up:
                times[name].append(elapsed)
    return {name: statistics.median(found) for name, found in times.items()}


def among_ranks(
    kind: str, ranks: int, module: str, arguments: Sequence[str], timeout: float = 540
) -> dict[str, Any]:
    """Run a module under a launcher and return what its rank 0 wrote to the file `--rank-of`.

    Raises:
        RuntimeError: A rank failed, or they were not done in time; with what was printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        ended = run(kind, ranks, module, [*arguments, f"--rank-of={file}"], timeout)
        if ended.status:
            raise RuntimeError(f"{kind} failed with status {ended.status}:\n{ended.output[-4000:]}")
        results: dict[str, Any] = json.loads(file.read_text())
        return results
