"""Unusual optimizers and training loops on real ranks over torch.distributed.

The oracle is two bare optimizers that are averaged by hand after each second step. The same cases
under Horovod's interface are in test_horovod.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from consensus_opt import ConsensusOptimizer, local_sgd
from tests.harness import run_ranks
from tests.problems import average_by_hand, flat, loss_of, mlp, same

STEPS, PERIOD = 6, 2


class Signs(Optimizer):
    """Needs an argument, and keeps plain types of all kinds in its state."""

    def __init__(self, params: Iterable[nn.Parameter], scale: float) -> None:
        super().__init__(params, {"lr": 0.01, "scale": scale, "note": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["odd"], state["nothing"] = state["step"] % 2 == 1, None
                p.data.add_(p.grad.sign(), alpha=-group["lr"] * group["scale"] / state["step"])


def usual(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> None:
    """Five batches an epoch, two a step: the last half-filled gradient goes on in the next one."""
    for part in (2 * step, 2 * step + 1):
        (loss_of(model, rank, part % 5) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def dropped(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> None:
    """A bad batch on one rank."""
    if rank == 1:
        loss_of(model, rank, 70 + step).backward()
        optimizer.zero_grad()
    usual(model, optimizer, rank, step)


def branched(model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> None:
    """In one step, only rank 0 uses the second layer."""
    if step != 1 or rank == 0:
        return usual(model, optimizer, rank, step)
    optimizer.zero_grad()
    layers: Any = model
    layers[0](torch.ones(2, 6)).sum().backward()
    return optimizer.step()


def frozen_first_layer(model: nn.Module) -> Optimizer:
    layers: Any = model
    layers[0].requires_grad_(False)
    return SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)


def two_groups(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    return SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.05, foreach=None)


@dataclass(frozen=True)
class Case:
    make: Callable[[nn.Module], Optimizer]
    step: Callable[[nn.Module, Optimizer, int, int], None] = usual


CASES = {
    "two groups": Case(two_groups),
    "accumulated across epochs": Case(lambda m: Adam(m.parameters(), lr=0.01), accumulated),
    "dropped batch": Case(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), dropped),
    "without momentum": Case(lambda m: SGD(m.parameters(), lr=0.1)),
    "custom optimizer": Case(lambda m: Signs(m.parameters(), scale=0.5)),
    "frozen part": Case(frozen_first_layer),
    "branch on rank 0": Case(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), branched),
}


def train_each(rank: int) -> dict[str, tuple[Tensor, Any, int]]:
    results = {}
    for name, case in CASES.items():
        model = mlp()
        optimizer = ConsensusOptimizer(case.make(model), local_sgd(PERIOD), timeout=60)
        for step in range(STEPS):
            case.step(model, optimizer, rank, step)
        state = optimizer.inner.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(optimizer.inner.state_dict(), state)
        results[name] = flat(model), state, optimizer.rounds
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Tensor, Any, int]]]:
    return run_ranks(2, train_each)


@pytest.mark.parametrize("name", CASES)
def test_R016_R018_R019_R022_R023_R024_R027_R028_R030_are_as_bare_optimizers_averaged_by_hand(
    ranks: list[dict[str, tuple[Tensor, Any, int]]], name: str
) -> None:
    case, models = CASES[name], [mlp(), mlp()]
    optimizers = [case.make(model) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            case.step(model, optimizer, rank, step)
        if step % PERIOD == PERIOD - 1:
            average_by_hand(models)
    for rank, outcome in enumerate(ranks):
        parameters, state, rounds = outcome[name]
        assert same(parameters, flat(models[rank]))
        assert same(state, optimizers[rank].state_dict())
        assert rounds == STEPS // PERIOD


def train_all_then_a_part(rank: int) -> list[Tensor]:
    """One optimizer over the whole model, then one over its head, then the first again."""
    model = mlp()
    layers: Any = model
    whole = ConsensusOptimizer(SGD(model.parameters(), lr=0.1), local_sgd(PERIOD), timeout=60)
    head = ConsensusOptimizer(SGD(layers[2].parameters(), lr=0.1), local_sgd(PERIOD), timeout=60)
    seen = []
    for optimizer in (whole, head, whole):
        body = flat(layers[0])
        for step in range(PERIOD):
            usual(model, optimizer, rank, step)
            model.zero_grad()
        assert optimizer is whole or same(flat(layers[0]), body)
        seen.append(flat(model))
    return seen


def test_R015_two_optimizers_over_all_and_over_a_part_take_turns() -> None:
    first, second = run_ranks(2, train_all_then_a_part)
    for mine, other in zip(first, second, strict=True):
        assert same(mine, other)
    assert not same(first[0], first[1])
    assert not same(first[1], first[2])
