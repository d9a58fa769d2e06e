"""What a transport adds to its engine: a mean and a ring exchange against the bare primitives.

    python -m benchmarks.engines --ranks 4 --json runs/engines.json

Under each launcher, interleaved in one run: the mean of a flat buffer against the engine's own
all-reduce, and a ring exchange against what one would write by hand: start all messages, wait, add,
scale. Each figure is the median over the repetitions of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.launch import Worker, launch
from benchmarks.measuring import Action, among_ranks, medians
from consensus_opt.topology import Ring

KINDS = ("torchrun", "mpirun", "horovodrun-gloo", "horovodrun-mpi")
LIMITS = {"torchrun": 1.15, "mpirun": 1.15, "horovodrun-gloo": 1.25, "horovodrun-mpi": 1.25}


def torch_primitives(flat: Tensor, room: list[Tensor], left: int, right: int) -> list[Action]:
    """The bare all-reduce of torch.distributed, and its messages to two neighbours."""

    def ring() -> None:
        works = [dist.irecv(room[0], left), dist.irecv(room[1], right)]
        works += [dist.isend(flat, left), dist.isend(flat, right)]
        for work in works:
            work.wait()

    return [lambda: dist.all_reduce(flat), ring]


def mpi_primitives(flat: Tensor, room: list[Tensor], left: int, right: int) -> list[Action]:
    """The bare all-reduce of MPI, and its messages to two neighbours."""
    from mpi4py import MPI

    world, data = MPI.COMM_WORLD, flat.numpy()

    def ring() -> None:
        requests = [world.Irecv(room[0].numpy(), left), world.Irecv(room[1].numpy(), right)]
        requests += [world.Isend(data, left), world.Isend(data, right)]
        MPI.Request.Waitall(requests)

    return [lambda: world.Allreduce(MPI.IN_PLACE, data), ring]


def horovod_primitives(flat: Tensor, room: list[Tensor], left: int, right: int) -> list[Action]:
    """The bare all-reduce of Horovod, and its alltoall of the vector to two neighbours."""
    import horovod.torch as hvd

    splits = torch.zeros(hvd.size(), dtype=torch.int32)
    splits[left] = splits[right] = flat.numel()

    def ring() -> None:
        received, _ = hvd.alltoall(torch.cat([flat, flat]), splits, name="bare ring")
        for place, part in zip(room, torch.split(received, flat.numel()), strict=True):
            place.copy_(part)

    return [lambda: hvd.allreduce_(flat, name="bare mean", op=hvd.Sum), ring]


PRIMITIVES = {"torch": torch_primitives, "mpi": mpi_primitives, "horovod": horovod_primitives}


def measure(worker: Worker, values: int, repetitions: int) -> dict[str, float]:
    """Ratios of the transport's mean and ring exchange to the bare ones; a collective call."""
    flat, room = torch.ones(values), [torch.empty(values) for _ in range(2)]
    left, right = (worker.rank - 1) % worker.size, (worker.rank + 1) % worker.size
    bare_sum, bare_messages = PRIMITIVES[worker.engine](flat, room, left, right)
    mixing = Ring().mixing(worker.size)

    def bare_mean() -> None:
        bare_sum()
        flat.div_(worker.size)

    def bare_ring() -> None:
        bare_messages()
        flat.add_(room[0]).add_(room[1]).mul_(1 / 3)

    actions: dict[str, Action] = {
        "bare mean": bare_mean,
        "mean": lambda: worker.transport.mean(flat),
        "bare ring": bare_ring,
        "ring": lambda: worker.transport.exchange(flat, mixing),
    }
    middle = medians(worker.transport, actions, repetitions, warm_up=2)
    return {
        **{f"{name} ms": 1000 * seconds for name, seconds in middle.items()},
        "mean": middle["mean"] / middle["bare mean"],
        "ring": middle["ring"] / middle["bare ring"],
    }


def show(results: dict[str, dict[str, float]], ranks: int) -> None:
    """Print one row for each launcher."""
    table = Table(
        title=f"Ratio of a transport's time to its engine's bare primitive, {ranks} ranks"
    )
    table.add_column("launcher")
    for column in ("mean ms", "ratio", "ring ms", "ratio", "allowed"):
        table.add_column(column, justify="right")
    for kind, found in results.items():
        cells = [f"{found['mean ms']:.1f}", f"{found['mean']:.2f}"]
        cells += [f"{found['ring ms']:.1f}", f"{found['ring']:.2f}", f"{LIMITS[kind]:.2f}"]
        table.add_row(kind, *cells)
    Console().print(table)


def main() -> None:
    """Measure under each launcher; or be one of the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="at least 3, for two neighbours each")
    parser.add_argument("--values", type=int, default=8_000_000, help="length of the buffer")
    parser.add_argument("--repetitions", type=int, default=9, help="timings of each (at least 7)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        with launch(engine=options.engine) as worker:
            found = measure(worker, options.values, options.repetitions)
            if worker.first:
                options.rank_of.write_text(json.dumps(found))
        return
    results = {kind: _launch(kind, options) for kind in options.kinds}
    show(results, options.ranks)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _launch(kind: str, options: argparse.Namespace) -> dict[str, float]:
    engine = {"torchrun": "torch", "mpirun": "mpi"}.get(kind, "horovod")
    arguments = [f"--engine={engine}", f"--values={options.values}"]
    arguments += [f"--repetitions={options.repetitions}"]
    return among_ranks(kind, options.ranks, "benchmarks.engines", arguments, timeout=300)


if __name__ == "__main__":
    main()
