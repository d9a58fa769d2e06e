"""Four processes and StackedTransport(4) follow the same trajectory, for every method."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    StackedTransport,
    dppf,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from tests.harness import run_ranks

STEPS = 12
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(3),
    "ring": gossip_sgd("ring"),
    "ring_twice": gossip_sgd("ring", period=2, exchanges=2),
    "one_peer": gossip_sgd("one_peer_exponential"),
    "base": gossip_sgd("base2", period=2),
    "matching": gossip_sgd("random_matching"),
    "dppf": dppf(alpha=0.2, lam=0.3, period=2),
    "dppf_ring": dppf(alpha=0.2, lam=0.3, period=2, schedule="linear", topology="ring"),
    "post_local": post_local(until=4, period=4),
    "quadratic_sync": quadratic_sync(0.1, min_period=2),
}
SAME_BITS = {"ring", "ring_twice", "one_peer", "base", "matching", "dppf_ring"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def train_rank(rank: int, name: str) -> Tensor:
    model = make_model()
    inner = sgd(list(model.parameters()))
    optimizer = ConsensusOptimizer(inner, METHODS[name], total_steps=STEPS, timeout=30)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_stacked(name: str, n: int) -> Tensor:
    model = make_model()
    row = torch.cat([p.detach().flatten() for p in model.parameters()])
    flat = nn.Parameter(row.repeat(n, 1))
    optimizer = ConsensusOptimizer(
        sgd([flat]), METHODS[name], transport=StackedTransport(n), total_steps=STEPS
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(n):
            pieces = flat[rank].split([p.numel() for p in model.parameters()])
            named = zip(model.named_parameters(), pieces, strict=True)
            weights = {key: piece.view(p.shape) for (key, p), piece in named}
            loss_of(lambda x, w=weights: functional_call(model, w, (x,)), rank, step).backward()
        optimizer.step()
    return flat.detach()


@pytest.mark.parametrize("name", METHODS)
def test_four_processes_follow_four_stacked_workers(name: str) -> None:
    processes = torch.stack(run_ranks(4, train_rank, name))
    stacked = train_stacked(name, 4)
    if name in SAME_BITS:
        assert torch.equal(processes, stacked)
    else:
        torch.testing.assert_close(processes, stacked, rtol=1e-5, atol=1e-7)
