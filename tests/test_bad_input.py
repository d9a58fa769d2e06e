"""Wrong arguments fail where they are given, and say what is allowed and what to write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from consensus_opt import (
    ConsensusOptimizer,
    JsonLines,
    StackedTransport,
    local_sgd,
)
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.simulation import Simulation
from tests.harness import run_ranks
from tests.problems import Case, assert_says


def wrap(*arguments: Any, workers: int | None = None, **options: Any) -> ConsensusOptimizer:
    model = nn.Linear(2, 2)
    if workers is not None:
        options["transport"] = StackedTransport(workers)
    return ConsensusOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), *arguments, **options)


def around(optimizer: Any) -> ConsensusOptimizer:
    return ConsensusOptimizer(optimizer, local_sgd(1))


def parameters() -> Any:
    return nn.Linear(2, 2).parameters()


CASES: dict[str, Case] = {
    "a word for False": (
        lambda: wrap(local_sgd(1), broadcast="no"),
        TypeError,
        "broadcast is 'no' | True or False | broadcast=False",
    ),
    "join of another kind": (
        lambda: wrap(local_sgd(1)).join("later").__enter__(),
        ValueError,
        "uneven is 'later' | one of ('continue', 'stop') | optimizer.join('continue')",
    ),
    "torch's Join without torch.distributed": (
        lambda: Join([wrap(local_sgd(1))]),
        TypeError,
        "the transport is <consensus_opt | torch.distributed | optimizer.join()",
    ),
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


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_fails_at_once_and_says_what_to_write(case: str) -> None:
    assert_says(CASES[case])


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
