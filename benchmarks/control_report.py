"""Runs of `benchmarks.control` as tables, one a task, and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from benchmarks.report import COLOURS

Run = Mapping[str, Any]
Task = tuple[str, int]
CURVES = ("ring", "4 accelerated", "Xi_max/4, first half", "0.25 phi")
"""Runs whose distance is drawn."""
GROUPS: dict[str, Callable[[str], bool]] = {
    "ring, fixed number": lambda name: name == "ring" or name.endswith("exchanges"),
    "ring, accelerated": lambda name: name.endswith("accelerated"),
    "accelerated, first half only": lambda name: "accelerated, first half" in name,
    "target: fraction of Xi_max": lambda name: name.startswith("Xi_max"),
    "target: ρ φ": lambda name: "phi" in name,
}
COLUMNS = ("exchanges", "1st half", "/ oracle", "held", "exactly", "accuracy", "closed", "seeds")


def by_name(runs: Sequence[Run], task: Task) -> dict[str, list[Run]]:
    """Return the runs of a task by the name of their rule, in the order of their first seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if (run["data"], run["workers"]) == task:
            found.setdefault(run["name"], []).append(run)
    return found


def gap_closed(name: str, found: Mapping[str, Sequence[Run]]) -> float | None:
    """Return ``(a - a_ring) / (a_sync - a_ring)`` of mean accuracies, over the seeds in common."""
    if not {"sync", "ring"} <= found.keys():
        return None
    seeds = [{run["seed"]: run["accuracy"] for run in found[k]} for k in (name, "ring", "sync")]
    common = seeds[0].keys() & seeds[1].keys() & seeds[2].keys()
    if not common:
        return None
    own, ring, sync = (fmean(each[seed] for seed in common) for each in seeds)
    return (own - ring) / (sync - ring) if sync != ring else None


def table(runs: Sequence[Run], task: Task) -> Table:
    """One row for each rule: means over the seeds, with the deviation of the accuracy."""
    found = by_name(runs, task)
    first = next(iter(found.values()))[0]
    view = Table(
        title=f"{first['data']}, {first['workers']} workers x {first['batch']}, "
        f"learning rate {first['lr']:g}, {first['steps']} steps, cnn of {first['parameters']:,}",
        caption="exchanges a step; held: share of the controlled rounds at or below a target that "
        "can be reached, by the control's own measurement and exactly; closed: share of the gap "
        "between ring and sync",
    )
    for heading in ("rule", *COLUMNS):
        view.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=True)
    for name, each in found.items():
        view.add_row(name, *_row(name, each, found))
    return view


def _row(name: str, runs: Sequence[Run], found: Mapping[str, Sequence[Run]]) -> list[str]:
    accuracies = [100 * run["accuracy"] for run in runs]
    deviation = f" ± {stdev(accuracies):.2f}" if len(runs) > 1 else ""
    closed = gap_closed(name, found)
    sync = name == "sync"
    return [
        "all-reduce" if sync else f"{_mean(runs, 'exchanges'):.2f}",
        "" if sync else f"{_mean(runs, 'exchanges_first_half'):.2f}",
        _cell(_mean(runs, "of_oracle"), "{:.2f}"),
        _cell(_mean(runs, "held"), "{:.1%}"),
        _cell(_mean(runs, "held_exactly"), "{:.1%}"),
        f"{fmean(accuracies):.2f}{deviation}",
        "" if closed is None or sync or name == "ring" else f"{closed:.0%}",
        str(len(runs)),
    ]


def _mean(runs: Sequence[Run], key: str) -> float | None:
    values = [run[key] for run in runs if run.get(key) is not None]
    return fmean(values) if values else None


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def draw(runs: Sequence[Run], path: Path) -> Path | None:
    """Draw accuracy over exchanges, and the distance in training, one row of panels a task."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no figure: `pip install consensus-opt[report]` brings matplotlib")
        return None
    tasks = list(dict.fromkeys((run["data"], run["workers"]) for run in runs))
    figure = Figure(figsize=(11, 3.8 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), task in zip(panels, tasks, strict=True):
        found = by_name(runs, task)
        _accuracies(left, found)
        _distances(right, found)
        left.set_title(f"{task[0]}, {task[1]} workers: test accuracy", fontsize=10, loc="left")
        right.set_title("consensus distance (dotted: its target)", fontsize=10, loc="left")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _accuracies(axes: Any, found: Mapping[str, Sequence[Run]]) -> None:
    for (label, belongs), colour in zip(GROUPS.items(), COLOURS, strict=False):
        rows = [runs for name, runs in found.items() if belongs(name)]
        points = sorted(
            (_mean(runs, "exchanges") or 0.0, 100 * (_mean(runs, "accuracy") or 0.0))
            for runs in rows
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label, linewidth=0.8)
    if "sync" in found:
        level = 100 * (_mean(found["sync"], "accuracy") or 0.0)
        axes.axhline(level, color="black", linestyle="--", linewidth=1, label="sync")
    axes.set(xlabel="exchanges a step, mean over training", ylabel="%", xscale="log")
    axes.set_xticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])


def _distances(axes: Any, found: Mapping[str, Sequence[Run]]) -> None:
    for name, colour in zip(CURVES, COLOURS, strict=False):
        if name not in found:
            continue
        steps, distances, targets, _ = zip(*found[name][0]["curve"], strict=True)
        axes.plot(steps, distances, color=colour, label=name, linewidth=1.4)
        limits = [float("nan") if target is None else target for target in targets]
        axes.plot(steps, limits, color=colour, linestyle=":", linewidth=1.2)
    axes.set(xlabel="step", ylabel="distance from the mean model", yscale="log")
