"""Ranks that differ: an error on every rank that names ranks and difference, and no hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    PeerError,
    RankMismatchError,
    dppf,
    gossip_sgd,
    local_sgd,
)
from tests.harness import run_ranks
from tests.problems import flat, loss_of, mlp, same, train


def wrap(trained: nn.Module, method: Method, **options: Any) -> ConsensusOptimizer:
    return ConsensusOptimizer(SGD(trained.parameters(), lr=0.1), method, **options)


def construct(rank: int, difference: str, odd: int) -> str:
    """Construct with one thing that differs on rank ``odd``; return the error's text."""
    differs = difference if rank == odd else ""
    model: nn.Sequential = mlp(outputs=4 if differs == "shape" else 3)
    if differs == "layers":
        model.append(nn.Linear(3, 3))
    if differs == "dtype":
        model.double()
    if differs == "frozen":
        model[0].bias.requires_grad_(False)
    if differs == "order":
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(6, 8))
    if differs == "memory":
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    method: Method = {
        "method": local_sgd(2 if differs else 4),
        "force": dppf(0.1 if differs else 0.2),
        "topology": gossip_sgd("ring" if differs else "star"),
        "average": gossip_sgd("complete") if differs else local_sgd(1),
    }.get(difference, gossip_sgd("one_peer_exponential"))
    options: dict[str, Any] = {
        "total_steps": 100 if differs == "total_steps" else 200,
        "model": nn.BatchNorm1d(3) if differs == "buffers" else None,
        "broadcast": differs != "broadcast",
    }
    with pytest.raises(RankMismatchError) as raised:
        wrap(model, method, timeout=20, **options)
    return str(raised.value)


def construct_all(rank: int, odd: int) -> dict[str, str]:
    return {difference: construct(rank, difference, odd) for difference in DIFFERENCES}


DIFFERENCES = {
    "layers": "6 parameters",
    "shape": "parameter 2: shape (4, 8)",
    "dtype": "torch.float64",
    "frozen": "3 parameters",
    "order": "parameter 0: shape (3, 8)",
    "memory": "parameter 0: shape (8, 6), torch.float32, axes in memory (1, 0)",
    "method": "period=2",
    "force": "value=0.1",
    "topology": "Ring()",
    "average": "Gossip(",
    "total_steps": "total_steps: 100",
    "buffers": "7 start values instead of 4",
    "broadcast": "0 start values instead of 4",
}


def test_R039_R075_an_argument_that_differs_is_named_on_every_rank() -> None:
    outcomes = run_ranks(4, construct_all, 2)
    for difference, named in DIFFERENCES.items():
        texts = [outcome[difference] for outcome in outcomes]
        assert len(set(texts)) == 1
        assert "ranks [2] differ from the other 3: rank 2 has" in texts[0]
        assert named in texts[0]
        assert "build them from the same arguments on every rank" in texts[0]


def test_of_two_ranks_that_differ_rank_0_is_taken_as_the_usual_one() -> None:
    texts = run_ranks(2, construct, "shape", 0)
    assert len(set(texts)) == 1
    assert "rank 1 has 'parameter 2: shape (3, 8)" in texts[0]
    assert "instead of 'parameter 2: shape (4, 8)" in texts[0]


METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(2),
    "ring": gossip_sgd("ring", period=2),
    "one_peer": gossip_sgd("one_peer_exponential", period=2),
}


def go_on(rank: int, optimizer: ConsensusOptimizer, what: str) -> None:
    """Rank 1 does something that the others do not."""
    if rank == 1 and what == "add_param_group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    if rank == 1 and what == "averaged":
        with optimizer.averaged():
            pass
    if rank == 1 and what == "synchronize":
        optimizer.synchronize()
    for _ in range(4):
        optimizer.step()


def step_apart(rank: int, name: str, what: str) -> str:
    model = mlp()
    optimizer = wrap(model, METHODS[name], timeout=60 if name == "local_sgd" else 2)
    for _ in range(2):
        optimizer.step()
    with pytest.raises((RankMismatchError, PeerError)) as raised:
        go_on(rank, optimizer, what)
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("local_sgd", "add_param_group"),
        ("local_sgd", "averaged"),
        ("local_sgd", "synchronize"),
        ("ring", "averaged"),
        ("one_peer", "add_param_group"),
    ],
)
def test_R039_a_rank_that_goes_its_own_way_is_an_error_everywhere(name: str, what: str) -> None:
    texts = run_ranks(4, step_apart, name, what)
    if name == "local_sgd":
        assert all(text.startswith("RankMismatchError") for text in texts)
        says = {
            "add_param_group": "ranks [1] differ from the other 3: rank 1 has 5 parameters",
            "averaged": "rank 0: step(), rank 1: averaged()",
            "synchronize": "rank 0: step(), rank 1: synchronize()",
        }
        assert all(says[what] in text for text in texts)


def join_later(rank: int, name: str) -> list[torch.Tensor]:
    """On all ranks a second model joins after two steps."""
    model, later = mlp(seed=rank), mlp(seed=10 + rank)
    optimizer = wrap(model, METHODS[name], timeout=60)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.01})
        optimizer.zero_grad()
        (loss_of(model, rank, step) + loss_of(later, rank, step)).backward()
        optimizer.step()
    optimizer.synchronize()
    return [flat(model), flat(later)]


@pytest.mark.parametrize("name", METHODS)
def test_R116_a_group_that_is_added_on_all_ranks_joins(name: str) -> None:
    outcomes = run_ranks(3, join_later, name)
    assert all(same(models, outcomes[0]) for models in outcomes)


def add_a_group_alone(rank: int) -> tuple[str, float]:
    """Rank 1 of a ring of six changes its parameters; return the error and how long it took."""
    optimizer = wrap(mlp(), gossip_sgd("ring"), timeout=60)
    optimizer.step()
    if rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as raised:
        train(mlp(), optimizer, range(8))
    return str(raised.value), time.monotonic() - start


def test_ranks_that_are_no_neighbours_hear_of_a_mismatch_and_its_reason() -> None:
    outcomes = run_ranks(6, add_a_group_alone)
    assert all("has other parameters or another method than rank" in text for text, _ in outcomes)
    assert all("rank 1" in text for text, _ in outcomes)
    assert all(seconds < 30 for _, seconds in outcomes)  # the timeout is 60
