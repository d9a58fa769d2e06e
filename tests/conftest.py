"""Tests of an engine run where the engine is installed; in CI every engine has to be.

A test says what it needs by a marker (mpi, horovod, deepspeed). Where that is missing the test is
left out and the header says so; in CI the run fails instead, so that nothing goes untested unseen.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ENGINES = {
    "mpi": ("mpi4py", "mpirun"),
    "horovod": ("horovod", "horovodrun"),
    "deepspeed": ("deepspeed", "deepspeed"),
}


def missing_engines() -> list[str]:
    """The engines whose Python package or launcher is not there."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return [
        engine
        for engine, (package, launcher) in ENGINES.items()
        if find_spec(package) is None or shutil.which(launcher, path=path) is None
    ]


def pytest_configure() -> None:
    missing = missing_engines()
    if missing and os.environ.get("CI"):
        raise pytest.UsageError(
            f"in CI every engine has to be installed, and {', '.join(missing)} is not; "
            "write `make engines`"
        )


def pytest_report_header() -> str:
    missing = missing_engines()
    left_out = f"; left out: tests of {', '.join(missing)} (make engines)" if missing else ""
    return f"engines: {', '.join(e for e in ENGINES if e not in missing) or 'none'}{left_out}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = set(missing_engines())
    left_out = {item for item in items if missing & {mark.name for mark in item.iter_markers()}}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
