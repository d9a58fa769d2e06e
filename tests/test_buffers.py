"""The mean model's buffers: averaged, local or recomputed; and every bit comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from consensus_opt import ConsensusOptimizer, Recompute, dppf
from tests.harness import run_ranks, run_ranks_loosely
from tests.problems import assert_says, batch, mlp, same, train

BATCHES = (3, 1, 0)
"""How many batches each rank recomputes statistics from."""


def batch_norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def trained(rank: int) -> tuple[nn.Sequential, ConsensusOptimizer]:
    model = batch_norm_net()
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), dppf(period=2), model=model, timeout=30
    )
    train(model, optimizer, range(3 + rank % 2), rank)  # counters differ
    while optimizer.clock < 4:
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def loader(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(rank, 50 + step) for step in range(BATCHES[rank])]


def see_each_policy(rank: int) -> dict[str, dict[str, Tensor]]:
    model, optimizer = trained(rank)
    model[2].eval()  # a mode of its own
    seen = {"own": everything(model)}
    with optimizer.averaged():
        seen["average"] = everything(model)
    with optimizer.averaged(buffers="local"):
        seen["local"] = everything(model)
    with optimizer.averaged(buffers=Recompute(loader(rank))):
        assert [module.training for module in model] == [True, True, False, True]
        assert model[1].momentum == 0.1
        seen["recompute"] = everything(model)
    seen["after"] = everything(model)
    return seen


@pytest.fixture(scope="module")
def policies() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(3, see_each_policy)


def test_R139_R140_floating_point_buffers_are_averaged_and_counters_are_not(
    policies: list[dict[str, dict[str, Tensor]]],
) -> None:
    for rank, seen in enumerate(policies):
        for name, own in seen["own"].items():
            mean = torch.stack([other["own"][name].double() for other in policies]).mean(0)
            expected = own if name.endswith("num_batches_tracked") else mean.to(own.dtype)
            torch.testing.assert_close(seen["average"][name], expected)
            if "running" not in name:
                assert same(seen["local"][name], seen["average"][name])
            else:
                assert same(seen["local"][name], policies[rank]["own"][name])
    assert len({int(seen["own"]["1.num_batches_tracked"]) for seen in policies}) == 2


def test_R142_statistics_are_recomputed_over_all_batches_of_all_ranks(
    policies: list[dict[str, dict[str, Tensor]]],
) -> None:
    model = batch_norm_net()
    model.load_state_dict(policies[0]["average"])
    update_bn([each for rank in range(3) for each in loader(rank)], model)
    for seen in policies:
        for name, value in seen["recompute"].items():
            if "running" in name:
                torch.testing.assert_close(value, model.state_dict()[name])
                assert same(value, policies[0]["recompute"][name])
            else:
                assert same(value, seen["average"][name])


def test_every_bit_is_as_before_after_each_policy(
    policies: list[dict[str, dict[str, Tensor]]],
) -> None:
    for seen in policies:
        assert same(seen["after"], seen["own"])


def replace_buffers(model: nn.Module) -> None:
    model[1].running_mean = torch.ones(8)


def train_on(model: nn.Module) -> None:
    model.train()(batch(0, 99)[0])


def fail(model: nn.Module) -> None:
    raise ZeroDivisionError


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "values": lambda model: [p.data.zero_() for p in model.parameters()],
    "load": lambda model: model.load_state_dict(batch_norm_net().state_dict()),
    "assign": lambda model: setattr(model[0].weight, "data", torch.ones(8, 6)),
    "buffers": replace_buffers,
    "forward": train_on,
    "exception": fail,
}


def change_within(rank: int) -> dict[str, bool]:
    results = {}
    for name, change in CHANGES.items():
        model, optimizer = trained(rank)
        own, identities = everything(model), [id(b) for b in model.buffers()]
        try:
            with optimizer.averaged():
                change(model)
        except ZeroDivisionError:
            assert name == "exception"
        restored = same(everything(model), own)
        restored &= identities == [id(b) for b in model.buffers()]
        train(model, optimizer, range(4, 6), rank)
        results[name] = restored and not same(everything(model), own)
    return results


def test_whatever_the_block_does_to_the_model_is_undone() -> None:
    for outcome in run_ranks(2, change_within):
        assert outcome == dict.fromkeys(CHANGES, True)


def synchronize_recomputed(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = trained(rank)
    before = everything(model)
    with optimizer.averaged(buffers=Recompute(loader(rank), device="cpu")):
        mean = everything(model)
    optimizer.synchronize(buffers=Recompute(loader(rank), device="cpu"))
    assert same(everything(model), mean)
    return before, mean


def test_synchronize_can_recompute_too_and_keeps_counters() -> None:
    for before, mean in run_ranks(3, synchronize_recomputed):
        assert same(before["1.num_batches_tracked"], mean["1.num_batches_tracked"])


def broken(rank: int) -> Iterator[Tensor]:
    yield batch(rank, 0)[0]
    if rank == 1:
        raise OSError("disk gone")


def fail_to_recompute(rank: int, empty: bool) -> str:
    model, optimizer = trained(rank)
    own, text = everything(model), ""
    batches: Any = [] if empty else broken(rank)
    try:
        with optimizer.averaged(buffers=Recompute(batches)):
            raise AssertionError("entered")
    except (RuntimeError, ValueError) as error:
        text = str(error)
    assert same(everything(model), own)
    assert model.training
    assert model[1].momentum == 0.1
    optimizer.step()
    return text


@pytest.mark.parametrize(
    ("empty", "text"),
    [(False, "ranks [1] could not recompute BatchNorm"), (True, "no BatchNorm layer has seen")],
)
def test_a_pass_that_fails_on_one_rank_fails_on_all_and_leaves_everything_as_it_was(
    empty: bool, text: str
) -> None:
    assert all(text in outcome for outcome in run_ranks(2, fail_to_recompute, empty))


def differ_in_policy(rank: int) -> None:
    _, optimizer = trained(rank)
    with optimizer.averaged(buffers="local" if rank else "average"):
        pass


def test_ranks_that_differ_in_policy_are_told() -> None:
    for outcome in run_ranks_loosely(2, differ_in_policy):
        assert "rank 0: averaged(), rank 1: averaged(buffers='local')" in str(outcome)


def test_one_worker_recomputes_as_update_bn_does() -> None:
    model = batch_norm_net()
    optimizer = ConsensusOptimizer(torch.optim.SGD(model.parameters()), dppf(), model=model)
    twin = copy.deepcopy(model)
    update_bn(loader(0), twin)
    with optimizer.averaged(buffers=Recompute(loader(0))):
        assert same(model[1].running_var, twin[1].running_var)


def test_a_wrong_policy_is_refused_with_what_to_write() -> None:
    model = batch_norm_net()
    inner = torch.optim.SGD(model.parameters())
    bare = ConsensusOptimizer(inner, dppf())
    plain = ConsensusOptimizer(inner, dppf(), model=mlp())
    for case in (
        (lambda: bare.synchronize("mean"), ValueError, "'mean' | must be | averaged(buffers="),
        (lambda: bare.synchronize(Recompute([])), ValueError, "is None | layers | model=model"),
        (lambda: plain.synchronize(Recompute([])), ValueError, "has none | layers | leave"),
    ):
        assert_says(case)
