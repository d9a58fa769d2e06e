"""Wrong arguments fail where they are given, and say what is allowed and what to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from consensus_opt import (
    ConsensusOptimizer,
    Force,
    Gossip,
    JsonLines,
    Method,
    MixingMatrix,
    StackedTransport,
    dppf,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.schedules import Linear
from consensus_opt.simulation import Simulation
from consensus_opt.topology import FromMatrix
from tests.harness import run_ranks

Case = tuple[Callable[[], object], type[Exception], str]
"""What is called, what it raises, and the message's parts: given | allowed | to write instead."""


def wrap(*arguments: Any, workers: int | None = None, **options: Any) -> ConsensusOptimizer:
    model = nn.Linear(2, 2)
    if workers is not None:
        options["transport"] = StackedTransport(workers)
    return ConsensusOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), *arguments, **options)


def around(optimizer: Any) -> ConsensusOptimizer:
    return ConsensusOptimizer(optimizer, local_sgd(1))


def parameters() -> Any:
    return nn.Linear(2, 2).parameters()


METHODS: dict[str, Case] = {
    "period negative": (
        lambda: local_sgd(-4),
        ValueError,
        "period is -4 | at least 1 | local_sgd(period=4)",
    ),
    "period zero": (
        lambda: gossip_sgd("ring", 0),
        ValueError,
        "period is 0 | at least 1 | local_sgd(",
    ),
    "period of a half": (
        lambda: local_sgd(1.5),
        TypeError,
        "period is 1.5 | an integer | local_sgd(",
    ),
    "alpha zero": (lambda: dppf(0.0), ValueError, "from 0.0 to 0.0 | (0, 1] | dppf(alpha=0.1)"),
    "alpha above one": (lambda: dppf(1.5), ValueError, "1.5 | (0, 1] | dppf(alpha=0.1)"),
    "alpha negative": (lambda: dppf(-0.1), ValueError, "-0.1 | (0, 1] | dppf(alpha=0.1)"),
    "alpha nan": (lambda: dppf(math.nan), ValueError, "nan | (0, 1] | dppf(alpha=0.1)"),
    "alpha grows above one": (
        lambda: dppf(Linear(2.0, 0.5)),
        ValueError,
        "from 0.5 to 2.0 | (0, 1] | dppf(",
    ),
    "alpha a word": (lambda: dppf("a"), TypeError, "is 'a' | a number or a Schedule | write 0.5"),
    "lambda negative": (lambda: dppf(lam=-1), ValueError, "-1.0 | at least 0 | dppf(lam=0.5)"),
    "lambda infinite": (lambda: dppf(lam=math.inf), ValueError, "inf | finite | dppf(lam=0.5)"),
    "lambda nan": (lambda: dppf(lam=math.nan), ValueError, "nan | finite | dppf(lam=0.5)"),
    "schedule unknown": (
        lambda: dppf(schedule="cos"),
        ValueError,
        "'cos' | constant, linear | dppf(schedule=",
    ),
    "exchanges zero": (
        lambda: gossip_sgd("ring", exchanges=0),
        ValueError,
        "exchanges is 0 | at least 1 | exchanges=2",
    ),
    "until zero": (
        lambda: post_local(0),
        ValueError,
        "until is 0 | at least 1 | post_local(until=",
    ),
    "coefficient zero": (
        lambda: quadratic_sync(0.0),
        ValueError,
        "coefficient is 0.0 | above 0 | quadratic_sync(coefficient=0.0175)",
    ),
    "coefficient nan": (
        lambda: quadratic_sync(math.nan),
        ValueError,
        "coefficient is nan | above 0 | quadratic_sync(",
    ),
    "coefficient a word": (
        lambda: quadratic_sync("a"),
        TypeError,
        "coefficient is 'a' | above 0 | quadratic_sync(",
    ),
    "method's timing": (
        lambda: Method(timing=4),
        TypeError,
        "timing is 4 | 'next_round' | timing=Every(4)",
    ),
    "method's average": (
        lambda: Method(average="ring"),
        TypeError,
        "average is 'ring' | 'form' | AllReduce()",
    ),
    "method's force": (
        lambda: Method(force=0.1),
        TypeError,
        "force is 0.1 | 'pull' | force=Force()",
    ),
    "method's control": (
        lambda: Method(control=3),
        TypeError,
        "control is 3 | 'run' | control=Fixed(1)",
    ),
    "gossip by a name": (
        lambda: Gossip("ring"),
        TypeError,
        "topology is 'ring' | a Topology | gossip_sgd('ring')",
    ),
    "force by a number": (
        lambda: Force(0.1),
        TypeError,
        "pull is 0.1 | a Schedule | dppf(alpha=0.1",
    ),
}
TOPOLOGIES: dict[str, Case] = {
    "unknown name": (
        lambda: gossip_sgd("rign"),
        ValueError,
        "'rign' is not known | complete, ring, star | pass a networkx graph",
    ),
    "a list": (
        lambda: gossip_sgd([(0, 1)]),
        TypeError,
        "from list | a name, a networkx graph | FromGraph(edges)",
    ),
    "torus that does not fit": (
        lambda: wrap(gossip_sgd("torus:3x3"), workers=8),
        ValueError,
        "8 workers | 1x8, 2x4, 4x2, 8x1 | Torus()",
    ),
    "grid that does not fit": (
        lambda: wrap(gossip_sgd("grid:4x*"), workers=6),
        ValueError,
        "6 workers | 2x3 | Grid()",
    ),
    "hypercube of six": (
        lambda: wrap(gossip_sgd("hypercube"), workers=6),
        ValueError,
        "6 workers | a power of two | BaseGraph()",
    ),
    "graph of another size": (
        lambda: wrap(gossip_sgd(nx.path_graph(3)), workers=4),
        ValueError,
        "3 ranks | does not fit 4 workers | start 3 workers",
    ),
    "disconnected graph": (
        lambda: gossip_sgd(nx.Graph([(0, 1), (2, 3)])),
        ValueError,
        "2 components: {0, 1}, {2, 3} | must be connected | (0, 2)",
    ),
    "directed graph": (
        lambda: gossip_sgd(nx.DiGraph([(0, 1), (1, 0)])),
        ValueError,
        "a directed graph | must be undirected | graph.to_undirected()",
    ),
    "graph of words": (
        lambda: gossip_sgd(nx.Graph([("a", "b")])),
        ValueError,
        "nodes {a, b} | ranks 0..n-1 | convert_node_labels_to_integers",
    ),
    "row that does not sum to one": (
        lambda: FromMatrix([[0.5, 0.4], [0.5, 0.6]]),
        ValueError,
        "row 1 of the mixing matrix | must sum to 1 | on the diagonal",
    ),
    "column that does not sum to one": (
        lambda: MixingMatrix(np.array([[1.0, 0.0], [0.5, 0.5]])),
        ValueError,
        "column 0 | must sum to 1 | on the diagonal",
    ),
}
OPTIMIZERS: dict[str, Case] = {
    "a class": (
        lambda: around(torch.optim.SGD),
        TypeError,
        "is type | an optimizer has step, zero_grad, param_groups | not its class",
    ),
    "parameters": (
        lambda: around(parameters()),
        TypeError,
        "is generator | an optimizer has step, zero_grad, param_groups | not its class or its",
    ),
    "nothing": (
        lambda: around(None),
        TypeError,
        "is NoneType | an optimizer has step, zero_grad, param_groups | the optimizer object",
    ),
    "wrapped twice": (
        lambda: around(wrap(local_sgd(1))),
        TypeError,
        "a ConsensusOptimizer already | one method | optimizer.inner",
    ),
    "method by its name": (
        lambda: wrap("local_sgd"),
        TypeError,
        "is 'local_sgd' | must be a Method | local_sgd(",
    ),
    "method not called": (
        lambda: wrap(local_sgd),
        TypeError,
        "<function local_sgd | must be a Method | dppf()",
    ),
    "model is parameters": (
        lambda: wrap(local_sgd(1), model=parameters()),
        TypeError,
        "<generator | a torch.nn.Module | model=model",
    ),
    "transport by its name": (
        lambda: wrap(local_sgd(1), transport="gloo"),
        TypeError,
        "'gloo' | must be a Transport | TorchTransport(group)",
    ),
    "transport class": (
        lambda: wrap(local_sgd(1), transport=StackedTransport),
        TypeError,
        "<class | must be a Transport | leave it out",
    ),
    "no steps": (
        lambda: wrap(local_sgd(1), total_steps=0),
        ValueError,
        "total_steps is 0 | at least 1 | epochs * len(loader)",
    ),
    "steps of a half": (
        lambda: wrap(local_sgd(1), total_steps=2.5),
        TypeError,
        "total_steps is 2.5 | an integer | epochs * len(loader)",
    ),
    "telemetry is a path": (
        lambda: wrap(local_sgd(1), telemetry="rounds.jsonl"),
        TypeError,
        "got 'rounds.jsonl' | accept a RoundRecord | JsonLines(",
    ),
    "telemetry holds a number": (
        lambda: wrap(local_sgd(1), telemetry=[print, 3]),
        TypeError,
        "got 3 | accept a RoundRecord | records.append",
    ),
    "telemetry is a class": (
        lambda: wrap(local_sgd(1), telemetry=JsonLines),
        TypeError,
        "got <class | accept a RoundRecord | JsonLines('",
    ),
    "timeout zero": (
        lambda: wrap(local_sgd(1), timeout=0),
        ValueError,
        "timeout is 0 | above 0 | timeout=300.0",
    ),
    "timeout infinite": (
        lambda: wrap(local_sgd(1), timeout=math.inf),
        ValueError,
        "timeout is inf | finite | timeout=300.0",
    ),
    "timeout a word": (
        lambda: wrap(local_sgd(1), timeout="60"),
        TypeError,
        "timeout is '60' | a finite number | timeout=300.0",
    ),
    "no workers": (
        lambda: StackedTransport(0),
        ValueError,
        "is 0 | at least 1 | StackedTransport(8)",
    ),
    "workers without rows": (
        lambda: wrap(local_sgd(1), workers=3),
        ValueError,
        "shape (2, 2) | one row a worker | stack the workers' parameters",
    ),
    "torch.distributed not initialised": (
        lambda: TorchTransport(),
        RuntimeError,
        "not initialised | needs torch.distributed | init_process_group('gloo')",
    ),
    "simulation of no workers": (
        lambda: Simulation(nn.Linear(2, 2), 0, local_sgd(1)),
        ValueError,
        "n is 0 | at least 1 | Simulation(model, 16",
    ),
    "simulation of nothing trainable": (
        lambda: Simulation(nn.ReLU(), 2, local_sgd(1)),
        ValueError,
        "no trainable parameters | at least one | requires_grad_(True)",
    ),
    "simulation of two dtypes": (
        lambda: Simulation(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), 2, local_sgd(1)
        ),
        ValueError,
        "'torch.float32', 'torch.float64' | exactly one | model.float()",
    ),
    "simulation of no module": (
        lambda: Simulation(3, 2, local_sgd(1)),
        TypeError,
        "model is 3 | one torch.nn.Module | Simulation(model, n, method)",
    ),
    "simulation with an optimizer": (
        lambda: Simulation(nn.Linear(2, 2), 2, local_sgd(1), torch.optim.SGD(parameters())),
        TypeError,
        "of type SGD | a function that makes one | lambda p: torch.optim.SGD",
    ),
}
CASES = {**METHODS, **TOPOLOGIES, **OPTIMIZERS}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_fails_at_once_and_says_what_to_write(case: str) -> None:
    call, kind, parts = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert [part for part in parts.split(" | ") if part not in text] == []


def test_a_launched_process_without_an_engine_is_told_how_to_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        RuntimeError, match=r"4 processes.*WORLD_SIZE.*init_process_group\('gloo'\)"
    ):
        wrap(local_sgd(1))


def refusal(**options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as raised:
        TorchTransport(**options)
    return f"{type(raised.value).__name__}: {raised.value}"


def make_transports(rank: int) -> list[str]:
    group = dist.new_group([0, 2])
    messages = [refusal(timeout=-1.0), refusal(chunk_bytes=0), refusal(timeout="60")]
    return messages + ([refusal(group=group)] if rank == 1 else [])


def test_a_transport_refuses_a_group_that_the_rank_is_not_in_and_wrong_numbers() -> None:
    outcomes = run_ranks(3, make_transports)
    for messages in outcomes:
        assert [message.split(";")[0] for message in messages[:3]] == [
            "ValueError: timeout is -1.0",
            "ValueError: chunk_bytes is 0",
            "TypeError: timeout is '60'",
        ]
    assert [len(messages) for messages in outcomes] == [3, 4, 3]
    assert "rank 1 is not in the process group given" in outcomes[1][3]
    assert "pass the group that this rank belongs to" in outcomes[1][3]
