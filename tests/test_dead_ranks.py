"""A rank that dies, stops, fails or sleeps: the others raise an error that names it (C9)."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from consensus_opt import ConsensusOptimizer, Method, PeerError, gossip_sgd, local_sgd
from tests.harness import RankFailed, run_ranks, run_ranks_loosely

TIMEOUT, SPARE = 4.0, 12.0
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(1),
    "ring": gossip_sgd("ring"),
    "one_peer": gossip_sgd("one_peer_exponential"),
}


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise ValueError("a bad batch")
    time.sleep(2 * TIMEOUT + SPARE)


def train_until_rank_1_fails(rank: int, name: str, how: str) -> tuple[tuple[int, ...], str]:
    torch.manual_seed(0)
    model = nn.Linear(300, 400)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = ConsensusOptimizer(inner, METHODS[name], timeout=TIMEOUT)
    for _ in range(3):
        optimizer.step()
    if rank == 1:
        fail(how)
    try:
        for _ in range(4):  # the news takes a step to come to who is not a neighbour
            optimizer.step()
    except PeerError as error:
        return error.ranks, str(error)
    return (), "nothing happened"


@pytest.mark.parametrize("how", ["kill", "stop", "raise", "sleep"])
def test_R038_R094_a_rank_that_does_not_answer_is_named_by_all_others_in_time(how: str) -> None:
    def run(name: str) -> list[Any]:
        # Noticed within the timeout, agreed on within another one.
        limit = 2 * TIMEOUT + SPARE
        return run_ranks_loosely(4, train_until_rank_1_fails, name, how, timeout=limit, lost=[1])

    with ThreadPoolExecutor() as pool:
        outcomes = dict(zip(METHODS, pool.map(run, METHODS), strict=True))
    for name, outcome in outcomes.items():
        for rank in (0, 2, 3):
            assert not isinstance(outcome[rank], RankFailed), f"{name}: {outcome[rank]}"
            ranks, text = outcome[rank]
            assert ranks == (1,), f"{name}, rank {rank}: {text}"
            assert f"rank 1 does not answer rank {rank} within 4 s: dead, stopped" in text
            assert "Look at the log of that rank" in text


def be_late(rank: int, name: str) -> int:
    model = nn.Linear(3, 4)
    optimizer = ConsensusOptimizer(SGD(model.parameters(), lr=0.1), METHODS[name], timeout=60)
    for step in range(3):
        if step == rank:
            time.sleep(0.5)
        optimizer.step()
    return optimizer.rounds


@pytest.mark.parametrize("name", METHODS)
def test_ranks_that_are_late_within_the_timeout_are_waited_for(name: str) -> None:
    assert run_ranks(3, be_late, name) == [3, 3, 3]
