"""Workers with different numbers of batches: ``optimizer.join()`` and torch's ``Join``.

The oracle trains plain optimizers side by side and applies, in each round, a matrix among those who
are left. R130 and R132 are cases of the list of what goes wrong in data loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from consensus_opt import ConsensusOptimizer, Method, consensus_control, gossip_sgd, local_sgd
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import flat, mlp, train_step

N = 4
METHODS: dict[str, tuple[Method, str | None, int]] = {
    "local_sgd": (local_sgd(1), None, 1),
    "local_sgd_2": (local_sgd(2), None, 2),
    "local_sgd_state": (local_sgd(4, state="average"), None, 4),
    "ring": (gossip_sgd("ring"), "ring", 1),
    "star": (gossip_sgd("star", period=2), "star", 2),
    "one_peer": (gossip_sgd("one_peer_exponential", period=2), "one_peer_exponential", 2),
    "directed": (gossip_sgd("exponential"), "exponential", 1),
    "matching": (gossip_sgd("random_matching"), "random_matching", 1),
}
BATCHES = {
    "one ends first": (3, 7, 7, 7),
    "all at different steps": (9, 3, 7, 5),
    "one has none": (4, 4, 0, 4),
    "one is left": (1, 6, 0, 2),
    "one lacks the last": (4, 4, 4, 3),
}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The momentum of each parameter; zeros where a worker has not taken a step."""
    buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in model.parameters()]
    pairs = zip(buffers, model.parameters(), strict=True)
    return [torch.zeros_like(p) if buffer is None else buffer for buffer, p in pairs]


def train_uneven(
    rank: int,
    name: str,
    batches: Sequence[int],
    epochs: int = 2,
    join: Callable[[ConsensusOptimizer], AbstractContextManager[Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train epochs of ``batches[rank]`` steps; return parameters and momentum after each."""
    model, seen = mlp(), []
    optimizer = ConsensusOptimizer(sgd(model), METHODS[name][0], **options)
    for epoch in range(epochs):
        with optimizer.join() if join is None else join(optimizer):
            for step in range(batches[rank]):
                train_step(model, optimizer, 100 * epoch + step, rank)
        buffers = momentum(model, optimizer)
        seen.append((flat(model), torch.cat([buffer.flatten() for buffer in buffers])))
    return {
        "seen": seen,
        "clock": optimizer.clock,
        "rounds": optimizer.rounds,
        "exchanges": optimizer.state_dict()["consensus"]["exchanges"],
    }


@functools.cache
def by_hand(name: str, batches: tuple[int, ...], epochs: int = 2) -> dict[str, Any]:
    method, graph, period = METHODS[name]
    models = [mlp() for _ in batches]
    optimizers = [sgd(model) for model in models]
    n, clock, rounds = len(batches), 0, 0
    owed, seen = [0] * n, []

    def mix(weights: np.ndarray[Any, Any]) -> None:
        rows = torch.from_numpy(weights).float()
        groups = [[list(m.parameters()) for m in models]]
        if method.state == "average":
            groups.append([momentum(m, o) for m, o in zip(models, optimizers, strict=True)])
        with torch.no_grad():
            for tensors in (t for group in groups for t in zip(*group, strict=True)):
                mixed = torch.einsum("ij,j...->i...", rows, torch.stack(tensors))
                for tensor, row in zip(tensors, mixed, strict=True):
                    tensor.copy_(row)

    for epoch in range(epochs):
        absent: list[int] = []
        for step in range(max(batches)):
            for rank in range(n):
                if step < batches[rank]:
                    train_step(models[rank], optimizers[rank], 100 * epoch + step, rank)
                    owed[rank] += 1
            clock += 1
            if clock % period == 0:
                absent = [m for m in range(n) if owed[m] == 0]
                mix(among_those_left(graph, n, absent, rounds))
                owed, rounds = [0] * n, rounds + 1
        if absent:
            mix(catching_up(n, absent))
        pairs = zip(models, optimizers, strict=True)
        seen.append([(flat(m), torch.cat([b.flatten() for b in momentum(m, o)])) for m, o in pairs])
    return {"seen": seen, "clock": clock, "rounds": rounds}


def among_those_left(
    graph: str | None, n: int, absent: list[int], phase: int
) -> np.ndarray[Any, Any]:
    left = [m for m in range(n) if m not in absent]
    result = np.eye(n)
    if graph is None:
        result[np.ix_(left, left)] = 1 / len(left)
        return result
    w = topology(graph).mixing(n, phase).weights
    s, m = np.ix_(left, left), np.ix_(absent, absent)
    inverse = np.linalg.pinv(np.eye(len(absent)) - w[m])
    result[s] = w[s] + w[np.ix_(left, absent)] @ inverse @ w[np.ix_(absent, left)]
    return result


def catching_up(n: int, absent: list[int]) -> np.ndarray[Any, Any]:
    result = np.eye(n)
    left = [m for m in range(n) if m not in absent]
    result[absent] = 0.0
    result[np.ix_(absent, left)] = 1 / len(left)
    return result


def assert_as_by_hand(outcomes: list[dict[str, Any]], name: str, batches: tuple[int, ...]) -> None:
    expected = by_hand(name, batches)
    for rank, outcome in enumerate(outcomes):
        assert (outcome["clock"], outcome["rounds"]) == (expected["clock"], expected["rounds"])
        assert outcome["exchanges"] == outcome["rounds"]
        for epoch, (parameters, momentum) in enumerate(outcome["seen"]):
            for seen, by in zip((parameters, momentum), expected["seen"][epoch][rank], strict=True):
                torch.testing.assert_close(seen, by, rtol=1e-4, atol=1e-6)


def train_everything(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (name, case): train_uneven(rank, name, batches, timeout=20)
        for name in METHODS
        for case, batches in BATCHES.items()
    }


@pytest.fixture(scope="module")
def everything() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(N, train_everything, timeout=120)


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", METHODS)
def test_the_others_go_on_among_themselves_and_who_ended_takes_their_mean(
    everything: list[dict[tuple[str, str], dict[str, Any]]], name: str, case: str
) -> None:
    outcomes = [each[name, case] for each in everything]
    assert_as_by_hand(outcomes, name, BATCHES[case])


def control_uneven(rank: int) -> list[tuple[Any, ...]]:
    """Gossip under control: how many exchanges a round makes is measured among those left."""
    model, records = mlp(), []
    method = consensus_control("ring", target=1e-6, during=(0.0, 1.0), most=3)
    optimizer = ConsensusOptimizer(sgd(model), method, telemetry=records.append, timeout=20)
    with optimizer.join():
        for step in range((2, 6, 4, 6)[rank]):
            train_step(model, optimizer, step, rank)
    return [(r.step, r.exchanges, r.distance, r.target) for r in records]


def test_R130_all_ranks_make_the_same_controlled_rounds() -> None:
    each = run_ranks(N, control_uneven)
    assert all(records == each[0] for records in each)
    assert [step for step, *_ in each[0]] == [1, 2, 3, 4, 5, 6]
    # Four workers on a ring need two exchanges for the exact mean, two need one.
    assert [exchanges for _, exchanges, *_ in each[0]] == [2, 2, 2, 2, 1, 1]


# ---------------------------------------------------------------------------- stop with the first


def stop_with_the_first(rank: int, period: int, batches: Sequence[int]) -> dict[str, Any]:
    model, stopped = mlp(), []
    optimizer = ConsensusOptimizer(sgd(model), local_sgd(period), timeout=20)
    for epoch in range(2):
        taken = 0
        with optimizer.join("stop"):
            for step in range(batches[rank]):
                train_step(model, optimizer, 100 * epoch + step, rank)
                taken += 1
        stopped.append((taken, optimizer.clock))
    return {
        "stopped": stopped,
        "parameters": flat(model),
        "distance": optimizer.consensus_distance(),
    }


def stop_in_all_ways(rank: int) -> list[dict[str, Any]]:
    return [
        stop_with_the_first(rank, 1, (5, 8, 7, 9)),
        stop_with_the_first(rank, 4, (5, 11, 12, 9)),
        stop_with_the_first(rank, 1, (3, 0, 3, 3)),
        stop_with_the_first(rank, 2, (4, 4, 4, 4)),
    ]


def test_R132_all_stop_with_the_first_before_the_round_that_it_would_miss() -> None:
    each = run_ranks(N, stop_in_all_ways)
    every_step, fourth, none, alike = zip(*each, strict=True)
    assert [e["stopped"] for e in every_step] == [[(5, 5), (5, 10)]] * 4
    # Of period 4: in the first epoch the round after step 8 is not made, in the second that is due.
    assert [e["stopped"] for e in fourth] == [[(m, 7), (0, 7)] for m in (5, 7, 7, 7)]
    assert [e["stopped"] for e in none] == [[(0, 0), (0, 0)]] * 4
    assert [e["stopped"] for e in alike] == [[(4, 4), (4, 8)]] * 4
    assert all(e["distance"] == 0.0 for e in (*every_step, *none, *alike))
