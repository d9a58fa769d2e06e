"""The same training under every launcher: how far the final parameters are apart.

    python -m benchmarks.parity --json runs/parity.json

Each launcher trains with each method from the same seeds on the same images, and so do stacked
workers in one process, to which all others are compared. Gossip adds the same terms in the same
order everywhere, and must give identical bits. Where all workers average, each engine sums in its
own order, and the parameters may differ by rounding: by 1e-6 of the largest of them. A controlled
run must make the same exchanges in each round, on all ranks and under all launchers. The exit
status is 1 where a method does worse.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import data, launchers
from benchmarks.parity_worker import METHODS, stacked

ROUNDING = 1e-6
REASONS = 1e-4
ENGINES = {
    "torchrun": "torch",
    "mpirun": "mpi",
    "horovodrun-gloo": "horovod",
    "horovodrun-mpi": "horovod",
    "deepspeed": "deepspeed",
}
"""The engine under each launcher."""


@dataclass(frozen=True)
class Difference:
    """Of one launcher's parameters from the stacked workers', with one method.

    Attributes:
        largest: the largest absolute difference of a parameter of any worker.
        relative: the same, over the largest absolute parameter.
        same_bits: whether there is no difference at all.
        allowed: whether it is as small as the method promises.
    """

    largest: float
    relative: float
    same_bits: bool
    allowed: bool


@dataclass(frozen=True, eq=False)
class Trained:
    """What n workers ended with.

    Attributes:
        parameters: of all workers, (n, P).
        decisions: step, exchanges, distance and target of each round, (n, rounds, 4).
    """

    parameters: Tensor
    decisions: Tensor


def run(kind: str, n: int, steps: int, timeout: float = 240.0) -> dict[str, Trained]:
    """Train under a launcher, with each method.

    Raises:
        LaunchError: the launcher failed, or was not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--engine", ENGINES[kind], "--steps", str(steps), "--out", folder]
        ended = launchers.run(kind, n, "benchmarks.parity_worker", arguments, timeout)
        if ended.status:
            raise launchers.LaunchError(
                f"{kind} ended with status {ended.status}:\n{ended.output[-6000:]}"
            )
        ranks = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(n)]
    return {
        name: Trained(*(torch.stack(each) for each in zip(*(r[name] for r in ranks), strict=True)))
        for name in METHODS
    }


def reference(n: int, steps: int) -> dict[str, Trained]:
    """The same of stacked workers, on one thread as the workers: the bits depend on it."""
    split, threads = data.load("digits"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ended = {name: stacked(block, split, n, steps) for name, block in METHODS.items()}
    finally:
        torch.set_num_threads(threads)
    return {name: Trained(rows, log.repeat(n, 1, 1)) for name, (rows, log) in ended.items()}


def compare(found: dict[str, Trained], expected: dict[str, Trained]) -> dict[str, Difference]:
    """How far two trainings are apart, by method."""
    return {name: _difference(name, found[name], expected[name]) for name in expected}


def _difference(name: str, found: Trained, expected: Trained) -> Difference:
    largest = (found.parameters - expected.parameters).abs().max().item()
    relative = largest / expected.parameters.abs().max().item()
    same_bits = torch.equal(found.parameters, expected.parameters)
    if METHODS[name]["method"] in ("gossip_sgd", "consensus_control"):
        allowed = same_bits and decided_alike(found, expected)
    else:
        allowed = relative <= ROUNDING
    return Difference(largest, relative, same_bits, allowed)


def decided_alike(found: Trained, expected: Trained) -> bool:
    """Whether all ranks made the same exchanges, for the same reasons but for rounding.

    The sums behind a distance and a target are taken in fp32, and by each engine in its own order.
    """
    together, others = found.decisions, expected.decisions
    if together.shape != others.shape or not torch.equal(together[..., :2], others[..., :2]):
        return False
    return torch.allclose(together, others, rtol=REASONS, atol=1e-9, equal_nan=True)


def show(differences: dict[str, dict[str, Difference]], n: int, steps: int) -> None:
    """Print a table: a line for each launcher, a column for each method."""
    table = Table(
        title=f"Largest difference of a parameter from {n} stacked workers after {steps} steps",
        caption=f"gossip: the same bits, and control the same exchanges; others: at most "
        f"{ROUNDING:g} of the largest parameter",
    )
    table.add_column("launcher")
    for name in METHODS:
        table.add_column(name, justify="right")
    for kind, row in differences.items():
        table.add_row(kind, *(_cell(row[name]) for name in METHODS))
    Console().print(table)


def _cell(difference: Difference) -> str:
    text = "same bits" if difference.same_bits else f"{difference.largest:.1e}"
    return text if difference.allowed else f"[bold red]{text}[/]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all launchers, one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--launchers", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--workers", type=int, default=4, help="number of workers")
    parser.add_argument("--steps", type=int, default=24, help="steps of each training")
    parser.add_argument("--json", type=Path, help="where to write the differences")
    options = parser.parse_args(arguments)
    expected = reference(options.workers, options.steps)
    differences = {}
    for kind in options.launchers:
        with Console().status(kind):
            found = run(kind, options.workers, options.steps)
        differences[kind] = compare(found, expected)
    show(differences, options.workers, options.steps)
    if options.json:
        content = {
            kind: {name: asdict(each) for name, each in row.items()}
            for kind, row in differences.items()
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(not all(each.allowed for row in differences.values() for each in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
