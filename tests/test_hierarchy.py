"""Nodes as workers: ranks of a node share the messages, and stay equal.

The oracle is the same training with one rank for each node, as stacked workers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from consensus_opt import ConsensusOptimizer, Method, StackedTransport, dppf, gossip_sgd, local_sgd
from consensus_opt.hierarchy import HierarchicalTransport
from consensus_opt.integrations.torch_distributed import TorchTransport
from tests.harness import run_ranks
from tests.problems import flat, loss_of, mlp, same
from tests.test_deepspeed import gradient

STEPS = 4
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(2),
    "ring": gossip_sgd("ring", period=2),
    "dppf": dppf(alpha=0.2, lam=0.3, period=2),
    "momentum_too": gossip_sgd("ring", period=2, state="average"),
}


def groups(rank: int) -> tuple[Any, Any]:
    """Nodes of two ranks, and the ranks with the same number in both."""
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    others = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return nodes[rank // 2], others[rank % 2]


def train(rank: int) -> dict[str, Any]:
    node, others = groups(rank)
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        inside, across = TorchTransport(node, 20), TorchTransport(others, 20)
        model = mlp(seed=rank // 2)
        network = DistributedDataParallel(model, process_group=node)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        transport = HierarchicalTransport(inside, across)
        optimizer = ConsensusOptimizer(inner, method, model=model, transport=transport)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(network, rank, step).backward()
            optimizer.step()
        own = flat(model)
        with optimizer.averaged():
            mean = flat(model)
        found[name] = own, mean, optimizer.bytes_sent, optimizer.consensus_distance()
        assert optimizer.mean_of(float(rank)) == 1.5  # of all ranks, and not of a node's first
    return found


def whole(method: Method) -> tuple[Tensor, ConsensusOptimizer]:
    model = mlp()
    rows = nn.Parameter(flat(model).repeat(2, 1))
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([rows], lr=0.1, momentum=0.9), method, transport=StackedTransport(2)
    )
    for step in range(STEPS):
        each = [gradient(model, rows[r // 2].detach(), r, step, "fp32") for r in range(4)]
        rows.grad = torch.stack([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2])
        optimizer.step()
    return rows.detach(), optimizer


def test_ranks_of_a_node_send_its_vector_once_and_stay_equal() -> None:
    found = run_ranks(4, train)
    for name, method in METHODS.items():
        rows, optimizer = whole(method)
        for rank, (own, mean, sent, distance) in enumerate(r[name] for r in found):
            torch.testing.assert_close(own, rows[rank // 2], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mean, rows.mean(0), rtol=1e-5, atol=1e-6)
            assert same(own, found[rank - rank % 2][name][0])
            assert distance == pytest.approx(optimizer.consensus_distance(), rel=1e-3, abs=1e-6)
            node = sent + found[rank ^ 1][name][2]
            assert node == optimizer.bytes_sent / 2


def test_groups_that_are_no_grid_are_refused() -> None:
    assert all("one and the same" in text for text in run_ranks(2, no_grid))


def no_grid(rank: int) -> str:
    with pytest.raises(ValueError, match="inside=TorchTransport") as raised:
        HierarchicalTransport(TorchTransport(timeout=20), TorchTransport(timeout=20))
    return str(raised.value)
