"""Many rounds of all kinds in one job: memory, files and threads stay as they are.

200 rounds in CI; 2,000 with CONSENSUS_OPT_LONG=1.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    consensus_control,
    dppf,
    gossip_sgd,
    local_sgd,
    quadratic_sync,
)
from tests.harness import run_ranks
from tests.launchers import launch, report
from tests.problems import batch
from tests.thoroughness import LONG

ROUNDS = 2000 if LONG else 200
METHODS: list[Callable[[], Method]] = [
    lambda: local_sgd(1),
    lambda: dppf(0.1, 0.1, period=1),
    lambda: gossip_sgd("ring", state="average"),
    lambda: gossip_sgd("one_peer_exponential", exchanges=2),
    lambda: gossip_sgd("random_matching"),
    lambda: consensus_control("ring", 0.1, (0.0, 1.0)),
    lambda: quadratic_sync(0.1, min_period=1),
]


def held() -> tuple[int, int, int, int]:
    """Resident bytes, open files, threads of the system, and of Python."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, tasks = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), files, tasks, threading.active_count()


def soak(rank: int, rounds: int) -> list[tuple[int, int, int, int]]:
    """What is held after a fifth of the rounds, which warm up, and at the end."""
    model = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3))
    optimizers = [
        ConsensusOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), make(), timeout=60
        )
        for make in METHODS
    ]
    found = []
    for number in range(rounds):
        optimizer = optimizers[number % len(optimizers)]
        optimizer.zero_grad()
        x, y = batch(rank, number)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number % 50 == 49:
            with optimizer.averaged():
                optimizer.consensus_distance()
            optimizer.load_state_dict(optimizer.state_dict())
        if number + 1 in (rounds // 5, rounds):
            found.append(held())
    return found


def check(ranks: list[list[tuple[int, int, int, int]]]) -> None:
    for warm, end in ranks:
        assert end[1:] == warm[1:], f"files and threads grew from {warm[1:]} to {end[1:]}"
        assert end[0] - warm[0] < 8 << 20, f"memory grew by {end[0] - warm[0]} bytes"


def test_nothing_grows_over_many_rounds() -> None:
    check(run_ranks(4, soak, ROUNDS, timeout=1200 if LONG else 120))


@pytest.mark.mpi
def test_nothing_grows_over_many_rounds_of_mpi() -> None:
    check(launch("mpirun", 2, "tests.test_soak", timeout=1200 if LONG else 120))


if __name__ == "__main__":
    from mpi4py import MPI

    report(MPI.COMM_WORLD.Get_rank(), soak(MPI.COMM_WORLD.Get_rank(), ROUNDS))
