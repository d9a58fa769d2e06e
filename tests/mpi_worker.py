"""What each rank runs in the tests of MPI: named checks in one job.

    mpirun -n 4 python -m tests.mpi_worker CHECK [CHECK ...]

A check returns what happened beside what should have; test_mpi.py compares, and says why.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from consensus_opt import ConsensusOptimizer, PeerError, StackedTransport, gossip_sgd, local_sgd
from consensus_opt.integrations import find_transport
from consensus_opt.integrations.environment import init_process_group
from consensus_opt.integrations.mpi import MPITransport, is_gpu_aware
from consensus_opt.topology import topology
from tests import test_disagreement as disagreement
from tests import test_parity as parity
from tests import test_uneven as uneven
from tests.launchers import attempt, report
from tests.problems import flat, mlp, random_rows, train

CHECKS: dict[str, Callable[[], Any]] = {}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
TIMEOUT = 60.0
UNEVEN = ("local_sgd_2", "ring", "one_peer")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    report(RANK, {name: attempt(CHECKS[name]) for name in names})


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def error_of(function: Callable[[], Any]) -> str:
    """The type and text of what a call raises, "nothing" if it returns."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---------------------------------------------------------------------------- the transport


class Recorder(MPI.Intracomm):
    """A communicator that notes the calls with data, and how many elements each one has.

    Its duplicates note in the same place.
    """

    calls: ClassVar[list[tuple[str, int]]] = []

    def Isend(self, buffer: Any, *where: Any) -> MPI.Request:
        return self._noted("Isend", buffer, super().Isend(buffer, *where))

    def Irecv(self, buffer: Any, *where: Any) -> MPI.Request:
        return self._noted("Irecv", buffer, super().Irecv(buffer, *where))

    def Ibcast(self, buffer: Any, *where: Any) -> MPI.Request:
        return self._noted("Ibcast", buffer, super().Ibcast(buffer, *where))

    def Iallreduce(self, send: Any, receive: Any) -> MPI.Request:  # type: ignore[override]
        return self._noted("Iallreduce", receive, super().Iallreduce(send, receive))

    def Iallgather(self, send: Any, receive: Any) -> MPI.Request:
        return self._noted("Iallgather", receive, super().Iallgather(send, receive))

    def _noted(self, name: str, buffer: Any, request: MPI.Request) -> MPI.Request:
        array = buffer[0] if isinstance(buffer, list) else buffer
        self.calls.append((name, array.size if hasattr(array, "size") else len(array)))
        return request


class CountsTo1000(MPITransport):
    """As if MPI counted to 1000 elements, and no further."""

    largest_count = 1000


class Staging(MPITransport):
    """Lets everything through host memory, as if the tensors here lay on a GPU."""

    def _is_direct(self, tensor: Tensor) -> bool:
        return False


def compare(transport: MPITransport, width: int = 1003) -> list[str]:
    """The operations whose result is not that of StackedTransport, in every dtype."""
    odd = []
    rank, n = transport.rank, transport.size
    for dtype in DTYPES:
        rows = random_rows(n, width, dtype=dtype)
        for name in ("complete", "ring", "one_peer_exponential", "random_matching"):
            mixing = topology(name).mixing(n, 1)
            mine, stacked = rows[rank].clone(), rows.clone()
            transport.exchange(mine, mixing)
            StackedTransport(n).exchange(stacked, mixing)
            odd += [] if torch.equal(mine, stacked[rank]) else [f"{name} {dtype}"]
        mine = rows[rank].clone()
        transport.mean(mine)
        bound = 4 * torch.finfo(dtype).eps
        close = torch.allclose(mine.double(), rows.double().mean(0), rtol=bound, atol=bound)
        odd += [] if close else [f"mean {dtype}"]
        same = transport.gather(mine.view(torch.uint8))
        odd += [] if bool((same == same[0]).all()) else [f"bits of the mean {dtype}"]
    for dtype in (*DTYPES, torch.int64, torch.bool):
        rows = (random_rows(n, width) * 3).to(dtype)
        mine = rows[rank].clone()
        odd += [] if torch.equal(transport.gather(mine), rows) else [f"gather {dtype}"]
        transport.broadcast(mine, n - 1)
        odd += [] if torch.equal(mine, rows[-1]) else [f"broadcast {dtype}"]
    return odd


@check
def operations() -> list[str]:
    return compare(MPITransport(timeout=TIMEOUT)) + compare(MPITransport(chunk_bytes=512), 771)


@check
def small_count() -> tuple[list[str], dict[str, int]]:
    Recorder.calls.clear()
    transport = CountsTo1000(Recorder(WORLD), chunk_bytes=1000, timeout=TIMEOUT)
    odd = compare(transport, 5003)
    largest: dict[str, int] = {}
    for name, count in Recorder.calls:
        largest[name] = max(count, largest.get(name, 0))
    return odd, largest


@check
def staged() -> tuple[list[str], bool, str]:
    odd = compare(Staging(timeout=TIMEOUT))
    told = subprocess.run(["ompi_info", "--all", "--parsable"], capture_output=True, text=True)
    (line,) = (k for k in told.stdout.splitlines() if "mpi_built_with_cuda_support:value" in k)
    return odd, is_gpu_aware(), line.rpartition(":")[2]


@check
def four_megabytes_both_ways() -> bool:
    transport = MPITransport(timeout=TIMEOUT)
    rows = random_rows(SIZE, 1 << 20)  # far above the size up to which MPI sends ahead
    mine = rows[RANK].clone()
    transport.exchange(mine, topology("ring").mixing(SIZE, 0))
    StackedTransport(SIZE).exchange(rows, topology("ring").mixing(SIZE, 0))
    return torch.equal(mine, rows[RANK])


@check
def communicators() -> dict[str, Any]:
    half = WORLD.Split(RANK % 2, -RANK)  # ranks count backwards in it
    transport = MPITransport(half)
    row = torch.tensor([float(RANK)])
    members = transport.gather(row).flatten().tolist()
    empty = WORLD.Split(0 if RANK else MPI.UNDEFINED)
    between = half.Create_intercomm(0, WORLD, SIZE - 1 if RANK % 2 == 0 else SIZE - 2, 5)
    return {
        "members": members,
        "repr": repr(transport),
        "null": "nothing" if RANK else error_of(lambda: MPITransport(empty)),
        "inter": error_of(lambda: MPITransport(between)),
        "chunk_bytes": error_of(lambda: MPITransport(chunk_bytes=1 << 31)),
        "timeout": error_of(lambda: MPITransport(timeout=0)),
        "kind": error_of(lambda: MPITransport("world")),  # type: ignore[arg-type]
    }


@check
def handles() -> set[int]:
    """The communicators of transports that come and go; there are few thousand at a time."""
    return {MPITransport(timeout=TIMEOUT)._comm.py2f() for _ in range(100)}


# ---------------------------------------------------------------------------- training


@check
def trajectories() -> dict[str, Tensor]:
    return {name: parity.train_rank(RANK, name) for name in parity.METHODS}


@check
def two_optimizers() -> list[tuple[Tensor, Tensor]]:
    """Two models trained in turns, and each of them trained alone."""

    def build(seed: int) -> tuple[nn.Module, ConsensusOptimizer]:
        model = mlp(seed)
        return model, ConsensusOptimizer(sgd(model), methods[seed], timeout=TIMEOUT)

    methods = [gossip_sgd("ring"), local_sgd(2)]
    pairs = [build(0), build(1)]
    for step in range(6):
        for model, optimizer in pairs:
            train(model, optimizer, [step], RANK)
    alone = [build(0), build(1)]
    for model, optimizer in alone:
        train(model, optimizer, range(6), RANK)
    return [(flat(a), flat(b)) for (a, _), (b, _) in zip(pairs, alone, strict=True)]


@check
def bytes_sent() -> dict[str, int]:
    counts = {}
    for name, method in {"ring": gossip_sgd("ring"), "mean": local_sgd(1)}.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = mlp().to(dtype)
            optimizer = ConsensusOptimizer(sgd(model), method, timeout=TIMEOUT)
            optimizer.step()
            counts[f"{name} {str(dtype)[6:]}"] = optimizer.bytes_sent
    return {**counts, "elements": flat(mlp()).numel()}


@check
def other_model_on_rank_1() -> list[str]:
    def wrap(model: nn.Module) -> None:
        ConsensusOptimizer(sgd(model), local_sgd(1), timeout=TIMEOUT)

    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    more = [*layers, nn.Linear(2, 2)] if RANK == 1 else layers
    other_order = layers[::-1] if RANK == 1 else layers
    return [error_of(lambda m=m: wrap(nn.ModuleList(m))) for m in (more, other_order)]


@check
def unusual_strides() -> list[tuple[Tensor, Tensor, bool]]:
    def make(rank: int) -> list[nn.Parameter]:
        a, b, c, d = (random_rows(4, 48, seed=k)[rank] for k in range(4))
        return [
            nn.Parameter(a.view(1, 48, 1)),
            nn.Parameter(b.view(2, 3, 4, 2).to(memory_format=torch.channels_last)),
            nn.Parameter(c.view(6, 8).t()),
            nn.Parameter(d[::2]),
        ]

    mine = make(RANK)
    strides = [p.stride() for p in mine]
    inner = torch.optim.SGD(mine, lr=0.0)
    optimizer = ConsensusOptimizer(inner, gossip_sgd("ring"), broadcast=False, timeout=TIMEOUT)
    optimizer.step()
    results = []
    for k, parameter in enumerate(mine):
        rows = torch.stack([make(rank)[k].detach().reshape(-1) for rank in range(SIZE)])
        StackedTransport(SIZE).exchange(rows, topology("ring").mixing(SIZE, 0))
        kept = parameter.stride() == strides[k] or k == 3
        results.append((parameter.detach().reshape(-1), rows[RANK], kept))
    return results


@check
def world_in_another_thread() -> tuple[Tensor, Tensor, set[int]]:
    """Train while a thread of the user sums over COMM_WORLD; and train alone."""
    sums, stop = set[int](), 40

    def add() -> None:
        for _ in range(stop):
            sums.add(WORLD.allreduce(RANK))

    user = threading.Thread(target=add)
    user.start()
    busy = parity.train_rank(RANK, "ring_twice")
    user.join(TIMEOUT)
    return busy, parity.train_rank(RANK, "ring_twice"), sums


class Images(Dataset[Tensor]):
    """A data set that holds an optimizer, as user code sometimes does."""

    def __init__(self, optimizer: ConsensusOptimizer) -> None:
        self.optimizer, self.steps = optimizer, False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if self.steps:
            self.optimizer.step()
        return torch.ones(3)


@check
def forked_data_loader() -> tuple[str, Tensor, Tensor]:
    """A worker that steps, then workers that only load; then the ranks still average."""
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), local_sgd(1), timeout=TIMEOUT)
    images = Images(optimizer)
    images.steps = True
    loader = DataLoader(images, num_workers=1, multiprocessing_context="fork")
    error = error_of(lambda: list(loader))
    gc.collect()  # a loader that failed complains in a fork
    images.steps = False
    assert len(list(DataLoader(images, num_workers=2, multiprocessing_context="fork"))) == 4
    child = os.fork()
    if child == 0:
        del optimizer, images, loader  # frees nothing that the parent has
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(model, optimizer, [0], RANK)
    return error, flat(model), optimizer.transport.gather(flat(model))


# ---------------------------------------------------------------------------- the process


@check
def thread_level() -> dict[str, Any]:
    """The level, the threads that a transport starts, and its calls from another thread."""
    tasks = len(os.listdir("/proc/self/task"))
    transport = MPITransport(timeout=TIMEOUT)
    row = torch.full((8,), float(RANK))
    transport.exchange(row, topology("ring").mixing(SIZE, 0))
    transport.mean(row)
    tasks = len(os.listdir("/proc/self/task")) - tasks
    errors: list[str] = []
    for call in (lambda: transport.mean(torch.zeros(8)), lambda: MPITransport(timeout=TIMEOUT)):
        other = threading.Thread(target=lambda c=call: errors.append(error_of(c)))
        other.start()
        other.join(TIMEOUT)
    return {
        "level": MPI.Query_thread(),
        "threads started": tasks,
        "mean": row.tolist(),
        "errors": errors,
    }


@check
def found() -> dict[str, str]:
    """What transport=None means as torch.distributed comes and goes."""
    seen = {"mpirun": repr(find_transport(TIMEOUT))}
    init_process_group(timeout=TIMEOUT)
    seen["both"] = repr(find_transport(TIMEOUT))
    ring = torch.tensor([float(RANK)])
    dist.all_reduce(ring)
    seen["sum"] = str(ring.item())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen["alone in torch"] = error_of(lambda: find_transport(TIMEOUT))
    dist.destroy_process_group()
    return seen


@check
def wrong_address() -> str:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="9" if RANK else "0")
    if RANK == 0:
        return "nothing"
    return error_of(lambda: init_process_group(timeout=2.0))


@check
def hook() -> tuple[bool, bool]:
    """Whether a transport puts a hook in place, and whether it does so once."""
    before = sys.excepthook
    MPITransport()
    first = sys.excepthook
    MPITransport()
    return first is not before, sys.excepthook is first


# ---------------------------------------------------------------------------- uneven data


@check
def uneven_data() -> dict[str, Any]:
    """What each of these methods does where ranks have different numbers of batches."""
    batches = uneven.BATCHES["all at different steps"]
    return {
        **{name: uneven.train_uneven(RANK, name, batches, timeout=TIMEOUT) for name in UNEVEN},
        "stop": uneven.stop_with_the_first(RANK, 1, batches)["stopped"],
    }


# ---------------------------------------------------------------------------- jobs that fail


def rank_1_is_silent() -> None:
    """Rank 1 makes two transports and then nothing; the others find out in three calls."""
    others = WORLD.Split(int(RANK == 1))
    gossip, collective = MPITransport(timeout=1.0), MPITransport(timeout=1.0)
    if RANK == 1:
        report(RANK, {})
        time.sleep(3600)
    row, ring = torch.ones(8), topology("ring").mixing(SIZE, 0)
    calls: dict[str, Callable[[], Any]] = {
        "exchange": lambda: [gossip.exchange(row, ring) for _ in range(3)],
        "mean": lambda: collective.mean(row),
        "construction": lambda: MPITransport(timeout=1.0),
    }
    report(RANK, {name: peers_missing(call) for name, call in calls.items()})
    others.Barrier()
    raise KeyError("all have reported")


def peers_missing(call: Callable[[], Any]) -> tuple[tuple[int, ...], str]:
    try:
        call()
    except PeerError as error:
        return error.ranks, str(error)
    return (), "nothing"


def raise_on_rank_1() -> None:
    """An ordinary script whose rank 1 fails in its third step, beside a hook of the user."""

    def noted(*error: Any) -> None:
        print("the user's hook ran", file=sys.stderr)
        before(*error)

    before, sys.excepthook = sys.excepthook, noted
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), local_sgd(1), timeout=3600)
    for step in range(10):
        train(model, optimizer, [step], RANK)
        report(RANK, step)
        if step == 2 and RANK == 1:
            raise KeyError("on purpose")


def exit_on_rank_1() -> None:
    """Rank 1 ends the program in its third step, and says nothing."""
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), gossip_sgd("ring"), timeout=3)
    train(model, optimizer, range(2), RANK)
    if RANK == 1:
        report(RANK, {})
        sys.exit(1)
    report(RANK, {"step": peers_missing(lambda: train(model, optimizer, range(2, 6), RANK))})


def ranks_part() -> None:
    """Rank 1 skips a step, leaves its loop early, and has other parameters: what the others see."""
    seen: dict[str, Any] = {"skipped": uneven.skip_a_step(RANK, "local_sgd")[-1]}
    seen["mismatch"] = disagreement.add_a_group_alone(RANK)
    WORLD.Barrier()
    seen["left"] = uneven.leave_early(RANK, "ring")
    report(RANK, seen)
    WORLD.Barrier()
    raise KeyError("all have reported")


FAILURES = {
    "rank_1_is_silent": rank_1_is_silent,
    "raise_on_rank_1": raise_on_rank_1,
    "exit_on_rank_1": exit_on_rank_1,
    "ranks_part": ranks_part,
}


if __name__ == "__main__":
    if sys.argv[1] in FAILURES:
        FAILURES[sys.argv[1]]()
    else:
        main(sys.argv[1:])
