"""Does a bounded consensus distance bring the accuracy back that a ring loses?

    python -m benchmarks.control --json benchmarks/results/control.json --seeds 0 1 2

Simulated workers train one model by sync SGD, over a ring with a fixed number of exchanges, and
over a ring whose exchanges are controlled. Runs that the JSON file already holds are not repeated,
so that an interrupted or extended measurement goes on where it was; `--kept` shows all that it
holds. The figure lies beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.control_report import draw, table
from benchmarks.control_runs import (
    RULES,
    SETTINGS,
    Phases,
    Setting,
    needs_reference,
    phases_of,
    setting_of,
    train,
)
from benchmarks.data import DATA_SETS
from benchmarks.options import natural, positive, positive_int

Key = tuple[Setting, str, int]
Done = dict[Key, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing, then show all that was asked for."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    done = read(options.json)
    asked = list(done) if options.kept else wanted(options)
    for ready in waves(asked):
        missing = [key for key in ready if key not in done]
        for number, result in enumerate(run(missing, done, options.jobs), start=1):
            done[key_of(result)] = result
            write(options.json, done)
            console.print(f"{number}/{len(missing)} {line(result)}", highlight=False)
    shown = [done[key] for key in asked]
    for task in dict.fromkeys((run["data"], run["workers"]) for run in shown):
        console.print(table(shown, task))
    if figure := draw(shown, options.json.with_suffix(".png")):
        console.print(f"figure: {figure}")
    return 0


def wanted(options: argparse.Namespace) -> list[Key]:
    """Return what the command line asks for."""
    settings = [
        setting_of(data, workers, options.epochs, options.lr)
        for data in options.data
        for workers in options.workers
    ]
    return [(s, name, seed) for s in settings for name in options.runs for seed in options.seeds]


def waves(asked: Sequence[Key]) -> Iterator[list[Key]]:
    """Yield runs in two waves: first those of the uncontrolled ring that others refer to."""
    rings = [(s, "ring", seed) for s, name, seed in asked if needs_reference(name)]
    first = list(dict.fromkeys(rings))
    yield first
    yield [key for key in asked if key not in first]


def run(missing: Sequence[Key], done: Done, jobs: int) -> Iterator[dict[str, Any]]:
    """Make runs, several at a time, and yield each result when it is there."""
    calls = [(*key, reference(key, done)) for key in missing]
    if jobs == 1:
        yield from (train(*call) for call in calls)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(train, *call) for call in calls]):
            yield future.result()


def reference(key: Key, done: Done) -> Phases:
    """Return Xi_max of the phases of the uncontrolled ring, where the rule needs it."""
    setting, name, seed = key
    return phases_of(done[setting, "ring", seed]) if needs_reference(name) else ()


def read(path: Path) -> Done:
    """Return the runs that a file holds; none where there is no file."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return {key_of(run): run for run in runs}


def write(path: Path, done: Done) -> None:
    """Write all runs, one a line, in place of what the file held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in done.values())
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{"runs": [\n{lines}\n]}}\n')
    partial.replace(path)


def key_of(run: dict[str, Any]) -> Key:
    """Return what identifies a run."""
    setting = Setting(**{field: run[field] for field in Setting.__dataclass_fields__})
    return setting, run["name"], run["seed"]


def line(run: dict[str, Any]) -> str:
    """Return one run in a line."""
    return (
        f"{run['data']} {run['workers']} workers, {run['name']}, seed {run['seed']}: "
        f"{run['accuracy']:.2%}, {run['exchanges']:.2f} exchanges a step, {run['seconds']:.0f} s"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options; a wrong one ends the program with what is allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control",
        description="Accuracy and exchanges of controlled and uncontrolled rings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, default=Path("runs/control.json"), help="file of the results")
    add("--data", nargs="+", choices=DATA_SETS, default=["fashion_mnist"], help="data sets")
    sizes = sorted({workers for _, workers in SETTINGS})
    add("--workers", type=int, nargs="+", choices=sizes, default=sizes, help="simulated workers")
    add("--seeds", type=natural, nargs="+", default=[0, 1, 2], help="one run of each for each")
    add("--runs", nargs="+", choices=list(RULES), default=list(RULES), metavar="NAME", help="rules")
    add("--epochs", type=positive_int, help="passes over the data, if not those of the task")
    add("--lr", type=positive, help="highest learning rate, if not that of the task")
    add("--kept", action="store_true", help="show all that the file holds, and make no run")
    add("--jobs", type=positive_int, default=1, help="runs at a time, each on one core")
    options = parser.parse_args(arguments)
    if options.kept and not read(options.json):
        parser.error(
            f"--kept shows the runs that a file holds, and {options.json} holds none; leave --kept "
            "out to make runs, or write --json benchmarks/results/control.json"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
