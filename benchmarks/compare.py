"""Train the same model by several methods and put the outcomes into one table and one figure.

All runs have the same data, model, batches, learning rates and number of steps; they differ in what
the workers exchange. Nothing is tuned for one of them.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record, report
from benchmarks.data import DATA_SETS
from benchmarks.models import MODELS
from benchmarks.options import METHODS, natural, positive_int
from benchmarks.processes import torchrun

Results = dict[str, list[dict[str, Any]]]
COLUMNS = ("mean model", "workers", "rounds", "MB", "of sync", "seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all methods and show the outcomes; the exit status is 0 only if every run succeeded."""
    options, passed_on = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    try:
        for method in options.methods:
            for seed in options.seeds:
                console.rule(f"{method}, seed {seed}", align="left", style="dim")
                run(options, passed_on, method, seed)
    except subprocess.CalledProcessError as error:
        console.print(f"{method} failed with status {error.returncode}; its workers said why above")
        return 1
    except subprocess.TimeoutExpired:
        console.print(
            f"{method} took longer than {options.timeout} s and was stopped; "
            f"allow more with --timeout, or ask for less with --epochs"
        )
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: all workers were stopped")
        return 130
    show(console, options)
    return 0


def run(options: argparse.Namespace, passed_on: list[str], method: str, seed: int) -> None:
    """Train once, in processes of its own."""
    shared = [f"--{name}={getattr(options, name)}" for name in ("epochs", "data", "model")]
    own = [f"--method={method}", f"--seed={seed}", f"--out={folder(options, method, seed)}"]
    torchrun([*shared, *passed_on, *own], options.workers, options.timeout)


def folder(options: argparse.Namespace, method: str, seed: int) -> Path:
    """Where the files of one run are."""
    return Path(options.out) / method / f"seed{seed}"


def show(console: Console, options: argparse.Namespace) -> None:
    """Print the table, draw the figure (of the first seed) and say where it is."""
    results = {
        method: [record.read_result(folder(options, method, seed)) for seed in options.seeds]
        for method in options.methods
    }
    console.print()
    console.print(table(results))
    figure = report.draw(
        {
            method: record.read_metrics(folder(options, method, options.seeds[0]))
            for method in options.methods
        },
        Path(options.out) / record.REPORT,
    )
    if figure:
        console.print(f"figure: {figure}")


def table(results: Results) -> Table:
    """One row for each method; with several seeds, means and standard deviations over them."""
    first = next(iter(results.values()))[0]
    view = Table(
        title=f"{first['options']['data']}, {first['options']['model']} with "
        f"{first['parameters']:,} parameters, {first['workers']} workers, {first['step']} steps",
        caption=f"{first['test_images']:,} test images; MB sent by each worker; "
        "seconds in the training loop",
    )
    for heading in ("method", *COLUMNS):
        view.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for method, runs in results.items():
        view.add_row(method, *row(runs))
    return view


def row(runs: list[dict[str, Any]]) -> list[str]:
    """The cells of one method."""
    lowest = min(run["worker_accuracy_min"] for run in runs)
    highest = max(run["worker_accuracy_max"] for run in runs)
    shares = [run["share_of_sync_bytes"] for run in runs]
    return [
        spread([100 * run["test_accuracy"] for run in runs], ".1f") + " %",
        f"{100 * lowest:.1f} - {100 * highest:.1f} %",
        spread([run["rounds"] for run in runs], ".0f"),
        spread([run["bytes_per_worker"] / 1e6 for run in runs], ".1f"),
        "-" if None in shares else f"{mean(shares):.1%}",
        spread([run["train_seconds"] for run in runs], ".1f"),
    ]


def spread(values: list[float], form: str) -> str:
    """The mean, with the standard deviation where the values differ."""
    if len(set(values)) == 1:
        return format(values[0], form)
    return f"{mean(values):{form}} ± {stdev(values):{form}}"


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options of the comparison, and those that go to each `benchmarks.train` as they are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Train one model by several methods and compare the outcomes.",
        epilog="Other options, such as --period 8, go to every run of benchmarks.train.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS[:4]), help="what to compare")
    add("--workers", type=positive_int, default=4, help="processes of each run")
    add("--seeds", type=natural, nargs="+", default=[0], help="one run of each method for each")
    add("--epochs", type=positive_int, default=40, help="passes over the data")
    add("--data", choices=DATA_SETS, default="digits", help="data set")
    add("--model", choices=MODELS, default="cnn", help="model")
    add("--out", default="runs/compare", help="folder of the results")
    add("--timeout", type=positive_int, default=600, help="seconds allowed for one run")
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
