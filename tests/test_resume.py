"""Training that was stopped at any step and resumed in new processes gives the same bits (C8)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    consensus_control,
    dppf,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from tests.harness import run_ranks
from tests.problems import flat, mlp, same, train

RANKS, STEPS = 3, 12
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(5),
    "quadratic_sync": quadratic_sync(0.21, min_period=2),
    "one_peer": gossip_sgd("one_peer_exponential", period=2),
    "base": gossip_sgd("base2", period=2),
    "matching": gossip_sgd("random_matching", period=3, exchanges=2),
    "dppf": dppf(0.2, 0.3, period=4),
    "dppf_ring": dppf(0.2, 0.3, period=3, topology="ring", schedule="linear"),
    "warm_up": post_local(until=4, period=3),
    "control": consensus_control("star", during=(0.0, 0.7), most=4, period=2),
    "momentum": gossip_sgd("ring", period=2, state="quasi_global"),
}


def wrap(model: nn.Module, name: str) -> ConsensusOptimizer:
    if name == "one_peer":
        inner: torch.optim.Optimizer = Adam(model.parameters(), lr=0.01)
    else:
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return ConsensusOptimizer(inner, METHODS[name], total_steps=STEPS, timeout=60)


def saved(model: nn.Module, optimizer: ConsensusOptimizer) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def train_and_save(rank: int) -> dict[str, tuple[Tensor, list[bytes]]]:
    """All parameters at the end, and a checkpoint after each step."""
    results = {}
    for name in METHODS:
        model = mlp(seed=rank)
        optimizer = wrap(model, name)
        checkpoints = []
        for step in range(STEPS):
            train(model, optimizer, [step], rank)
            checkpoints.append(saved(model, optimizer))
        results[name] = flat(model), checkpoints
    return results


def resume_each(rank: int, ranks: list[dict[str, Any]], stops: list[int]) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    for name in METHODS:
        results[name] = []
        for stop in stops:
            data = torch.load(io.BytesIO(ranks[rank][name][1][stop - 1]), weights_only=True)
            model = mlp(seed=99)
            optimizer = wrap(model, name)
            model.load_state_dict(data["model"])
            optimizer.load_state_dict(data["optimizer"])
            train(model, optimizer, range(stop, STEPS), rank)
            results[name].append((flat(model), optimizer.state_dict()))
    return results


@pytest.fixture(scope="module")
def whole() -> list[dict[str, tuple[Tensor, list[bytes]]]]:
    return run_ranks(RANKS, train_and_save)


@pytest.mark.parametrize("stops", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]], ids=str)
def test_R052_R064_a_run_that_was_stopped_at_any_step_ends_with_the_same_bits(
    whole: list[dict[str, tuple[Tensor, list[bytes]]]], stops: list[int]
) -> None:
    outcomes = run_ranks(RANKS, resume_each, whole, stops)
    for rank, outcome in enumerate(outcomes):
        for name in METHODS:
            expected, checkpoints = whole[rank][name]
            last = torch.load(io.BytesIO(checkpoints[-1]), weights_only=True)["optimizer"]
            for stop, (parameters, state) in zip(stops, outcome[name], strict=True):
                assert same(parameters, expected), f"{name}, stopped at {stop}"
                assert same(state, last), f"{name}, stopped at {stop}"


def load_later_on_rank_1(rank: int, name: str, ranks: list[dict[str, Any]]) -> tuple[Any, ...]:
    """All ranks restart, rank 1 from a checkpoint that is two rounds older than the others'."""
    stop = 4 if rank == 1 else 8
    data = torch.load(io.BytesIO(ranks[rank][name][1][stop - 1]), weights_only=True)
    model = mlp()
    optimizer = wrap(model, name)
    model.load_state_dict(data["model"])
    optimizer.load_state_dict(data["optimizer"])
    while optimizer.clock < 14:
        train(model, optimizer, [optimizer.clock], rank)
    optimizer.synchronize()
    state = optimizer.state_dict()["consensus"]
    return tuple(state[key] for key in ("clock", "exchanges", "next_round")), flat(model)


@pytest.mark.parametrize("name", ["local_sgd", "one_peer"])
def test_R062_R063_a_rank_that_restarts_from_an_older_state_joins_the_others(
    whole: list[dict[str, tuple[Tensor, list[bytes]]]], name: str
) -> None:
    outcomes = run_ranks(RANKS, load_later_on_rank_1, name, whole)
    for outcome in outcomes:
        assert same(outcome, outcomes[0])


def change_the_period(rank: int) -> list[int]:
    steps: list[int] = []
    model = mlp()
    optimizer = ConsensusOptimizer(SGD(model.parameters()), local_sgd(4), timeout=60)
    for _ in range(5):
        optimizer.step()
    other = ConsensusOptimizer(
        SGD(model.parameters()),
        local_sgd(3),
        timeout=60,
        telemetry=lambda record: steps.append(record.step),
    )
    other.load_state_dict(optimizer.state_dict())
    for _ in range(5):
        other.step()
    return steps


def test_another_period_starts_from_the_saved_clock() -> None:
    assert run_ranks(2, change_the_period) == [[6, 9], [6, 9]]


def test_a_state_of_a_newer_release_is_refused_with_what_to_do() -> None:
    optimizer = ConsensusOptimizer(SGD(mlp().parameters()), local_sgd(4))
    state = optimizer.state_dict()
    state["consensus"]["version"] += 1
    with pytest.raises(ValueError, match=r"version \d+, and this release reads up to \d+; install"):
        optimizer.load_state_dict(state)
