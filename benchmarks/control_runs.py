"""Training n simulated workers on one task, each time with another rule for their exchanges.

Everything but the rule is the same in all runs of a seed: the start, the batches, the learning
rates. The rules are written as a user would write them.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import models
from benchmarks.data import Split, load
from benchmarks.evaluate import score
from benchmarks.oracle import Oracle, WatchedGossip
from benchmarks.train import lr_factor
from consensus_opt.averaging import Gossip
from consensus_opt.control import KeepBelow
from consensus_opt.distance import Sketch
from consensus_opt.methods import Method, consensus_control, gossip_sgd, local_sgd
from consensus_opt.simulation import Simulation
from consensus_opt.targets import GradientNorm, OfReference, Recorder
from consensus_opt.telemetry import RoundRecord, Sink

EVERY = 8
"""Steps between two exact measurements, which are points of the curves."""
Phases = tuple[tuple[float, float, float], ...]
Rule = Callable[[Phases], Method]

control = partial(consensus_control, "ring")
FIRST_HALF, ALWAYS = (0.0, 0.5), (0.0, 1.0)


@dataclass(frozen=True)
class Setting:
    """A task; the batch is that of one worker, the learning rate the highest."""

    data: str
    workers: int
    batch: int
    lr: float
    epochs: int


SETTINGS = {
    ("fashion_mnist", 32): Setting("fashion_mnist", 32, 8, 0.2, 12),
    ("fashion_mnist", 64): Setting("fashion_mnist", 64, 4, 0.1, 12),
    ("digits", 32): Setting("digits", 32, 2, 0.1, 16),
    ("digits", 64): Setting("digits", 64, 1, 0.1, 16),
}


def setting_of(
    data: str, workers: int, epochs: int | None = None, lr: float | None = None
) -> Setting:
    """Return a task, with other epochs or another learning rate where they are given."""
    task = SETTINGS[data, workers]
    return replace(task, epochs=epochs or task.epochs, lr=lr or task.lr)


def _same(method: Method) -> Rule:
    """A rule that refers to no other run."""
    return lambda _: method


def _fraction(part: int, during: tuple[float, float]) -> Rule:
    """Below a fraction of Xi_max."""
    return lambda phases: control(OfReference(1 / part, phases), during)


def _band(rho: float) -> Rule:
    """Below rho phi in the first half; above it later, by rounds without exchanges."""
    return _same(control(GradientNorm(rho), at_least=GradientNorm(rho)))


RULES: dict[str, Rule] = {
    "sync": _same(local_sgd(1)),
    "ring": _same(control(math.inf, ALWAYS, accelerated=False)),
    **{f"{q} exchanges": _same(gossip_sgd("ring", exchanges=q)) for q in (2, 3, 4)},
    **{
        f"{q} accelerated": _same(gossip_sgd("ring", exchanges=q, accelerated=True))
        for q in (1, 2, 3, 4)
    },
    **{f"{q} accelerated, first half": _same(control(0.0, most=q)) for q in (2, 3, 4, 5, 8)},
    **{f"Xi_max/{part}, first half": _fraction(part, FIRST_HALF) for part in (2, 4, 8)},
    **{f"Xi_max/{part}, always": _fraction(part, ALWAYS) for part in (2, 4, 8)},
    **{f"{rho:g} phi": _same(control(GradientNorm(rho))) for rho in (0.125, 0.2, 0.25, 0.5, 1.0)},
    **{
        f"{rho:g} phi, exact": _same(control(GradientNorm(rho), meter=Sketch(65_536)))
        for rho in (0.25, 0.5)
    },
    "0.25 phi, plain": _same(control(GradientNorm(0.25), accelerated=False)),
    **{f"{rho:g} phi, then above": _band(rho) for rho in (0.2, 0.25)},
}
"""Rules by name; a rule takes Xi_max of each phase of the uncontrolled ring."""


def needs_reference(name: str) -> bool:
    """Tell whether a rule refers to the uncontrolled ring of the same seed."""
    return name.startswith("Xi_max")


def train(setting: Setting, name: str, seed: int, phases: Phases = ()) -> dict[str, Any]:
    """Train once.

    Args:
        setting: The task.
        name: One of `RULES`.
        seed: Of the start and of the batches.
        phases: Xi_max of each phase, where the rule needs it.

    Returns:
        The setting, the mean model's test accuracy and loss, exchanges, how well targets were held,
        Xi_max of each phase where the run was uncontrolled, and curves.
    """
    begun = time.perf_counter()
    torch.set_num_threads(1)
    split = task(setting.data)
    steps = len(split.train_x) // (setting.workers * setting.batch)
    total = steps * setting.epochs
    method, oracle = _watched(RULES[name](phases), setting.workers)
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder, "reference.json")
        sinks: list[Sink] = [records.append, *([oracle] if oracle else [])]
        if name == "ring":
            sinks.append(Recorder(reference, total))
        torch.manual_seed(seed)
        simulation = Simulation(
            models.build("cnn", split),
            setting.workers,
            method,
            partial(SGD, lr=setting.lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
            total_steps=total,
            telemetry=sinks,
        )
        exact = _run(simulation, split, setting, seed, steps)
        recorded = json.loads(reference.read_text())["phases"] if name == "ring" else None
    loss, correct = score(simulation.mean(), split.test_x, split.test_y)
    images = len(split.test_x)
    return {
        "name": name,
        "seed": seed,
        **asdict(setting),
        "steps": total,
        "parameters": simulation.flat.shape[1],
        "accuracy": correct / images,
        "loss": _short(loss / images),
        "xi_max": recorded,
        **_exchanges(records, total),
        **_held(records, oracle),
        "curve": _curve(records, exact),
        "seconds": time.perf_counter() - begun,
    }


def task(name: str) -> Split:
    """Load digits, or the first 10,000 images of Fashion-MNIST at 14x14."""
    return load(name) if name == "digits" else load(name, limit=10_000, downsample=2)


def phases_of(ring: Mapping[str, Any]) -> Phases:
    """Return Xi_max of each phase from the result of the uncontrolled ring."""
    return tuple((p["start"], p["end"], p["largest"]) for p in ring["xi_max"])


def _watched(method: Method, workers: int) -> tuple[Method, Oracle | None]:
    """Let an oracle see the exchanges, where there is a target that it can judge."""
    average, rule = method.average, method.control
    if not isinstance(average, Gossip) or not isinstance(rule, KeepBelow):
        return method, None
    mixing = average.topology.mixing(workers, 0)
    oracle = Oracle(mixing, rule.most, average.accelerated)
    watched = WatchedGossip(average.topology, average.accelerated, oracle)
    return replace(method, average=watched), oracle


def _run(
    simulation: Simulation, split: Split, setting: Setting, seed: int, steps: int
) -> dict[int, float]:
    """Make all steps; return the exact distance after every eighth."""
    schedule = LambdaLR(simulation.optimizer, lr_factor("step", 0.1, steps * setting.epochs))
    workers, batch = setting.workers, setting.batch
    exact: dict[int, float] = {}
    for epoch in range(setting.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(split.train_x))
        indices = torch.from_numpy(order[: steps * workers * batch]).view(steps, workers, batch)
        for index in indices:
            simulation.step(split.train_x[index], split.train_y[index])
            schedule.step()
            if simulation.optimizer.clock % EVERY == 0:
                exact[simulation.optimizer.clock] = simulation.optimizer.consensus_distance()
    return exact


def _exchanges(records: Sequence[RoundRecord], total: int) -> dict[str, Any]:
    """Exchanges a step, in all of training and in its first half."""
    half = [record.exchanges for record in records if 2 * record.step <= total]
    return {
        "exchanges": sum(record.exchanges for record in records) / total,
        "exchanges_first_half": sum(half) / (total // 2),
    }


def _held(records: Sequence[RoundRecord], oracle: Oracle | None) -> dict[str, Any]:
    """How often the target was held, and at what cost compared with the oracle.

    `held` is by the control's own measurement, `held_exactly` by the exact distance; both count the
    rounds whose target was in reach, as `reachable` (a share) says.
    """
    judged = oracle.judged if oracle is not None else []
    controlled = [record for record in records if record.target is not None]
    rounds = list(zip(judged, controlled, strict=True)) if judged else []
    within = [(judge, record) for judge, record in rounds if judge.needed is not None]
    if not within:
        return {"controlled": len(rounds), "reachable": 0.0 if rounds else None}
    needed = sum(judge.needed or 0 for judge, _ in within)
    return {
        "controlled": len(rounds),
        "reachable": len(within) / len(rounds),
        "held": fmean((r.distance or 0.0) <= (r.target or 0.0) for _, r in within),
        "held_exactly": fmean(judge.held for judge, _ in within),
        "of_oracle": sum(judge.made for judge, _ in within) / needed,
    }


def _curve(records: Sequence[RoundRecord], exact: Mapping[int, float]) -> list[list[float | None]]:
    """Points of step, exact distance, target, and mean exchanges since the point before."""
    by_step = {record.step: record for record in records}
    points: list[list[float | None]] = []
    for step, distance in exact.items():
        recent = [by_step[s].exchanges for s in range(step - EVERY + 1, step + 1) if s in by_step]
        limit = by_step[step].target if step in by_step else None
        points.append([step, _short(distance), _short(limit), _short(sum(recent) / EVERY)])
    return points


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
