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
}
LOOPS = ["plain", "clipped", "accumulated"]


def train_step(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, rank: int, step: int, loop: str
) -> None:
    """One step of an ordinary AMP loop; rank 1 overflows once, at step ``OVERFLOW``."""
    optimizer.zero_grad()
    for part in range(2 if loop == "accumulated" else 1):
        scaler.scale(loss_of(model, rank, 10 * step + part)).backward()
    if rank == 1 and step == OVERFLOW:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient[0, 0] = torch.inf
    if loop == "clipped":
        scaler.unscale_(optimizer)
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
