"""Predictions against real exchanges over slow links; nothing of them is left behind.

Only root can make network namespaces. In CI a root that cannot is a failure; elsewhere, and for
other users, what is missing is said and the tests are left out.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import network

ROOT = Path(__file__).resolve().parent.parent
BANDWIDTH = 100e6 / 8
LINE = [sys.executable, "-m", "benchmarks.network"]


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Leave the tests out where namespaces cannot be made, but never silently in CI."""
    if reason := network.obstacle():
        if os.geteuid() == 0 and os.environ.get("CI"):
            pytest.fail(f"in CI the network has to be measured: {reason}")
        pytest.skip(f"nothing was measured: {reason}")


def ours(pid: int) -> list[str]:
    """The namespaces that process ``pid`` made."""
    listed = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=30
    )
    return [name for name in listed.stdout.split() if name.startswith(f"consensus-opt-{pid}-")]


def inside(pid: int) -> list[int]:
    """The processes that run in them."""
    found: list[int] = []
    for name in ours(pid):
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=30
        )
        found += map(int, listed.stdout.split())
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(300)
def test_exchanges_over_slow_links_take_what_the_planner_predicts(tmp_path: Path) -> None:
    # 100 Mbit/s, so that the links and not the processors are what takes time.
    file = tmp_path / "network.json"
    arguments = ["--workers", "4", "--bandwidths", "100Mbit", "--params", "1M"]
    arguments += ["--repetitions", "4", "--json", str(file)]
    done = subprocess.run(
        [*LINE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"ring", "one peer", "all-reduce"}
    for what, model_times in (("ring", 2), ("one peer", 1), ("all-reduce", 1.5)):
        # What the link alone needs, which nothing can beat: 4 MB or a multiple at 12.5 MB/s.
        assert rows[what]["predicted"] >= model_times * 4e6 / BANDWIDTH
        assert abs(rows[what]["error"]) <= 0.25, rows[what]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_nothing_behind(how: signal.Signals) -> None:
    arguments = ["--workers", "2", "--bandwidths", "1Mbit", "--repetitions", "1000"]
    # A shell that runs the tests in the background lets them, and their children, ignore Ctrl-C.
    heard = functools.partial(signal.signal, how, signal.SIG_DFL)
    process = subprocess.Popen(
        [*LINE, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=heard
    )
    try:
        wait_for(lambda: len(inside(process.pid)) == 2)
        ranks = inside(process.pid)
        process.send_signal(how)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
        left = ours(process.pid)
        network.remove_stale()
    assert left == []
    assert not any(Path("/proc", str(rank)).exists() for rank in ranks)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(180)
def test_the_next_measurement_removes_what_a_killed_one_left() -> None:
    arguments = ["--workers", "2", "--bandwidths", "1Mbit", "--repetitions", "1000"]
    process = subprocess.Popen([*LINE, *arguments], cwd=ROOT)
    try:
        wait_for(lambda: len(inside(process.pid)) == 2)
        ranks = inside(process.pid)
    finally:
        process.kill()
        process.wait()
    assert len(ours(process.pid)) == 3
    with network.cluster(1, BANDWIDTH):
        assert ours(process.pid) == []
        wait_for(lambda: not any(Path("/proc", str(rank)).exists() for rank in ranks))
    assert ours(os.getpid()) == []


@pytest.mark.usefixtures("namespaces")
def test_the_machines_own_network_is_not_touched() -> None:
    def links() -> str:
        line = ["ip", "-brief", "link"]
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=30).stdout

    before = links()
    with network.cluster(2, BANDWIDTH):
        assert links() == before
    assert links() == before


@pytest.mark.usefixtures("namespaces")
def test_a_rank_that_fails_is_reported_with_what_it_printed() -> None:
    with (
        network.cluster(2, BANDWIDTH) as workers,
        pytest.raises(RuntimeError, match=r"(?s)rank \d did not finish.*argument --params"),
    ):
        network.measure_in(workers, "benchmarks.network", ["--params=-1"])
    assert ours(os.getpid()) == []


def test_other_users_are_told_that_nothing_was_measured() -> None:
    code = (
        "import os, sys; from benchmarks import network\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "sys.exit(network.main())"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(folder, "network.json")
        line = [sys.executable, "-c", code, "--json", str(file)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        reason = json.loads(file.read_text())["skipped"]
    assert "can only be made by root; run it with sudo" in reason
    assert done.stdout == f"SKIPPED, nothing was measured: {reason}\n"
