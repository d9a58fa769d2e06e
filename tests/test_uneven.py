"""Workers with different numbers of batches: ``optimizer.join()`` and torch's ``Join``.

The oracle trains plain optimizers side by side and applies, in each round, a matrix among those who
are left. R130 to R132 are cases of the list of what goes wrong in data loops.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    PeerError,
    RankMismatchError,
    consensus_control,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import flat, mlp, same, train, train_step

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
def test_R130_R131_the_others_go_on_among_themselves_and_who_ended_takes_their_mean(
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
    return {"stopped": stopped, "distance": optimizer.consensus_distance()}


def stop_in_all_ways(rank: int) -> list[dict[str, Any]]:
    return [
        stop_with_the_first(rank, 1, (5, 8, 7, 9)),
        stop_with_the_first(rank, 4, (5, 11, 12, 9)),
        stop_with_the_first(rank, 1, (3, 0, 3, 3)),
        stop_with_the_first(rank, 2, (4, 4, 4, 4)),
    ]


def test_R131_R132_all_stop_with_the_first_before_the_round_that_it_would_miss() -> None:
    each = run_ranks(N, stop_in_all_ways)
    every_step, fourth, none, alike = zip(*each, strict=True)
    assert [e["stopped"] for e in every_step] == [[(5, 5), (5, 10)]] * 4
    # With a round every 4 steps: the second epoch makes those after steps 8 and 12, and not 16.
    assert [e["stopped"] for e in fourth] == [[(a, 7), (b, 15)] for a, b in [(5, 5)] + 3 * [(7, 8)]]
    assert [e["stopped"] for e in none] == [[(0, 0), (0, 0)]] * 4
    assert [e["stopped"] for e in alike] == [[(4, 4), (4, 8)]] * 4
    assert all(e["distance"] == 0.0 for e in (*every_step, *none, *alike))


# ---------------------------------------------------------------------------- torch's Join


def join_as_torch_does(rank: int) -> dict[str, Any]:
    batches = BATCHES["all at different steps"]
    names = ("local_sgd_2", "one_peer")
    outcome: dict[str, Any] = {
        name: [
            train_uneven(rank, name, batches, join=join, timeout=20)["seen"][1][0]
            for join in (lambda o: Join([o]), lambda o: o.join())
        ]
        for name in names
    }
    models = [mlp(), mlp()]
    both = [
        ConsensusOptimizer(sgd(model), local_sgd(period), timeout=20)
        for model, period in zip(models, (1, 3), strict=True)
    ]
    with Join(both):
        for step in range(batches[rank]):
            for model, optimizer in zip(models, both, strict=True):
                train_step(model, optimizer, step, rank)
    outcome["clocks"] = [(optimizer.clock, optimizer.rounds) for optimizer in both]
    taken = 0
    try:
        with Join([both[0]], throw_on_early_termination=True):
            for step in range((4, 3, 5, 5)[rank]):
                train_step(models[0], both[0], step, rank)
                taken += 1
    except RuntimeError as error:
        outcome["error"] = str(error)
    outcome["taken"] = taken
    with Join([both[1]], enable=False):
        train_step(models[1], both[1], 0, rank)
    return outcome


def test_R130_join_of_torch_does_the_same_and_takes_several_optimizers() -> None:
    each = run_ranks(N, join_as_torch_does)
    for rank, outcome in enumerate(each):
        assert all(same(*outcome[name]) for name in ("local_sgd_2", "one_peer"))
        assert outcome["clocks"] == [(9, 9), (9, 3)]
        assert outcome["taken"] == 3
        told = "Rank 1 exhausted all inputs" if rank == 1 else "at least one rank that exhausted"
        assert told in outcome["error"]


# ---------------------------------------------------------------------------- what else may happen


def call_inside(rank: int) -> dict[str, Any]:
    """Ranks 0 and 2 end after 2 steps; the others call everything that is collective."""
    model = mlp(seed=rank)
    model.append(nn.BatchNorm1d(3))
    optimizer = ConsensusOptimizer(
        sgd(model), gossip_sgd("ring"), model=model, broadcast=False, timeout=20
    )
    seen: dict[str, Any] = {}
    with optimizer.join():
        for step in range(2 if rank in (0, 2) else 4):
            train_step(model, optimizer, step, rank)
            if step == 2:
                seen["own"] = flat(model)
                with optimizer.averaged():
                    seen["mean"] = flat(model)
                seen["restored"] = flat(model)
                seen["distance"] = optimizer.consensus_distance()
        seen["end"] = flat(model)
    seen["after"] = flat(model)
    optimizer.synchronize()
    seen["synchronized"] = flat(model)
    return seen


def test_collective_calls_inside_are_of_the_workers_that_are_left() -> None:
    each = run_ranks(N, call_inside)
    left = [each[1], each[3]]
    mean = torch.stack([seen["own"] for seen in left]).mean(0)
    squares = [(seen["own"] - mean).square().sum() for seen in left]
    for seen in left:
        torch.testing.assert_close(seen["mean"], mean)
        assert same(seen["restored"], seen["own"])
        assert seen["distance"] == pytest.approx(float(torch.stack(squares).mean().sqrt()))
        assert same(seen["after"], seen["end"])
    final = torch.stack([seen["end"] for seen in left]).mean(0)
    for rank in (0, 2):
        torch.testing.assert_close(each[rank]["after"], final)
    for seen in each:
        torch.testing.assert_close(seen["synchronized"], final)


def join_with_even_data(rank: int) -> list[Tensor]:
    parameters = []
    for join in (False, True):
        for name in ("local_sgd_2", "ring"):
            model = mlp()
            optimizer = ConsensusOptimizer(sgd(model), METHODS[name][0], timeout=20)
            with optimizer.join() if join else nullcontext():
                train(model, optimizer, range(5), rank)
            parameters.append(flat(model))
            train(model, optimizer, range(5, 7), rank)
            parameters.append(flat(model))
    return parameters


def test_with_equally_many_batches_join_changes_no_bit() -> None:
    for parameters in run_ranks(N, join_with_even_data):
        assert same(parameters[:4], parameters[4:])


def one_is_outside(rank: int) -> str:
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), local_sgd(1), timeout=20)
    try:
        with nullcontext() if rank == 2 else optimizer.join():
            train(model, optimizer, range(3), rank)
    except RankMismatchError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_does_not_join_is_named_on_every_rank() -> None:
    texts = run_ranks(N, one_is_outside)
    assert len(set(texts)) == 1
    assert "ranks [2] differ from the other 3: rank 2 has 'join: None' instead of" in texts[0]


def leave_early(rank: int, name: str) -> tuple[str, str]:
    """Rank 1 takes two steps fewer and goes to other work."""
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), METHODS[name][0], timeout=2)
    try:
        train(model, optimizer, range(4 if rank == 1 else 8), rank)
        if name == "local_sgd" and rank == 1:
            optimizer.synchronize()
    except (PeerError, RankMismatchError) as error:
        return type(error).__name__, str(error)
    if rank == 1:
        time.sleep(8)
    return "", "nothing"


@pytest.mark.parametrize("name", ["local_sgd_2", "ring"])
def test_R132_without_join_who_left_is_named_and_join_is_recommended(name: str) -> None:
    outcomes = run_ranks(N, leave_early, name)
    for rank in (0, 2, 3):
        kind, text = outcomes[rank]
        assert kind == "PeerError"
        assert "rank 1 does not answer" in text
        assert "where it has fewer batches" in text
        assert "'with optimizer.join():' around the loop" in text


def test_R132_who_left_for_another_collective_call_is_named_at_once() -> None:
    for kind, text in run_ranks(N, leave_early, "local_sgd"):
        assert kind == "RankMismatchError"
        assert "rank 0: step(), rank 1: synchronize()" in text
        assert "'with optimizer.join():' around the loop" in text


def skip_a_step(rank: int, name: str) -> tuple[int, int, str]:
    """Rank 1 meets a NaN in its third batch and does not step; all end with the mean."""
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), METHODS[name][0], timeout=3)
    text = "nothing"
    try:
        for step in range(6):
            if not (rank == 1 and step == 2):
                train_step(model, optimizer, step, rank)
        optimizer.synchronize()
    except (PeerError, RankMismatchError) as error:
        text = str(error)
    return optimizer.clock, optimizer.rounds, text


def test_R003_a_rank_that_skips_a_step_is_named_when_a_round_lacks_it() -> None:
    for clock, rounds, text in run_ranks(N, skip_a_step, "local_sgd"):
        assert (clock, rounds) == (6, 5) or text != "nothing"
        assert "rank 0: step(), rank 1: synchronize()" in text
