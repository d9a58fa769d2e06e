"""A rank that is killed or stopped really inside an exchange, averaged(), synchronize() or save().

The others raise an error that names it within the timeout; a state that was being saved is not
there, and the one before it still loads. A rank that goes on in time changes nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from consensus_opt import ConsensusOptimizer, PeerError, checkpoint, gossip_sgd
from consensus_opt.integrations.torch_distributed import TorchTransport
from tests.harness import RankFailed, run_ranks, run_ranks_loosely
from tests.problems import flat, same, train

TIMEOUT = 4.0
CALLS = ("step", "averaged", "synchronize", "save")


class Fails(TorchTransport):
    """Rank 1 gets a signal after some chunks of an exchange, or in a mean, once it is armed."""

    signal = 0
    chunks = 0

    def post(self, *arguments: Any) -> Any:
        self.chunks += 1
        self._fail(self.chunks == 3)
        return super().post(*arguments)

    def start_mean(self, flat: torch.Tensor, out: torch.Tensor) -> Any:
        self._fail(True)
        return super().start_mean(flat, out)

    def _fail(self, now: bool) -> None:
        if self.signal and now and self.rank == 1:
            number, self.signal = self.signal, 0
            if number == signal.SIGCONT:  # stopped for a while
                wake = f"sleep 0.5; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake])
                number = signal.SIGSTOP
            os.kill(os.getpid(), number)


def make(rank: int) -> tuple[nn.Module, ConsensusOptimizer, Fails]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 500), nn.Linear(500, 3))
    transport = Fails(timeout=TIMEOUT, chunk_bytes=1000)
    inner = SGD(model.parameters(), lr=0.1)
    return model, ConsensusOptimizer(inner, gossip_sgd("ring"), transport=transport), transport


def fail_inside(rank: int, call: str, number: int, folder: str) -> tuple[tuple[int, ...], str]:
    model, optimizer, transport = make(rank)
    train(model, optimizer, range(2), rank)
    checkpoint.save(folder, model, optimizer)
    train(model, optimizer, [2], rank)
    transport.signal, transport.chunks = number, 0
    try:
        if call == "averaged":
            with optimizer.averaged():
                pass
        elif call == "save":
            checkpoint.save(folder, model, optimizer)
        elif call == "synchronize":
            optimizer.synchronize()
        else:
            train(model, optimizer, range(3, 6), rank)
    except PeerError as error:
        return error.ranks, str(error)
    return (), "nothing happened"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_fails_inside_a_call_is_named_and_the_last_state_loads(
    call: str, number: int, tmp_path: Path
) -> None:
    arguments = (call, int(number), str(tmp_path))
    outcomes = run_ranks_loosely(3, fail_inside, *arguments, timeout=40, lost=[1])
    for rank in (0, 2):
        assert not isinstance(outcomes[rank], RankFailed), outcomes[rank]
        ranks, text = outcomes[rank]
        assert ranks == (1,), text
    assert checkpoint.latest(tmp_path) == 2
    for rank, stop in enumerate(run_ranks(3, load, str(tmp_path))):
        assert stop == 2, rank


def load(rank: int, folder: str) -> int:
    model, optimizer, _ = make(rank)
    checkpoint.load(folder, model, optimizer)
    train(model, optimizer, [2], rank)
    return optimizer.clock - 1


def go_on(rank: int, number: int) -> torch.Tensor:
    model, optimizer, transport = make(rank)
    train(model, optimizer, range(2), rank)
    transport.signal, transport.chunks = number, 0
    train(model, optimizer, range(2, 5), rank)
    return flat(model)


def test_a_rank_that_was_stopped_for_a_while_goes_on_with_the_same_bits() -> None:
    undisturbed = run_ranks(3, go_on, 0)
    for found, expected in zip(run_ranks(3, go_on, int(signal.SIGCONT)), undisturbed, strict=True):
        assert same(found, expected)
