"""Start `benchmarks.train` in several processes, and leave none of them behind.

torchrun puts each worker into a session of its own, so killing torchrun outright would orphan them.
It is asked to stop instead (SIGTERM), which it passes on, and killed only if it does not obey.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.launchers import ROOT

OBEY = 45.0


def torchrun(
    arguments: Sequence[str],
    workers: int,
    timeout: float,
    *,
    quiet: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.train` with these arguments on `workers` processes.

    Args:
        arguments: the command line of `benchmarks.train`.
        workers: number of processes, one thread each, all on this machine.
        timeout: seconds after which they are stopped.
        quiet: collect what they print instead of showing it.

    Raises:
        subprocess.CalledProcessError: one of them failed.
        subprocess.TimeoutExpired: they were not done in time.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={workers}", "-m", "benchmarks.train", *arguments),
    ]
    pipe = subprocess.PIPE if quiet else None
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        _stop(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, 0, output, errors)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(OBEY)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
