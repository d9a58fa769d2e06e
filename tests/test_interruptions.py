"""Calls that break off in the middle, come from the wrong place, or whose telemetry fails."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from consensus_opt import (
    ConsensusOptimizer,
    JsonLines,
    Method,
    PeerError,
    dppf,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.integrations.torch_distributed import TorchTransport
from tests.harness import run_ranks
from tests.problems import flat, mlp, random_rows, same, stacked, train

TIMEOUT = 3.0
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(1),
    "ring": gossip_sgd("ring"),
    "dppf": dppf(0.1, 0.1, period=1),
}


class Interrupted(TorchTransport):
    """Ctrl-C at the start of the first message after ``armed``, in the middle of a call."""

    armed = False

    def start_mean(self, flat: torch.Tensor, out: torch.Tensor) -> Any:
        self._interrupt()
        return super().start_mean(flat, out)

    def start_exchange(self, *arguments: Any) -> Any:
        self._interrupt()
        return super().start_exchange(*arguments)

    def _interrupt(self) -> None:
        if self.armed and self.rank == 1:
            raise KeyboardInterrupt


def texts_after_ctrl_c(rank: int, name: str, call: str) -> tuple[bool, str, str]:
    """Whether the parameters are as before, what this call said, and what the next one says."""
    model = mlp()
    transport = Interrupted(timeout=TIMEOUT)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = ConsensusOptimizer(inner, METHODS[name], transport=transport)
    train(model, optimizer, range(2), rank)
    transport.armed, before = True, flat(model).clone()
    said = [what_it_says(optimizer, call) for _ in range(2)]
    return same(flat(model), before), said[0], said[1]


def what_it_says(optimizer: ConsensusOptimizer, call: str) -> str:
    try:
        if call == "averaged":
            with optimizer.averaged():
                pass
        else:
            getattr(optimizer, call)()
    except (KeyboardInterrupt, PeerError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing happened"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("local_sgd", "step"), ("ring", "step"), ("dppf", "step")),
        *(("ring", "averaged"), ("ring", "synchronize"), ("ring", "consensus_distance")),
    ],
)
def test_after_ctrl_c_in_the_middle_of_a_call_no_rank_hangs_and_the_next_call_is_refused(
    name: str, call: str
) -> None:
    outcomes = run_ranks(3, texts_after_ctrl_c, name, call)
    for rank, (unchanged, first, second) in enumerate(outcomes):
        if rank == 1:
            assert first == "KeyboardInterrupt "
            assert "PeerError an earlier call of rank 1 broke off in the middle (Keyboard" in second
        else:
            assert "rank 1 does not answer" in first or "ranks [1" in first, first
            assert f"earlier call of rank {rank} broke off in the middle (PeerError" in second
        assert "give all of them a new transport" in second
        if call == "averaged":
            assert unchanged


def go_on_with_a_new_transport(rank: int) -> tuple[Any, Any]:
    model = mlp()
    transport = Interrupted(timeout=TIMEOUT)
    optimizer = ConsensusOptimizer(
        SGD(model.parameters(), lr=0.1), local_sgd(2), transport=transport
    )
    train(model, optimizer, range(2), rank)
    saved = flat(model).clone(), optimizer.state_dict()
    transport.armed = True
    with pytest.raises((KeyboardInterrupt, PeerError)):
        train(model, optimizer, range(2, 4), rank)
    torch.nn.utils.vector_to_parameters(saved[0], model.parameters())
    optimizer.load_state_dict(saved[1])
    optimizer.transport = TorchTransport(timeout=60)
    train(model, optimizer, range(2, 6), rank)
    twin = mlp()
    undisturbed = ConsensusOptimizer(SGD(twin.parameters(), lr=0.1), local_sgd(2), timeout=60)
    train(twin, undisturbed, range(6), rank)
    return flat(model), flat(twin)


def test_all_ranks_go_on_from_a_checkpoint_with_a_new_transport() -> None:
    for resumed, undisturbed in run_ranks(2, go_on_with_a_new_transport):
        assert same(resumed, undisturbed)


def call_from_a_fork(rank: int) -> tuple[str, int]:
    optimizer = ConsensusOptimizer(SGD(mlp().parameters(), lr=0.1), local_sgd(1), timeout=60)
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            optimizer.step()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 4096).decode()
    os.wait()
    optimizer.step()
    return text, optimizer.rounds


def test_a_forked_process_is_refused_and_its_parent_goes_on() -> None:
    for rank, (text, rounds) in enumerate(run_ranks(2, call_from_a_fork)):
        assert f"was forked from rank {rank}" in text
        assert "in the process that made the optimizer" in text
        assert rounds == 1


def call_from_two_threads(rank: int) -> tuple[str, int]:
    optimizer = ConsensusOptimizer(SGD(mlp().parameters(), lr=0.1), local_sgd(1), timeout=60)
    text = ""
    thread = threading.Thread(target=optimizer.step)
    if rank == 1:
        dist.barrier()
    thread.start()
    if rank == 0:  # whose thread is in the round, and waits for rank 1
        time.sleep(0.3)
        try:
            optimizer.synchronize()
        except RuntimeError as error:
            text = str(error)
        dist.barrier()
    thread.join()
    optimizer.step()
    return text, optimizer.rounds


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    (text, rounds), other = run_ranks(2, call_from_two_threads)
    assert "while another thread is in step()" in text
    assert (rounds, other) == (2, ("", 2))


def step_after_shutdown(rank: int, folder: str) -> tuple[str, float]:
    optimizer = ConsensusOptimizer(SGD(mlp().parameters(), lr=0.1), local_sgd(1), timeout=60)
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    seconds = time.monotonic() - started
    store = f"file://{folder}/store"  # for the harness, which ends with a barrier
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    return str(raised.value), seconds


def test_a_step_after_shutdown_says_so_at_once_and_waits_for_nobody(tmp_path: Path) -> None:
    for text, seconds in run_ranks(2, step_after_shutdown, str(tmp_path)):
        assert "torch.distributed was shut down: destroy_process_group() was called" in text
        assert seconds < 30


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 1e-9, 1e300, 10**400, True, "60"])
def test_a_timeout_that_no_engine_can_keep_is_refused(timeout: Any) -> None:
    inner = SGD(nn.Linear(2, 2).parameters())
    with pytest.raises((TypeError, ValueError), match=r"timeout is .*; it must be .*timeout=300.0"):
        ConsensusOptimizer(inner, local_sgd(1), timeout=timeout)


def fail(_: Any) -> None:
    raise LookupError("a bad sink")


def test_telemetry_that_fails_warns_and_training_goes_on(tmp_path: Path) -> None:
    rows = random_rows(3, 5)
    quiet, optimizer = stacked(rows, gossip_sgd("ring"))
    for _ in range(4):
        optimizer.step()
    folder = tmp_path / "log"
    sinks = [fail, JsonLines("/dev/full"), JsonLines(folder / "rounds.jsonl")]
    loud, optimizer = stacked(rows, gossip_sgd("ring"), telemetry=sinks)
    with pytest.warns(RuntimeWarning, match="raised LookupError: a bad sink; training goes on"):
        optimizer.step()
    (folder / "rounds.jsonl").rename(folder / "kept")
    (folder / "kept").rename(tmp_path / "kept")
    folder.rmdir()
    folder.write_text("a file where the folder was")
    with pytest.warns(RuntimeWarning, match="JsonLines.* raised OSError.*No space left on device"):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="raised .*Exists"):
        optimizer.step()
    folder.unlink()
    with pytest.warns(RuntimeWarning, match="a bad sink"):
        optimizer.step()
    assert same(loud, quiet)
    lines = [*(tmp_path / "kept").open(), *(folder / "rounds.jsonl").open()]
    assert [json.loads(line)["step"] for line in lines] == [1, 4]
