"""What a round costs, as a ratio to a bare all-reduce of one flat buffer of the same size.

    python -m benchmarks.rounds --ranks 2 4 --json runs/rounds.json

All contenders run interleaved, in the same processes, on ResNet-50's parameter shapes; each figure
is the median over the repetitions of the slowest rank's time. Beside time stand the bytes that were
sent, with the formula that they must equal, and the memory that a first round took on top of the
model's own. With ``--bandwidth 1Gbit``, as root, each rank is in a network namespace of its own and
behind a link of that speed (see :mod:`benchmarks.network`), as if it were a machine; otherwise all
of them share this one's loopback.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks import network
from benchmarks.measuring import among_ranks, medians
from consensus_opt import ConsensusOptimizer, Method, dppf, gossip_sgd, local_sgd, units
from consensus_opt.integrations.torch_distributed import TorchTransport

METHODS: dict[str, Method] = {
    "hard averaging": local_sgd(1),
    "one-peer gossip": gossip_sgd("one_peer_exponential"),
    "ring gossip": gossip_sgd("ring"),
    "DPPF": dppf(period=1),
}


@dataclass
class Contender:
    """Something to time, and the bytes of one round by formula; None where it is not ours."""

    run: Callable[[], Any]
    optimizer: ConsensusOptimizer | None = None
    formula: int | None = None


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of the 161 parameters of torchvision's ResNet-50: 25,557,032 values."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    wide = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, wide, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(4 * width, wide, 1, 1), (4 * width,), (4 * width,)]
            wide = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def make_parameters() -> list[nn.Parameter]:
    """One model's worth of parameters, with memory that has been touched."""
    return [nn.Parameter(torch.randn(shape)) for shape in resnet50_shapes()]


def formula(name: str, size: int, values: int) -> int:
    """Return the payload bytes that a rank sends in a round."""
    model = 4 * values
    neighbours = {"one-peer gossip": 1, "ring gossip": min(2, size - 1)}
    return neighbours[name] * model if name in neighbours else 2 * (size - 1) * model // size


def contenders(values: int) -> dict[str, Contender]:
    """Return everything that is compared, by name, the bare all-reduce first."""
    size = dist.get_world_size()
    flat = torch.randn(values)
    averager = PeriodicModelAverager(period=1)
    theirs = make_parameters()
    for parameter in theirs:  # it averages parameters that have a gradient
        parameter.grad = torch.zeros(1).expand_as(parameter)
    found = {
        "bare all-reduce": Contender(lambda: dist.all_reduce(flat)),
        "torch PeriodicModelAverager": Contender(lambda: averager.average_parameters(theirs)),
    }
    for name, method in METHODS.items():
        # Without gradients the inner step does nothing, so that the round is all there is.
        optimizer = ConsensusOptimizer(torch.optim.SGD(make_parameters(), lr=0.1), method)
        found[name] = Contender(optimizer.step, optimizer, formula(name, size, values))
    return found


def peak_growth(run: Callable[[], Any]) -> int:
    """Return by how many bytes the peak of this process's memory rises above what it has now."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def measure(repetitions: int) -> dict[str, Any]:
    """Time all contenders, interleaved; a collective call."""
    values = sum(torch.Size(shape).numel() for shape in resnet50_shapes())
    everyone = contenders(values)
    memory: dict[str, int] = {}
    for name, contender in everyone.items():
        optimizer = contender.optimizer
        # Lays the model out flat, and makes no round.
        (optimizer.consensus_distance if optimizer else contender.run)()
        dist.barrier()
        memory[name] = peak_growth(contender.run)
    actions = {name: contender.run for name, contender in everyone.items()}
    seconds = medians(TorchTransport(), actions, repetitions)
    return {
        name: {
            "seconds": seconds[name],
            "ratio": seconds[name] / seconds["bare all-reduce"],
            "bytes": _bytes_of_round(contender),
            "formula": contender.formula,
            "memory": memory[name] / (4 * values),
        }
        for name, contender in everyone.items()
    }


def _bytes_of_round(contender: Contender) -> int | None:
    optimizer = contender.optimizer
    return None if optimizer is None else optimizer.bytes_sent // optimizer.rounds


def run(ranks: int, repetitions: int, bandwidth: float | None) -> dict[str, Any]:
    """Start the ranks and return what they measured."""
    arguments = [f"--repetitions={repetitions}"]
    if bandwidth is None:
        return among_ranks("torchrun", ranks, "benchmarks.rounds", arguments)
    with network.cluster(ranks, bandwidth) as workers:
        return network.measure_in(workers, "benchmarks.rounds", arguments)


def show(results: dict[str, dict[str, Any]], bandwidth: float | None) -> None:
    """Print one table for each number of ranks."""
    links = "loopback" if bandwidth is None else f"links of {units.scaled(8 * bandwidth, 'bit/s')}"
    for ranks, rows in results.items():
        title = f"A round of ResNet-50's 25.6 M parameters, {ranks} ranks, gloo, {links}"
        table = Table(title=title)
        table.add_column("round")
        for column in ("ms", "ratio", "MB sent", "MB by formula", "extra memory, models"):
            table.add_column(column, justify="right")
        for name, row in rows.items():
            sent = ["-" if row[k] is None else f"{row[k] / 1e6:.1f}" for k in ("bytes", "formula")]
            numbers = [f"{1000 * row['seconds']:.0f}", f"{row['ratio']:.2f}", *sent]
            table.add_row(name, *numbers, f"{row['memory']:.2f}")
        Console().print(table)


def main() -> None:
    """Start the ranks and show what they measured; or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--repetitions", type=int, default=9, help="timings of each (at least 7)")
    parser.add_argument("--bandwidth", type=units.bandwidth, help="of links between namespaces")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        dist.init_process_group("gloo")
        results = measure(options.repetitions)
        if dist.get_rank() == 0:
            options.rank_of.write_text(json.dumps(results))
        dist.destroy_process_group()
        return
    reason = network.obstacle() if options.bandwidth else None
    if reason:
        parser.error(f"--bandwidth: {reason}")
    everything = {
        str(ranks): run(ranks, options.repetitions, options.bandwidth) for ranks in options.ranks
    }
    show(everything, options.bandwidth)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
