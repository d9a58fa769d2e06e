"""What no rank can see alone is told once: replicas that never part, learning rates that do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from consensus_opt import ConsensusOptimizer, Method, dsgd_ac, gossip_sgd, local_sgd
from consensus_opt.integrations.ddp import local_gradients, node_gradients
from tests.harness import run_ranks
from tests.problems import average_by_hand, flat, loss_of, mlp, same, stacked, train
from tests.problems import random_rows as rows_of

METHODS: dict[str, Method] = {
    "period 1": local_sgd(1),
    "period 3": local_sgd(3),
    "ring": gossip_sgd("ring"),
    "one peer": gossip_sgd("one_peer_exponential", period=2),
    "mix first": dsgd_ac("ring", lr_reference=0.1),
}
STEPS = 7


def told(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if "ranks" in str(each.message)]


def train_each_method(rank: int, how: str) -> dict[str, list[str]]:
    texts = {}
    for name, method in METHODS.items():
        model = mlp()
        trained = DDP(model) if how in ("ddp", "local gradients") else model
        if how == "local gradients":
            local_gradients(trained)
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = ConsensusOptimizer(inner, method, timeout=30)
        warm_up = LambdaLR(optimizer, lambda step: float(step >= 3 or how != "warm-up"))

        def run(
            trained: nn.Module = trained, optimizer: Any = optimizer, schedule: Any = warm_up
        ) -> None:
            for step in range(STEPS):
                train(trained, optimizer, [step], 0 if how == "same data" else rank)
                schedule.step()

        texts[name] = told(run)
    return texts


@pytest.mark.parametrize("how", ["ddp", "same data"])
def test_replicas_that_never_part_are_told_once_and_what_to_write(how: str) -> None:
    for outcome in run_ranks(3, train_each_method, how):
        for name, texts in outcome.items():
            assert len(texts) == 1, name
            assert "have the same parameters, bit for bit, after" in texts[0]
            assert "consensus_opt.integrations.ddp.local_gradients(ddp_model)" in texts[0]
            assert "DistributedSampler" in texts[0]


@pytest.mark.parametrize("how", ["own data", "warm-up", "local gradients"])
def test_replicas_that_part_are_not_told_of(how: str) -> None:
    assert run_ranks(3, train_each_method, how) == [{name: [] for name in METHODS}] * 3


def train_wrapped_and_bare(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    ends, buffers = [], []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        trained = local_gradients(DDP(model)) if wrapped else model
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = ConsensusOptimizer(inner, local_sgd(3), model=trained, timeout=30)
        train(trained, optimizer, range(5), rank)
        ends.append(flat(model))
        buffers.append(model[1].running_mean.clone())
    assert same(*buffers)
    return ends[0], ends[1], buffers


def test_ddp_with_local_gradients_is_the_bare_model_bit_for_bit() -> None:
    outcomes = run_ranks(2, train_wrapped_and_bare)
    for wrapped, bare, _ in outcomes:
        assert same(wrapped, bare)
    assert not same(outcomes[0][2][0], outcomes[1][2][0])  # statistics are each rank's own


def train_in_nodes(rank: int) -> list[Tensor]:
    node, _ = dist.new_subgroups(group_size=2)
    model = mlp()
    trained = node_gradients(DDP(model), node)
    optimizer = ConsensusOptimizer(SGD(model.parameters(), lr=0.1), local_sgd(3), timeout=30)
    seen = []
    for step in range(5):
        train(trained, optimizer, [step], rank)
        seen.append(flat(model))
    return seen


def in_nodes_by_hand() -> list[list[Tensor]]:
    """Two workers; each takes the mean gradient over its two ranks; all average in step 3."""
    models = [mlp(), mlp()]
    inners = [SGD(model.parameters(), lr=0.1) for model in models]
    seen = []
    for step in range(5):
        for node, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            losses = [loss_of(model, 2 * node + i, step) for i in range(2)]
            torch.stack(losses).mean().backward()
            inner.step()
        if step == 2:
            average_by_hand(models)
        seen.append([flat(model) for model in models])
    return seen


def test_the_ranks_of_a_node_are_one_worker() -> None:
    outcomes = run_ranks(4, train_in_nodes)
    for step, nodes in enumerate(in_nodes_by_hand()):
        for rank, seen in enumerate(outcomes):
            torch.testing.assert_close(seen[step], nodes[rank // 2])
            assert same(seen[step], outcomes[rank ^ 1][step])


def follow_a_loss(rank: int, share: bool, method: str) -> tuple[list[str], float]:
    model = mlp()
    optimizer = ConsensusOptimizer(SGD(model.parameters(), lr=0.1), METHODS[method], timeout=30)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def run() -> None:
        for step in range(STEPS):
            train(model, optimizer, [step], rank)
            loss = step * (rank - 0.5)  # on rank 0 it falls, on rank 1 it rises
            scheduler.step(optimizer.mean_of(loss) if share else loss)

    return told(run), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("method", ["period 3", "ring"])
def test_R138_a_scheduler_on_local_losses_is_told_once_and_mean_of_keeps_rates_equal(
    method: str,
) -> None:
    for texts, _ in run_ranks(2, follow_a_loss, False, method):
        assert len(texts) == 1
        assert "ranks have different learning rates at step" in texts[0]
        assert "rank 0: 0.1, rank 1: 0.0" in texts[0]
        assert "scheduler.step(optimizer.mean_of(loss))" in texts[0]
    shared = run_ranks(2, follow_a_loss, True, method)
    assert [texts for texts, _ in shared] == [[], []]
    assert shared[0][1] == shared[1][1]


def means(rank: int) -> Iterable[float]:
    optimizer = ConsensusOptimizer(SGD(mlp().parameters(), lr=0.1), local_sgd(2), timeout=30)
    return [optimizer.mean_of(rank + 0.5), optimizer.mean_of(torch.tensor(2.0 * rank))]


def test_a_mean_is_over_all_workers_real_or_stacked_and_of_one_is_itself() -> None:
    assert run_ranks(3, means) == [[1.5, 2.0]] * 3
    _, optimizer = stacked(rows_of(3, 2), local_sgd(2))
    assert optimizer.mean_of(torch.tensor([0.5, 1.5, 2.5])) == 1.5
    assert optimizer.mean_of(4) == 4.0
    alone = ConsensusOptimizer(SGD(mlp().parameters()), local_sgd(2))
    assert alone.mean_of(0.3) == 0.3


def test_a_model_without_ddp_needs_no_hook() -> None:
    bare: Any = mlp()
    with pytest.raises(TypeError, match=r"model is Sequential, .* leave this call out"):
        local_gradients(bare)
