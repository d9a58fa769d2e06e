"""GradScaler: each rank decides alone whether it overflowed, and no rank waits for ever (C4).

The oracle is two bare optimizers, each with a GradScaler of its own, averaged by hand.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from consensus_opt import ConsensusOptimizer, local_sgd
from tests.harness import run_ranks
from tests.problems import Make, average_by_hand, flat, loss_of, mlp, same

STEPS, PERIOD, OVERFLOW = 6, 2, 2
INNER: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam_capturable": lambda p: Adam(p, lr=0.01, fused=True, capturable=True),
    "sgd_fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
}
LOOPS = ["plain", "clipped", "clipped inside", "accumulated", "autocast"]


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    rank: int,
    step: int,
    loop: str = "plain",
    overflow: int = OVERFLOW,
) -> None:
    """One step of an ordinary AMP loop; rank 1 overflows once."""
    optimizer.zero_grad()
    for part in range(2 if loop == "accumulated" else 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=loop == "autocast"):
            loss = loss_of(model, rank, 10 * step + part)
        scaler.scale(loss).backward()
    if rank == 1 and step == overflow:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient[0, 0] = torch.inf
    if loop.startswith("clipped"):
        inside = isinstance(optimizer, ConsensusOptimizer) and loop == "clipped inside"
        scaler.unscale_(optimizer.inner if inside else optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def train_rank(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for name, make in INNER.items():
        for loop in LOOPS:
            model = mlp()
            optimizer = ConsensusOptimizer(make(model.parameters()), local_sgd(PERIOD), timeout=60)
            scaler, applied = GradScaler("cpu"), []
            for step in range(STEPS):
                train_step(model, optimizer, scaler, rank, step, loop)
                applied.append(optimizer.step_applied)
            results[name, loop] = {
                "parameters": flat(model),
                "scale": scaler.get_scale(),
                "applied": applied,
                "clock": optimizer.clock,
                "rounds": optimizer.rounds,
                "inner": optimizer.inner.state_dict(),
            }
    return results


def by_hand(name: str, loop: str) -> list[tuple[Tensor, float, dict[str, Any]]]:
    models = [mlp(), mlp()]
    optimizers = [INNER[name](model.parameters()) for model in models]
    scalers = [GradScaler("cpu"), GradScaler("cpu")]
    for step in range(STEPS):
        for rank in range(2):
            train_step(models[rank], optimizers[rank], scalers[rank], rank, step, loop)
        if step % PERIOD == PERIOD - 1:
            average_by_hand(models)
    return [
        (flat(model), scaler.get_scale(), optimizer.state_dict())
        for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True)
    ]


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(2, train_rank)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", INNER)
def test_R002_R006_an_overflow_on_one_rank_skips_its_step_and_no_round(
    ranks: list[dict[tuple[str, str], dict[str, Any]]], name: str, loop: str
) -> None:
    for rank, outcome in enumerate(ranks):
        result = outcome[name, loop]
        assert (result["clock"], result["rounds"]) == (STEPS, STEPS // PERIOD)
        assert result["applied"] == [not (rank == 1 and s == OVERFLOW) for s in range(STEPS)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", INNER)
def test_R004_R007_gradients_are_unscaled_once_as_by_bare_optimizers_averaged_by_hand(
    ranks: list[dict[tuple[str, str], dict[str, Any]]], name: str, loop: str
) -> None:
    for outcome, (parameters, scale, state) in zip(ranks, by_hand(name, loop), strict=True):
        assert outcome[name, loop]["scale"] == scale
        assert same(outcome[name, loop]["parameters"], parameters)
        assert same(outcome[name, loop]["inner"], state)


@pytest.mark.parametrize("name", INNER)
def test_one_worker_under_a_scaler_is_the_bare_optimizer_bit_for_bit(name: str) -> None:
    bare_model, model = mlp(), mlp()
    bare = INNER[name](bare_model.parameters())
    wrapped = ConsensusOptimizer(INNER[name](model.parameters()), local_sgd(PERIOD))
    for trained, optimizer in ((bare_model, bare), (model, wrapped)):
        scaler = GradScaler("cpu")
        for step in range(STEPS):
            train_step(trained, optimizer, scaler, 1, step, "plain")
    assert same(flat(model), flat(bare_model))


def test_R008_R010_an_overflow_in_the_first_step_lets_no_scheduler_warn_and_no_save_fail() -> None:
    model = mlp()
    wrapped = ConsensusOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), local_sgd(1))
    scheduler = lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.5)
    scaler = GradScaler("cpu")
    start = flat(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, wrapped, scaler, 1, OVERFLOW, "plain")
        scheduler.step()
    assert not wrapped.step_applied
    assert same(flat(model), start)
    saved = wrapped.state_dict()
    assert saved["state"] == {}
    wrapped.load_state_dict(saved)
    train_step(model, wrapped, scaler, 0, OVERFLOW, "plain")
    assert wrapped.step_applied
    assert wrapped.clock == 2


def test_after_a_scaled_step_nothing_of_the_scaler_is_left_on_the_optimizers() -> None:
    model = mlp()
    wrapped = ConsensusOptimizer(AdamW(model.parameters(), fused=True), local_sgd(1))
    train_step(model, wrapped, GradScaler("cpu"), 0, 0, "plain")
    for optimizer in (wrapped, wrapped.inner):
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")


# ---------------------------------------------------------------------------- where in the period

WHERE: dict[str, Make] = {"sgd": INNER["sgd"], "adam": INNER["adam"]}


def overflow_anywhere(rank: int) -> dict[tuple[str, int], tuple[Tensor, dict[str, Any], int]]:
    outcomes = {}
    for name, make in WHERE.items():
        for overflow in range(STEPS):
            model, scaler = mlp(), GradScaler("cpu")
            method = local_sgd(3, state="average")
            optimizer = ConsensusOptimizer(make(model.parameters()), method, timeout=60)
            for step in range(STEPS):
                train_step(model, optimizer, scaler, rank, step, overflow=overflow)
            outcomes[name, overflow] = flat(model), optimizer.inner.state_dict(), optimizer.rounds
    return outcomes


def anywhere_by_hand(name: str, overflow: int) -> list[tuple[Tensor, dict[str, Any]]]:
    models, scalers = [mlp(), mlp()], [GradScaler("cpu"), GradScaler("cpu")]
    optimizers = [WHERE[name](model.parameters()) for model in models]
    for step in range(STEPS):
        for rank in range(2):
            train_step(models[rank], optimizers[rank], scalers[rank], rank, step, overflow=overflow)
        if step % 3 == 2:
            average_by_hand(models)
            average_state(models, optimizers)
    return [(flat(m), o.state_dict()) for m, o in zip(models, optimizers, strict=True)]


def average_state(models: list[nn.Sequential], optimizers: list[Optimizer]) -> None:
    for pair in zip(*(model.parameters() for model in models), strict=True):
        kept = [optimizer.state[p] for optimizer, p in zip(optimizers, pair, strict=True)]
        for key in (key for key in kept[0] if key != "step"):
            mean = (kept[0][key] + kept[1][key]) / 2
            for each in kept:
                each[key].copy_(mean)


@pytest.fixture(scope="module")
def anywhere() -> list[dict[tuple[str, int], tuple[Tensor, dict[str, Any], int]]]:
    return run_ranks(2, overflow_anywhere)


@pytest.mark.parametrize("overflow", range(STEPS))
@pytest.mark.parametrize("name", WHERE)
def test_R002_an_overflow_at_any_point_of_the_period_costs_that_step_alone(
    anywhere: list[dict[tuple[str, int], tuple[Tensor, dict[str, Any], int]]],
    name: str,
    overflow: int,
) -> None:
    for outcome, (parameters, state) in zip(
        anywhere, anywhere_by_hand(name, overflow), strict=True
    ):
        assert same(outcome[name, overflow][0], parameters)
        assert same(outcome[name, overflow][1], state)
        assert outcome[name, overflow][2] == 2


def stop_under_a_scaler(rank: int) -> list[tuple[int, Tensor]]:
    model, scaler, seen = mlp(), GradScaler("cpu"), []
    optimizer = ConsensusOptimizer(INNER["sgd"](model.parameters()), local_sgd(1), timeout=60)
    for _ in range(2):
        with optimizer.join("stop"):
            for step in range(3 + rank):
                train_step(model, optimizer, scaler, rank, step, overflow=-1)
        seen.append((optimizer.clock, flat(model)))
    return seen


def test_a_stop_leaves_nothing_of_the_scaler_that_would_spoil_the_next_epoch() -> None:
    models = [mlp(), mlp()]
    optimizers = [INNER["sgd"](model.parameters()) for model in models]
    outcomes = run_ranks(2, stop_under_a_scaler)
    for epoch in range(2):
        for step in range(3):
            for rank in range(2):
                train_step(
                    models[rank], optimizers[rank], GradScaler("cpu"), rank, step, "plain", -1
                )
            average_by_hand(models)
        for outcome in outcomes:
            assert outcome[epoch][0] == 3 * (epoch + 1)
            torch.testing.assert_close(outcome[epoch][1], flat(models[0]))
