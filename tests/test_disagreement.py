"""Ranks that differ: an error on every rank that names the ranks and the difference, and no hang."""

from __future__ import annotations

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
from tests.problems import flat, loss_of, mlp, same

def wrap(trained: nn.Module, method: Method, **options: Any) -> ConsensusOptimizer:
    return ConsensusOptimizer(SGD(trained.parameters(), lr=0.1), method, **options)


def construct(rank: int, difference: str, odd: int) -> str:
    """Construct with one argument that differs on rank ``odd``; return the error's text."""
    differs = rank == odd
    model: nn.Sequential = mlp(outputs=4 if difference == "shape" and differs else 3)
    if difference == "layers" and differs:
        model.append(nn.Linear(3, 3))
    if difference == "dtype" and differs:
        model.double()
    if difference == "frozen" and differs:
        model[0].bias.requires_grad_(False)
    if difference == "order" and differs:
        model = nn.Sequential(*reversed([nn.Linear(6, 8), nn.Linear(8, 3)]))
    if difference == "memory" and differs:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    method: Method = {
        "method": local_sgd(2) if differs else local_sgd(4),
        "force": dppf(0.1 if differs else 0.2),
        "topology": gossip_sgd("ring" if differs else "star"),
        "average": gossip_sgd("complete") if differs else local_sgd(1),
    }.get(difference, gossip_sgd("one_peer_exponential"))
    steps = 100 if difference == "total_steps" and differs else 200
    buffers = nn.BatchNorm1d(3) if difference == "buffers" and differs else None
    with pytest.raises(RankMismatchError) as raised:
        wrap(
            model,
            method,
            total_steps=steps,
            timeout=60,
            model=buffers,
            broadcast=not (difference == "broadcast" and differs),
        ).step()
    return str(raised.value)


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
    "buffers": "8 start values instead of 4",
    "broadcast": "0 start values instead of 4",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_an_argument_that_differs_is_named_on_every_rank(difference: str) -> None:
    odd = 2
    texts = run_ranks(4, construct, difference, odd)
    assert len(set(texts)) == 1
    assert f"ranks [{odd}] differ from the other 3: rank {odd} has" in texts[0]
    assert DIFFERENCES[difference] in texts[0]
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


def step_apart(rank: int, name: str, what: str) -> str:
    """Rank 1 does something else than the others after two common steps; return what it meets."""
    model = mlp()
    optimizer = wrap(model, METHODS[name], timeout=60 if name == "local_sgd" else 2)
    for _ in range(2):
        optimizer.step()
    with pytest.raises((RankMismatchError, PeerError)) as raised:
        if rank == 1 and what == "add_param_group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        if rank == 1 and what == "averaged":
            with optimizer.averaged():
                pass
        if rank == 1 and what == "synchronize":
            optimizer.synchronize()
        for _ in range(4):
            optimizer.step()
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize("what", ["add_param_group", "averaged", "synchronize"])
@pytest.mark.parametrize("name", METHODS)
def test_a_rank_that_goes_its_own_way_is_an_error_everywhere(name: str, what: str) -> None:
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
def test_a_group_that_is_added_on_all_ranks_joins(name: str) -> None:
    outcomes = run_ranks(3, join_later, name)
    assert all(same(models, outcomes[0]) for models in outcomes)
