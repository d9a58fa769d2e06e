"""The command: its numbers, its pictures, and what it says about mistakes and installations."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from consensus_opt import units
from consensus_opt.cli import main
from consensus_opt.doctor import examine, load
from consensus_opt.planner import TOPOLOGIES

NAMES = ["complete", "ring", "star", "torus:2x4", "grid", "hypercube", "exponential"]
NAMES += ["one_peer_exponential", "base2", "base3", "random_matching:7"]
PLAN = ["plan", "--params", "25.6M", "--workers", "64", "--bandwidth", "10Gbit", "--latency"]
PLAN += ["50us", "--step-time", "0.25"]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with --json, and returns what it printed."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


# Units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25.6M", 25_600_000),
        ("7B", 7_000_000_000),
        ("1.3T", 1_300_000_000_000),
        ("350k", 350_000),
        ("350 K", 350_000),
        ("25557032", 25_557_032),
        ("25_557_032", 25_557_032),
        ("1e6", 1_000_000),
        ("1", 1),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert units.count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit", 1.25e9),
        ("10Gb/s", 1.25e9),
        ("10 Gbps", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("1.25GB", 1.25e9),
        ("200Mbit", 25e6),
        ("1GiB/s", 2.0**30),
        ("1Kibit", 128.0),
        ("8bit", 1.0),
    ],
)
def test_bandwidths_tell_bits_from_bytes(text: str, value: float) -> None:
    assert units.bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50us", 50e-6),
        ("50µs", 50e-6),
        ("250ms", 0.25),
        ("0.25", 0.25),
        (".25s", 0.25),
        ("3ns", 3e-9),
    ],
)
def test_durations(text: str, value: float) -> None:
    assert units.duration(text) == value


@pytest.mark.parametrize(
    ("convert", "texts", "example"),
    [
        (units.count, ["", "x", "0", "0.5", "-1", "1.0000005M", "3 apples", "nan", "inf"], "25.6M"),
        (units.bandwidth, ["", "10", "10G", "0Gbit", "Gbit", "10Gbitt", "10ms", "-1bit"], "10Gbit"),
        (units.duration, ["", "fast", "10us us", "-1s", "10Mbit", "nan"], "50us"),
    ],
)
def test_other_texts_are_refused_with_an_example(
    convert: Any, texts: list[str], example: str
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=f"it must be .*write {example}") as caught:
            convert(text)
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (102_400_000, "B", "102 MB"),
        (999.9, "B", "1 kB"),
        (1.25e9, "B/s", "1.25 GB/s"),
        (0.25, "s", "250 ms"),
        (50e-6, "s", "50 us"),
        (0, "s", "0 s"),
    ],
)
def test_numbers_are_written_with_a_prefix(value: float, unit: str, text: str) -> None:
    assert units.scaled(value, unit) == text


# topology


@pytest.mark.parametrize("name", NAMES)
def test_every_topology_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--name", name, "-n", "8"]) == 0
    shown = capsys.readouterr().out
    for words in (name, "degree", "lambda_2", "gap", "messages", "1/100", "accelerated"):
        assert words in shown


def test_topology_gives_numbers_to_programs(run_json: Any) -> None:
    found = run_json("topology", "--name", "ring", "-n", "32", "--params", "1M", "--dtype", "bf16")
    lambda_2 = (1 + 2 * math.cos(2 * math.pi / 32)) / 3
    assert found["degree"] == [2, 2]
    assert found["lambda_2"] == pytest.approx(lambda_2)
    assert found["gap"] == pytest.approx(1 - lambda_2)
    assert found["p"] == pytest.approx(1 - lambda_2**2)
    assert (found["messages"], found["message_bytes"], found["worker_bytes"]) == (64, 2e6, 4e6)
    for row in found["reach"]:
        slowest = math.log(row["fraction"]) / math.log(lambda_2)
        assert row["worst"] == math.ceil(slowest)
        assert row["accelerated_worst"] <= 16  # a ring of 32 has 16 other eigenvalues


@pytest.mark.parametrize("name", NAMES)
def test_topology_draws_a_picture(name: str, tmp_path: Path, run_json: Any) -> None:
    file = tmp_path / "new" / "graph.png"
    found = run_json("topology", "--name", name, "-n", "8", "--png", str(file))
    assert found["png"] == str(file)
    pixels = imread(file)
    assert pixels.shape[:2] == (600, 1320)
    for half in (pixels[:, :660], pixels[:, 660:]):  # the graph, and its curves
        assert half[..., :3].std() > 0.02


# plan


def test_plan_shows_a_table_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    shown = capsys.readouterr().out
    for words in ("all_reduce", *TOPOLOGIES, "distance", "417.6 ms", "Recommended: local_sgd"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_plan_gives_numbers_to_programs(run_json: Any) -> None:
    found = run_json(*PLAN, "--topologies", "ring", "--periods", "1", "4", "--target", "0.3")
    assert found["params"] == 25_600_000
    assert found["network"] == {"bandwidth": 1.25e9, "latency": 50e-6}
    ring = next(each for each in found["candidates"] if each["average"] == "ring")
    assert ring["seconds"] == pytest.approx(0.25 + 50e-6 + 2 * 0.08192)
    assert (ring["bytes"], ring["relative"], ring["meets"]) == (204_800_000, 1.0, False)
    assert {each["period"] for each in found["candidates"]} == {1, 4}
    assert found["recommended"] in found["candidates"]


def test_plan_says_when_nothing_meets_the_target(
    run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hopeless = [*PLAN, "--periods", "16"]
    assert run_json(*hopeless)["recommended"] is None
    assert main(hopeless) == 0
    assert "Nothing here holds the distance" in capsys.readouterr().out


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("topology --name rng -n 4", ["'rng' is not known", "known are complete, ring", "write"]),
        ("topology --name hypercube -n 6", ["6 workers", "power of two", "write"]),
        ("topology --name torus:4x2 -n 9", ["9 workers", "must be one of", "write"]),
        ("topology --name ring -n 0", ["workers is 0", "must be from 1", "write"]),
        ("topology --name ring -n 9999", ["workers is 9999", "must be from 1", "write"]),
        ("topology --name ring -n four", ["'four' is no number", "must be a whole", "write"]),
        ("topology --name ring -n 4 --png ring.pdf", ["'ring.pdf'", "must end in .png", "write"]),
        ("topology --name ring", ["required", "--workers"]),
        (f"{' '.join(PLAN)} --bandwidth 10", ["'10' is no bandwidth", "must be", "write 10Gbit"]),
        (f"{' '.join(PLAN)} --latency 50uz", ["'50uz' is no time", "must be", "write 50us"]),
        (f"{' '.join(PLAN)} --params many", ["'many' is no count", "must be", "write 25.6M"]),
        (f"{' '.join(PLAN)} --step-time 0", ["step is 0.0", "must be", "write 0.25"]),
        (f"{' '.join(PLAN)} --workers 1", ["workers is 1", "must be from 2", "write"]),
        (f"{' '.join(PLAN)} --topologies hypercube --workers 6", ["6 workers", "power of two"]),
        (f"{' '.join(PLAN)} --target -1", ["target"]),
        ("fly", ["invalid choice: 'fly'", "topology", "plan", "doctor"]),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_status_2(
    arguments: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(arguments.split())
    except SystemExit as exit_:
        status = exit_.code
    shown = capsys.readouterr()
    assert (status, shown.out, shown.err.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in shown.err


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("rich", "topology --name ring -n 4"),
        ("rich", " ".join(PLAN)),
        ("matplotlib", "topology --name ring -n 4 --png never.png --json"),
    ],
)
def test_what_is_missing_for_people_is_named(
    package: str,
    arguments: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(arguments.split()) == 2
    assert f"{package} is not installed" in (shown := capsys.readouterr()).err
    assert "pip install 'consensus-opt[report]'" in shown.err
    assert not shown.out


def test_the_installed_command_runs_without_rich_or_matplotlib() -> None:
    command = shutil.which("consensus-opt", path=str(Path(sys.executable).parent))
    assert command is not None, "install the package: pip install -e ."
    code = (
        "import sys; sys.modules.update(rich=None, matplotlib=None); sys.argv[0] = 'consensus-opt';"
        "from consensus_opt.cli import main; sys.exit(main())"
    )
    arguments = ["topology", "--name", "base2", "-n", "6", "--json"]
    for line in ([command], [sys.executable, "-c", code]):
        done = subprocess.run([*line, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["cycle"] == 4


# doctor


def test_doctor_reports_what_is_installed() -> None:
    report = examine(timeout=120.0)
    assert report.versions["torch"] == version("torch")
    assert report.versions["consensus-opt"] == version("consensus-opt")
    packages = {"MPI": "mpi4py", "Horovod": "horovod", "DeepSpeed": "deepspeed"}
    engines = {each.name: each for each in report.engines}
    assert engines["torch.distributed"].state == "works"
    assert "gloo" in engines["torch.distributed"].details
    for name, package in packages.items():
        if find_spec(package) is None:
            assert engines[name].state == "missing"
            assert "pip install" in engines[name].remedy
        else:
            assert engines[name].state == "works", engines[name].details
            assert version(package) in engines[name].details
    assert report.launchers["torchrun"] == shutil.which(
        "torchrun", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
    )
    assert not report.broken


def test_doctor_shows_a_table_and_json(capsys: pytest.CaptureFixture[str], run_json: Any) -> None:
    # Hardly any engine loads in this time, which is reported and makes the status 1.
    arguments = ["doctor", "--timeout", "10ms"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "does not load within 0.01 s" in " ".join(shown.replace("│", " ").split())
    assert main([*arguments, "--json"]) == 1
    states = [each["state"] for each in json.loads(capsys.readouterr().out)["engines"]]
    assert "broken" in states
    assert "works" not in states


def test_doctor_ends_an_import_that_hangs_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    works, why = load(code, timeout=3.0)
    assert not works
    assert "does not load within 3 s" in why
    deadline = time.monotonic() + 10
    while (alive := _runs(int(pid.read_text()))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_doctor_reads_what_a_noisy_import_found_and_why_a_bad_one_failed() -> None:
    noisy = "print('[INFO] hello'); print('no newline', end=' '); say('version 1'); print('bye')"
    assert load(noisy, timeout=60.0) == (True, "version 1")
    assert load("import no_such_engine", timeout=60.0) == (
        False,
        "ModuleNotFoundError: No module named 'no_such_engine'",
    )
    assert load("import os; os._exit(7)", timeout=60.0) == (False, "ended with status 7")


def test_doctor_does_not_let_an_engine_believe_that_it_is_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "HOROVOD_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_btl", "self")
    code = "import os; say(' '.join(sorted(k for k in os.environ if 'RANK' in k or '_' in k)))"
    works, names = load(code, timeout=60.0)
    assert works
    assert "OMPI_MCA_btl" in names.split()
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"} & set(names.split())


def test_doctor_warns_of_a_lock_that_a_killed_compiler_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    notes = examine(timeout=0.01).notes
    assert any(f"rm {lock}" in note for note in notes)
