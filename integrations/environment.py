"""What the launcher that started this process left in its environment.

Every launcher numbers its processes in variables of its own. Nothing here starts or imports an
engine, except :func:`init_process_group`, which is asked to.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from consensus_opt.errors import PeerError


@dataclass(frozen=True)
class Place:
    """This process among those that one launcher started.

    Attributes:
        launcher: The launcher, in words.
        variable: The environment variable that gave the size.
        mpi: Whether the launcher starts MPI programs.
    """

    launcher: str
    variable: str
    mpi: bool
    rank: int
    size: int


_LAUNCHERS = (
    ("torchrun or the deepspeed launcher", False, "RANK", "WORLD_SIZE"),
    ("mpirun of Open MPI", True, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun of MVAPICH", True, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpiexec of MPICH or Intel MPI", True, "PMI_RANK", "PMI_SIZE"),
    ("horovodrun", False, "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("srun with PMIx", True, "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("srun", False, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Innermost first: mpirun or srun may start one torchrun a machine, which starts the workers."""


def place() -> Place | None:
    """Return what the innermost launcher says; None where no launcher started this process."""
    for launcher, mpi, rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return Place(launcher, size, mpi, int(os.environ[rank]), int(os.environ[size]))
    return None


def init_process_group(backend: str = "gloo", timeout: float = 300.0) -> None:
    """Initialise torch.distributed under any launcher, where its ``env://`` knows only torchrun's.

    Rank and size are those of :func:`place`. The address is ``MASTER_ADDR:MASTER_PORT``; under an
    MPI launcher and with mpi4py, rank 0 chooses one and tells the others, if it is not given.

    Args:
        backend: As for ``torch.distributed.init_process_group``.
        timeout: Seconds to wait for the others.

    Raises:
        RuntimeError: If no launcher started this process, or the address is missing.
        PeerError: If the ranks do not meet in time. Names the address, the rank and the size.
    """
    here = place()
    if here is None:
        known = ", ".join(size for *_, size in _LAUNCHERS)
        raise RuntimeError(
            f"no launcher started this process: none of {known} is set; start it with "
            "torchrun --nproc-per-node=4 train.py or mpirun -n 4 python train.py"
        )
    host, port = _address(here, timeout)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=here.rank,
            world_size=here.size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"rank {here.rank} of {here.size} did not meet the others at {host}:{port} within "
            f"{timeout:g} s; rank 0 has to run on {host}, with port {port} free and open to the "
            "other machines; set MASTER_ADDR and MASTER_PORT to its address, the same on all "
            f"ranks. The engine said: {error}"
        ) from error


def _address(here: Place, timeout: float) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if here.size == 1:
        return "127.0.0.1", 0
    if not here.mpi or find_spec("mpi4py") is None:
        verb = "is" if len(missing) == 1 else "are"
        raise RuntimeError(
            f"{' and '.join(missing)} {verb} not set, and {here.launcher} does not tell where rank "
            "0 is; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same "
            "on all ranks (mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 ...)"
            + (", or pip install mpi4py, by which rank 0 tells the others" if here.mpi else "")
        )
    return _chosen_by_rank_zero(timeout)


def _chosen_by_rank_zero(timeout: float) -> tuple[str, int]:
    from consensus_opt.integrations.mpi import MPITransport

    transport = MPITransport(timeout=timeout)
    with socket.socket() as probe:
        probe.bind(("", 0))
        text = f"{socket.getfqdn()}:{probe.getsockname()[1]}".encode()
    address = torch.zeros(256, dtype=torch.uint8)
    address[: len(text)] = torch.tensor(list(text))
    hosts = {bytes(row).split(b":")[0] for row in transport.gather(address).tolist()}
    transport.broadcast(address)
    host, port = bytes(address.tolist()).rstrip(b"\0").decode().split(":")
    return ("127.0.0.1" if len(hosts) == 1 else host), int(port)
