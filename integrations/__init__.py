"""Adapters: one file an engine, each turning it into a Transport, with no algorithm in it.

Here is what ``transport=None`` means: :func:`find_transport`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from consensus_opt.integrations.environment import Place, place
from consensus_opt.transport import SoloTransport, Transport

_OVER_TORCH = "call consensus_opt.integrations.environment.init_process_group('gloo') (or 'nccl')"


class Candidate(NamedTuple):
    """An engine that runs in this process, and its view of who this process is."""

    engine: str
    transport: str
    rank: int
    size: int
    connect: Callable[[float], Transport]


def find_transport(timeout: float) -> Transport:
    """Return a transport over what runs in this process.

    The first of these that holds decides:

    1. torch.distributed is initialised: its default group.
    2. Horovod is initialised: all its ranks.
    3. MPI runs, and has several ranks: ``MPI.COMM_WORLD``.
    4. A launcher of MPI programs (mpirun, mpiexec, srun) started several processes: MPI is started.
    5. Another launcher started several processes: an error, because they are not connected.
    6. A single worker.

    Where more than one of the first three hold, they have to agree on this process's rank and on
    the size.

    Args:
        timeout: Seconds to wait for a peer.

    Raises:
        RuntimeError: If engines disagree, or several processes were started and are not connected.
        ImportError: If mpirun started this process, and mpi4py is missing.
    """
    running = [each for each in (_torch(), _horovod(), _mpi()) if each is not None]
    for other in running[1:]:
        if (other.rank, other.size) != (running[0].rank, running[0].size):
            raise RuntimeError(_disagreement(running[0], other))
    if running:
        return running[0].connect(timeout)
    here = place()
    if here is not None and here.size > 1:
        return _over_mpi(here, timeout) if here.mpi else _not_connected(here)
    return SoloTransport()


def _torch() -> Candidate | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None

    def connect(timeout: float) -> Transport:
        from consensus_opt.integrations.torch_distributed import TorchTransport

        return TorchTransport(timeout=timeout)

    rank, size = dist.get_rank(), dist.get_world_size()
    return Candidate("torch.distributed", "TorchTransport()", rank, size, connect)


def _horovod() -> Candidate | None:
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or not hvd.is_initialized():
        return None

    def connect(timeout: float) -> Transport:
        from consensus_opt.integrations.horovod import HorovodTransport

        return HorovodTransport(timeout=timeout)

    return Candidate("Horovod", "HorovodTransport()", hvd.rank(), hvd.size(), connect)


def _mpi() -> Candidate | None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if size == 1:  # so it is for any program that imports mpi4py without mpirun
        return None

    def connect(timeout: float) -> Transport:
        from consensus_opt.integrations.mpi import MPITransport

        return MPITransport(timeout=timeout)

    return Candidate("MPI", "MPITransport()", rank, size, connect)


def _over_mpi(here: Place, timeout: float) -> Transport:
    try:
        from consensus_opt.integrations.mpi import MPITransport
        from consensus_opt.integrations.mpi_process import MPI
    except ImportError as error:
        raise ImportError(
            f"{here.launcher} started {here.size} processes ({here.variable}), and no engine "
            f"connects them in this one: {error}; or {_OVER_TORCH} before ConsensusOptimizer"
        ) from error
    transport = MPITransport(timeout=timeout)
    if transport.size == 1:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        raise RuntimeError(
            f"{here.launcher} started {here.size} processes ({here.variable}), and mpi4py sees "
            f"only this one, because its MPI ({library}) is another; start with the mpirun of that "
            "MPI, or build mpi4py for the launcher's: pip install --no-binary mpi4py mpi4py"
        )
    return transport


def _not_connected(here: Place) -> NoReturn:
    ways = {
        "WORLD_SIZE": "call torch.distributed.init_process_group('gloo') (or 'nccl')",
        "HOROVOD_SIZE": "call horovod.torch.init()",
    }
    way = ways.get(here.variable, _OVER_TORCH)
    raise RuntimeError(
        f"{here.launcher} started {here.size} processes ({here.variable}), and no engine connects "
        f"them in this one; {way} before ConsensusOptimizer, or pass transport=..."
    )


def _disagreement(one: Candidate, other: Candidate) -> str:
    return (
        f"{one.engine} says that this is rank {one.rank} of {one.size}, and {other.engine} that it "
        f"is rank {other.rank} of {other.size}; say which of them carries the messages: pass "
        f"transport={one.transport} or transport={other.transport}"
    )
