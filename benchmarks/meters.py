"""How good the sketched consensus distance is, and what it costs.

    python -m benchmarks.meters --json runs/meters.json

Accuracy: for numbers of workers, sizes of the sketch (the last one looks at an eighth of the
parameters) and structures of the differences, the error over many measurements (root mean square,
and the largest) beside the standard error that the sketch itself reports, all relative to the exact
distance in fp64. Cost: a measurement beside a ring exchange of ResNet-50's parameters, interleaved
in the same processes; each figure is the median over the repetitions of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measuring import among_ranks, medians
from benchmarks.rounds import resnet50_shapes
from consensus_opt import Sketch, StackedTransport
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.topology import topology

SKETCHES = (Sketch(128), Sketch(512), Sketch(2048), Sketch(512, fraction=1 / 8))


def spread(n: int, width: int, generator: torch.Generator) -> Tensor:
    """Differences of one size in all directions."""
    return torch.randn(n, width, generator=generator)


def two_directions(n: int, width: int, generator: torch.Generator) -> Tensor:
    """All workers in one plane."""
    plane = torch.randn(2, width, generator=generator)
    return torch.randn(n, 2, generator=generator) @ plane


def constant(n: int, width: int, generator: torch.Generator) -> Tensor:
    """All parameters off by the same."""
    return torch.randn(n, 1, generator=generator).expand(n, width).clone()


def sine(n: int, width: int, generator: torch.Generator) -> Tensor:
    """One smooth direction."""
    return torch.randn(n, 1, generator=generator) * torch.sin(0.001 * torch.arange(width))


def one_layer(n: int, width: int, generator: torch.Generator) -> Tensor:
    """Differences in one part in a hundred, which lies together."""
    rows = torch.zeros(n, width)
    rows[:, width // 2 : width // 2 + width // 100] = 1.0
    return rows * torch.randn(n, width, generator=generator)


def sparse(n: int, width: int, generator: torch.Generator) -> Tensor:
    """A hundred parameters that differ."""
    rows = torch.zeros(n, width)
    places = torch.randperm(width, generator=generator)[:100]
    rows[:, places] = torch.randn(n, 100, generator=generator)
    return rows


STRUCTURES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "spread": spread,
    "two directions": two_directions,
    "constant": constant,
    "sine": sine,
    "one layer": one_layer,
    "sparse": sparse,
}


def accuracy(workers: list[int], width: int, seeds: int) -> list[dict[str, Any]]:
    """Return one row for each number of workers, structure and size."""
    rows = []
    for n in workers:
        for name, structure in STRUCTURES.items():
            vectors = structure(n, width, torch.Generator().manual_seed(n))
            truth = exact(vectors)
            for sketch in SKETCHES:
                found = [
                    sketch.measure([vectors], StackedTransport(n), turn) for turn in range(seeds)
                ]
                errors = [abs(distance.value / truth - 1) for distance in found]
                rows.append(
                    {
                        "workers": n,
                        "structure": name,
                        "values": sketch.values,
                        "fraction": sketch.fraction,
                        "error": math.sqrt(statistics.fmean(e**2 for e in errors)),
                        "largest": max(errors),
                        "own": math.sqrt(statistics.fmean(d.error**2 for d in found)),
                        "covered": statistics.fmean(d.upper >= truth for d in found),
                    }
                )
    return rows


def exact(vectors: Tensor) -> float:
    """Return Xi by its definition, in fp64, row by row."""
    mean = vectors.mean(0, dtype=torch.float64)
    return math.sqrt(statistics.fmean(float((row - mean).square().sum()) for row in vectors))


def cost(repetitions: int) -> dict[str, Any]:
    """Time measurements beside exchanges; a collective call over real ranks."""
    transport = TorchTransport(timeout=120.0)
    values = sum(torch.Size(shape).numel() for shape in resnet50_shapes())
    flat = torch.randn(values)
    mixing = topology("ring").mixing(transport.size)
    exchange = partial(transport.exchange, flat, mixing)
    runs: dict[str, Callable[[], Any]] = {"ring exchange": exchange}
    for sketch in SKETCHES:
        runs[f"sketch of {_name(sketch.values, sketch.fraction)}"] = partial(
            sketch.measure, [flat], transport
        )
    sent = {name: _bytes_of(run, transport) for name, run in runs.items()}  # and warms up
    seconds = medians(transport, runs, repetitions)
    return {
        name: {
            "seconds": seconds[name],
            "ratio": seconds[name] / seconds["ring exchange"],
            "bytes": sent[name],
        }
        for name in runs
    }


def _name(values: int, fraction: float) -> str:
    return f"{values}" if fraction == 1 else f"{values}, 1/{round(1 / fraction)}"


def _bytes_of(run: Callable[[], Any], transport: TorchTransport) -> int:
    before = transport.bytes_sent
    run()
    return transport.bytes_sent - before


def show(results: dict[str, Any]) -> None:
    """Print a table of accuracy, and one of cost for each number of ranks."""
    table = Table(title=f"Error of the sketched distance, {results['width']:,} values a worker")
    for column in ("workers", "differences", "sketch", "error", "its own", "largest", "covered"):
        left = column == "differences"
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    for row in results["accuracy"]:
        percents = [f"{100 * row[key]:.2f}%" for key in ("error", "own", "largest")]
        covered = f"{100 * row['covered']:.0f}%"
        name = _name(row["values"], row["fraction"])
        table.add_row(str(row["workers"]), row["structure"], name, *percents, covered)
    Console().print(table)
    for ranks, rows in results["cost"].items():
        table = Table(title=f"Time beside ResNet-50's 25.6 M parameters, {ranks} ranks, gloo")
        table.add_column("what")
        for column in ("ms", "of an exchange", "KB sent"):
            table.add_column(column, justify="right")
        for name, row in rows.items():
            share, sent = f"{100 * row['ratio']:.1f}%", f"{row['bytes'] / 1e3:.1f}"
            table.add_row(name, f"{1000 * row['seconds']:.1f}", share, sent)
        Console().print(table)


def main() -> None:
    """Measure accuracy here and cost between ranks; or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64], help="for accuracy")
    parser.add_argument("--width", type=int, default=1_000_000, help="values of a worker")
    parser.add_argument("--seeds", type=int, default=20, help="sketches of each")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="for cost")
    parser.add_argument("--repetitions", type=int, default=9, help="timings of each (at least 7)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        dist.init_process_group("gloo")
        measured = cost(options.repetitions)
        if dist.get_rank() == 0:
            options.rank_of.write_text(json.dumps(measured))
        dist.destroy_process_group()
        return
    arguments = [f"--repetitions={options.repetitions}"]
    results = {
        "width": options.width,
        "seeds": options.seeds,
        "accuracy": accuracy(options.workers, options.width, options.seeds),
        "cost": {
            str(ranks): among_ranks("torchrun", ranks, "benchmarks.meters", arguments)
            for ranks in options.ranks
        },
    }
    show(results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
