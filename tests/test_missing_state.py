"""Travelling optimizer state that some ranks do not keep yet: it stays out of the round.

The oracle trains plain optimizers side by side and averages what all of them keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

from consensus_opt import ConsensusOptimizer, Method, RankMismatchError, gossip_sgd, local_sgd
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import Make, flat, loss_of, mlp

N, STEPS = 4, 4
MAKE: dict[str, Make] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
}
METHODS: dict[str, Method] = {
    "mean": local_sgd(1, state="average"),
    "ring": gossip_sgd("ring", state="average"),
}
Step = Callable[[nn.Sequential, Optimizer, GradScaler, int, int], None]


def overflow_first(
    model: nn.Sequential, optimizer: Optimizer, scaler: GradScaler, rank: int, step: int
) -> None:
    """Rank 1 overflows in its first two steps, so that it keeps no state until the third."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model, rank, step)).backward()
    if rank == 1 and step < 2:
        model[0].weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()


def part_without_gradient(
    model: nn.Sequential, optimizer: Optimizer, scaler: GradScaler, rank: int, step: int
) -> None:
    """Rank 2 has no gradient for the last layer in its first step."""
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    if rank == 2 and step == 0:
        model[2].weight.grad = model[2].bias.grad = None
    optimizer.step()


STEP: dict[str, Step] = {"overflow": overflow_first, "no gradient": part_without_gradient}


def moments(model: nn.Module, optimizer: Optimizer) -> Tensor:
    kept = (optimizer.state.get(p, {}) for p in model.parameters())
    found = [value.flatten() for state in kept for _, value in sorted(state.items())]
    return torch.cat(found) if found else torch.empty(0)


def train_all_ways(rank: int) -> dict[tuple[str, str, str], tuple[Tensor, Tensor]]:
    outcomes = {}
    for name in MAKE:
        for way, method in METHODS.items():
            for what, step in STEP.items():
                model, scaler = mlp(), GradScaler("cpu")
                inner = MAKE[name](model.parameters())
                optimizer = ConsensusOptimizer(inner, method, timeout=30)
                for number in range(STEPS):
                    step(model, optimizer, scaler, rank, number)
                outcomes[name, way, what] = flat(model), moments(model, inner)
    return outcomes


def by_hand(name: str, way: str, what: str) -> list[tuple[Tensor, Tensor]]:
    models, scalers = [mlp() for _ in range(N)], [GradScaler("cpu") for _ in range(N)]
    optimizers = [MAKE[name](model.parameters()) for model in models]
    weights = torch.full((N, N), 1 / N)
    if way == "ring":
        weights = torch.from_numpy(topology("ring").mixing(N).weights.copy()).float()
    for number in range(STEPS):
        for rank in range(N):
            STEP[what](models[rank], optimizers[rank], scalers[rank], rank, number)
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            mix(weights, [p.detach() for p in parameters])
            states = [o.state.get(p, {}) for o, p in zip(optimizers, parameters, strict=True)]
            for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & states[0].keys():
                if all(key in state for state in states):
                    mix(weights, [state[key] for state in states])
    return [(flat(m), moments(m, o)) for m, o in zip(models, optimizers, strict=True)]


def mix(weights: Tensor, tensors: list[Tensor]) -> None:
    rows = torch.einsum("ij,j...->i...", weights, torch.stack(tensors))
    for tensor, row in zip(tensors, rows, strict=True):
        tensor.copy_(row)


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str, str], tuple[Tensor, Tensor]]]:
    return run_ranks(N, train_all_ways)


@pytest.mark.parametrize("what", STEP)
@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("name", MAKE)
def test_state_that_one_rank_lacks_stays_out_until_all_keep_it(
    ranks: list[dict[tuple[str, str, str], tuple[Tensor, Tensor]]], name: str, way: str, what: str
) -> None:
    for outcome, expected in zip(ranks, by_hand(name, way, what), strict=True):
        for seen, by in zip(outcome[name, way, what], expected, strict=True):
            torch.testing.assert_close(seen, by, rtol=1e-4, atol=1e-6)


def keep_other_state(rank: int) -> str:
    model = mlp()
    inner = Adam(model.parameters(), amsgrad=rank == 3)
    optimizer = ConsensusOptimizer(inner, METHODS["ring"], timeout=30)
    with pytest.raises(RankMismatchError) as raised:
        part_without_gradient(model, optimizer, GradScaler("cpu"), rank, 1)
    return str(raised.value)


def test_ranks_that_keep_different_state_are_named_on_every_rank() -> None:
    texts: list[Any] = run_ranks(N, keep_other_state)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 3 keeps ['state of parameter 0: exp_avg: shape")
    assert "max_exp_avg_sq" in texts[0]
    assert "the same optimizer with the same options" in texts[0]
