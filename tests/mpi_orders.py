"""MPI is started by one and used by others, in several orders: one process an order.

    mpirun -n 2 python -m tests.mpi_orders ORDER

The order of the imports is what is tested, so they stand inside the functions.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.launchers import report

KEPT: list[Any] = []


def mean_of_ranks() -> list[float]:
    """The mean over the ranks by an MPITransport, which lives until Python ends."""
    from consensus_opt.integrations.mpi import MPI, MPITransport

    transport = MPITransport(timeout=60)
    row = torch.tensor([float(MPI.COMM_WORLD.Get_rank())])
    transport.mean(row)
    KEPT.append(transport)
    return row.tolist()


def state() -> str:
    from mpi4py import MPI

    return "ended" if MPI.Is_finalized() else "runs" if MPI.Is_initialized() else "not started"


def by_user() -> None:
    """MPI is the user's to start and to end."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    seen: dict[str, Any] = {"at first": state()}
    try:
        mean_of_ranks()
    except RuntimeError as error:
        seen["error"] = str(error)
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    rank = MPI.COMM_WORLD.Get_rank()
    seen |= {"mean": mean_of_ranks(), "after ours": state()}
    MPI.Finalize()
    report(rank, seen | {"in the end": state()})


def mpi4py_horovod_ours() -> None:
    from mpi4py import MPI

    # isort: split
    import horovod.torch as hvd

    hvd.init()
    from consensus_opt.integrations import find_transport

    seen = {"mean": mean_of_ranks(), "found": repr(find_transport(60))}
    seen["theirs"] = hvd.allreduce(torch.tensor([float(hvd.rank())])).tolist()
    hvd.barrier()
    hvd.shutdown()
    seen |= {"in the end": state(), "again": mean_of_ranks()}
    report(MPI.COMM_WORLD.Get_rank(), seen)


def horovod_ours() -> None:
    import horovod.torch as hvd

    hvd.init()
    seen: dict[str, Any] = {"mean": mean_of_ranks(), "after ours": state()}
    seen["theirs"] = hvd.allreduce(torch.tensor([float(hvd.rank())])).tolist()
    report(hvd.rank(), seen)
    hvd.barrier()
    hvd.shutdown()


def ours_horovod() -> None:
    seen: dict[str, Any] = {"mean": mean_of_ranks()}
    import horovod.torch as hvd

    hvd.init()
    seen["theirs"] = hvd.allreduce(torch.tensor([float(hvd.rank())])).tolist()
    rank = hvd.rank()
    hvd.barrier()
    hvd.shutdown()
    report(rank, seen | {"after Horovod": state(), "again": mean_of_ranks()})


ORDERS = (by_user, mpi4py_horovod_ours, horovod_ours, ours_horovod)

if __name__ == "__main__":
    {order.__name__: order for order in ORDERS}[sys.argv[1]]()
