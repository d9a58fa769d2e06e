"""Results for people: a few lines of text, and a figure of loss, distance and accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Epochs = Sequence[Mapping[str, Any]]
LABELS = {
    "train_loss": ("Training loss (mean over the workers)", "cross-entropy"),
    "consensus_distance": ("Consensus distance (end of the epoch)", "distance from the mean model"),
    "test_accuracy": ("Test accuracy (line: mean model, band: workers)", "%"),
}
COLOURS = ("#4c4c4c", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def summary(result: Mapping[str, Any]) -> str:
    """Task, accuracies, traffic and time of one run in four lines."""
    sent, reference = result["bytes_per_worker"], result["sync_bytes_per_worker"]
    share = result["share_of_sync_bytes"]
    compared = "" if share is None else f", {share:.1%} of the {reference / 1e6:.1f} MB of sync"
    own = " / ".join(f"{result[f'worker_accuracy_{name}']:.1%}" for name in ("min", "mean", "max"))
    options, workers = result["options"], result["workers"]
    lines = (
        f"{result['method']} on {workers} worker{'s' * (workers > 1)} ({result['engine']}): "
        f"{options['model']} with {result['parameters']:,} parameters on {options['data']}, "
        f"{result['step']} steps" + (", DIVERGED" if result["diverged"] else ""),
        f"test accuracy   mean model {result['test_accuracy']:.1%}, workers {own} (min/mean/max)",
        f"communication   {result['rounds']} rounds, {sent / 1e6:.1f} MB sent a worker{compared}",
        f"time            {result['train_seconds']:.1f} s in the training loop, "
        f"{result['seconds']:.1f} s in all",
    )
    return "\n".join(lines)


def draw(runs: Mapping[str, Epochs], path: Path) -> Path | None:
    """Draw one or several runs over their epochs; returns None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no figure: `pip install consensus-opt[report]` brings matplotlib")
        return None
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    panels = dict(zip(LABELS, figure.subplots(1, 3), strict=True))
    for (name, epochs), colour in zip(runs.items(), COLOURS, strict=False):
        _add_run(panels, name, epochs, colour)
    for key, axes in panels.items():
        title, unit = LABELS[key]
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xlabel="epoch", ylabel=unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    panels["train_loss"].set_yscale("log")
    panels["test_accuracy"].set_ylim(_lowest_accuracy(runs) - 1, 100.5)
    handles, names = panels["train_loss"].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=10
    )
    figure.savefig(path, dpi=150)
    return path


def _add_run(panels: Mapping[str, Any], name: str, epochs: Epochs, colour: str) -> None:
    """Draw sync dashed and above the others, which it would hide or be hidden by."""
    style = {"linestyle": "--", "zorder": 3} if name == "sync" else {}
    x = [epoch["epoch"] for epoch in epochs]
    for key, axes in panels.items():
        scale = 100 if key == "test_accuracy" else 1
        y = [math.nan if epoch[key] is None else scale * epoch[key] for epoch in epochs]
        axes.plot(x, y, color=colour, label=name, linewidth=1.5, **style)
    workers = [[100 * accuracy for accuracy in epoch["worker_accuracy"]] for epoch in epochs]
    low, high = [min(each) for each in workers], [max(each) for each in workers]
    panels["test_accuracy"].fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _lowest_accuracy(runs: Mapping[str, Epochs]) -> float:
    """The lowest accuracy in %, of a mean model or a worker, after the first quarter of training.

    Below it there is only the start, which would flatten what there is to compare.
    """
    later = [epoch for epochs in runs.values() for epoch in epochs[len(epochs) // 4 :]]
    lowest: float = min(min(epoch["test_accuracy"], *epoch["worker_accuracy"]) for epoch in later)
    return 100 * lowest
