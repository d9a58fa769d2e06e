"""torch.distributed.checkpoint saves workers that differ, and its own steps do not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from consensus_opt import ConsensusOptimizer, gossip_sgd, local_sgd
from tests.harness import run_ranks
from tests.problems import flat, mlp, same, train

STEPS, STOP = 7, 4


def make(seed: int = 0) -> tuple[nn.Module, ConsensusOptimizer]:
    model = mlp(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = gossip_sgd("one_peer_exponential", period=3)
    return model, ConsensusOptimizer(inner, method, timeout=30)


def parts(model: nn.Module, optimizer: ConsensusOptimizer, how: str) -> dict[str, Any]:
    """What is saved, and loaded in place."""
    which = optimizer.inner if how == "inner" else optimizer
    weights, state = get_state_dict(model, which)
    return {
        "model": weights,
        "optimizer": state,
        "consensus": optimizer.state_dict()["consensus"],
    }


def put(model: nn.Module, optimizer: ConsensusOptimizer, how: str, saved: dict[str, Any]) -> None:
    set_state_dict(
        model,
        optimizer.inner if how == "inner" else optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    optimizer.load_state_dict({"consensus": saved["consensus"]})


def save_and_resume(rank: int, folder: str, how: str) -> tuple[Tensor, Tensor, int]:
    model, optimizer = make()
    train(model, optimizer, range(STOP), rank)
    dcp.save({f"worker {rank}": parts(model, optimizer, how)}, checkpoint_id=folder)
    train(model, optimizer, range(STOP, STEPS), rank)

    other, resumed = make(seed=9)
    saved = {f"worker {rank}": parts(other, resumed, how)}
    assert (resumed.clock, resumed.rounds) == (0, 0)
    dcp.load(saved, checkpoint_id=folder)
    put(other, resumed, how, saved[f"worker {rank}"])
    assert resumed.clock == STOP
    train(other, resumed, range(STOP, STEPS), rank)
    return flat(model), flat(other), resumed.rounds


@pytest.mark.filterwarnings("ignore:the checkpoint has no")
@pytest.mark.parametrize("how", ["inner", "wrapper"])
def test_workers_that_differ_resume_with_the_same_bits(how: str, tmp_path: Any) -> None:
    outcomes = run_ranks(2, save_and_resume, str(tmp_path), how)
    for end, resumed, rounds in outcomes:
        assert same(end, resumed)
        assert rounds == 2
    assert not same(outcomes[0][0], outcomes[1][0])


def save_the_mean(rank: int, folder: str) -> tuple[Tensor, Tensor]:
    model, optimizer = make()
    train(model, optimizer, range(STOP), rank)
    with optimizer.averaged():
        mean = flat(model)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = mlp(seed=5)
    saved = {"model": loaded.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    loaded.load_state_dict(saved["model"])
    return mean, flat(loaded)


def test_the_mean_model_is_saved_once_for_all(tmp_path: Any) -> None:
    for mean, loaded in run_ranks(2, save_the_mean, str(tmp_path)):
        assert same(mean, loaded)


def ask_for_state(rank: int, name: str) -> list[tuple[int, int]]:
    model = mlp()
    kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[name]
    optimizer = ConsensusOptimizer(kind(model.parameters(), lr=0.1), local_sgd(1), timeout=30)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        before = flat(model)
        if rank == 0:  # it fills the state by a step where there is none
            get_state_dict(model, optimizer)
        assert same(flat(model), before)
        assert optimizer.param_groups[0]["lr"] == 0.1
        seen.append((optimizer.clock, optimizer.rounds))
        train(model, optimizer, [step], rank)
    return seen


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_step_that_fills_an_optimizers_state_is_none_of_the_training(name: str) -> None:
    assert run_ranks(2, ask_for_state, name) == [[(0, 0), (1, 1), (2, 2)]] * 2
