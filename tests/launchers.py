"""Real jobs for tests: a worker module under a launcher, and what each of its ranks found out.

A worker is a module of tests/ whose ``main()`` calls ``report(rank, value)`` once a rank.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import launchers

_FOLDER = "CONSENSUS_OPT_REPORTS"


@dataclass(frozen=True)
class Job:
    """A job that ended: ``reports[rank]`` is what that rank reported, None where it did not."""

    status: int
    output: str
    seconds: float
    reports: list[Any]


def launch(
    kind: str,
    n: int,
    target: str,
    args: Sequence[str] = (),
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a worker on n ranks and return the report of each; fail with all that was printed."""
    job = launch_loosely(kind, n, target, args, timeout, env)
    silent = [rank for rank, report in enumerate(job.reports) if report is None]
    assert job.status == 0, f"{kind} ended with status {job.status}:\n{job.output[-6000:]}"
    assert not silent, f"ranks {silent} reported nothing under {kind}:\n{job.output[-6000:]}"
    return job.reports


def launch_loosely(
    kind: str,
    n: int,
    target: str,
    args: Sequence[str] = (),
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Job:
    """Like ``launch`` for jobs that are meant to fail; running out of time still raises.

    Args:
        kind: "torchrun", "mpirun", "horovodrun-gloo", "horovodrun-mpi" or "deepspeed".
        n: Number of ranks.
        target: A module such as "tests.mpi_worker", or the path of a script.
        args: The worker's command line.
        timeout: Seconds after which all processes are killed.
        env: Further environment variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = launchers.run(kind, n, target, args, timeout, {**(env or {}), _FOLDER: folder})
        reports = [_read(Path(folder, str(rank))) for rank in range(n)]
    return Job(run.status, run.output, run.seconds, reports)


def report(rank: int, value: Any) -> None:
    """Hand a value to the test that launched this process; anything that pickle takes."""
    place = Path(os.environ[_FOLDER], str(rank))
    draft = place.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(value))
    draft.rename(place)


def attempt(function: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether it returned, and what; the traceback where it raised."""
    try:
        return True, function()
    except Exception:
        return False, traceback.format_exc()


def _read(place: Path) -> Any:
    return pickle.loads(place.read_bytes()) if place.exists() else None
