"""The same program under every launcher: what to type, in which environment, and a clean end.

Launchers put their processes into sessions and groups of their own, and pass a signal on or not, as
each sees fit. So every process of a run carries a mark in its environment, and whatever bears it
when the run is over is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("torchrun", "mpirun", "horovodrun-gloo", "horovodrun-mpi", "deepspeed")
_BIN = Path(sys.executable).parent
_MARK = "CONSENSUS_OPT_RUN"
_OF_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FIXED = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Run:
    """A launcher that ended: its exit status, and what all of its processes printed, mixed."""

    command: tuple[str, ...]
    status: int
    output: str
    seconds: float


class LaunchError(RuntimeError):
    """A launcher failed or ran out of time; the message ends with what was printed."""


def run(
    kind: str,
    n: int,
    target: str,
    arguments: Sequence[str] = (),
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run a module ("tests.worker") or a script ("worker.py") on n processes of this machine.

    Args:
        kind: one of `KINDS`.
        n: number of processes.
        target: a file if it ends in ".py", else a module that can be imported from the repository.
        arguments: the program's command line.
        timeout: seconds after which all processes are killed.
        environment: variables beside those that the launchers need.

    Raises:
        LaunchError: it was not done in time.
    """
    port = free_port()
    return execute(command(kind, n, target, arguments, port), timeout, environment, port)


def execute(
    line: Sequence[str],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    port: int = 0,
) -> Run:
    """Run a launcher's command line to its end, and end with it whatever it started.

    Raises:
        LaunchError: it was not done in time.
    """
    mark = uuid.uuid4().hex
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env={**_environment(), **(environment or {}), _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_marked(mark)
            process.wait()
            _remove_shared_memory(port)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status is None:
        raise LaunchError(f"{' '.join(line)} was not done within {timeout:g} s:\n{text[-6000:]}")
    return Run(tuple(line), status, text, time.monotonic() - start)


def command(
    kind: str, n: int, target: str, arguments: Sequence[str], port: int = 29500
) -> list[str]:
    """What to type to run the target on n processes of this machine.

    Raises:
        ValueError: the kind is unknown.
    """
    script = target.endswith(".py")
    program = [*([] if script else ["-m"]), target, *arguments]
    python = [sys.executable, *program]
    if kind == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        return [sys.executable, *launcher, f"--nproc-per-node={n}", *program]
    if kind == "mpirun":
        return ["mpirun", "-n", str(n), *python]
    if kind in ("horovodrun-gloo", "horovodrun-mpi"):
        engine = kind.replace("horovodrun-", "--")
        launcher = [str(_BIN / "horovodrun"), engine, "-np", str(n), "-H", f"localhost:{n}"]
        return [sys.executable, *launcher, *python]
    if kind == "deepspeed":
        launcher = [str(_BIN / "deepspeed"), "--num_accelerators", str(n), "--no_local_rank"]
        launcher += ["--master_port", str(port), *([] if script else ["--module"])]
        return [sys.executable, *launcher, target, *arguments]
    raise ValueError(f"the launcher {kind!r} is unknown; write one of {', '.join(KINDS)}")


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _OF_OTHER_LAUNCHERS}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {
        **_FIXED,
        "PATH": os.pathsep.join([str(_BIN), kept.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    kept.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    if not Path("/dev/nvidiactl").exists():
        kept.setdefault("DS_ACCELERATOR", "cpu")
    return kept


def _kill_marked(mark: str) -> None:
    """Kill every process of a run; again until none is left, because they start others."""
    while marked := _marked(mark):
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or it is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _remove_shared_memory(port: int) -> None:
    """Remove the 66 MB a rank that DeepSpeed leaves behind."""
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        file.unlink(missing_ok=True)
