"""phi^2, the mean squared gradient norm, against norms taken by hand right after backward."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from consensus_opt import ConsensusOptimizer, GradientNorm, StackedTransport, consensus_control
from consensus_opt.gradients import GradientMeter
from consensus_opt.optimizer import KEY
from consensus_opt.simulation import Simulation
from tests.harness import run_ranks
from tests.problems import batch, embedding, loss_of, mlp, same

METHOD = consensus_control("ring", GradientNorm(0.25, decay=0.0), during=(0.0, 1.0))


def squared_norm(model: nn.Module) -> float:
    """||g||^2 of all gradients, as they are now."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(float(g.to_dense().double().abs().square().sum()) for g in gradients)


def hooks_of(module: nn.Module) -> int:
    """Hooks that are called after gradients were accumulated."""
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def met(model: nn.Module) -> GradientMeter:
    meter = GradientMeter(())
    meter.watch(list(model.parameters()))
    return meter


def taken(meter: GradientMeter) -> tuple[float, float]:
    squared, steps = meter.take().tolist()
    return squared, steps


# ------------------------------------------------------------------ the meter


def test_each_backward_pass_is_measured_as_by_hand_and_steps_are_summed() -> None:
    model = mlp()
    meter, by_hand = met(model), []
    for step in range(3):
        model.zero_grad()
        loss_of(model, 0, step).backward()
        by_hand.append(squared_norm(model))
        meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(sum(by_hand)), 3)
    assert taken(meter) == (0, 0)


def test_accumulated_gradients_are_measured_as_their_sum() -> None:
    model = mlp()
    meter = met(model)
    for part in range(3):
        loss_of(model, 0, part).backward()
    by_hand = squared_norm(model)
    meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(by_hand), 1)


def test_clipping_and_weight_decay_come_after_the_measurement() -> None:
    model = mlp()
    meter = met(model)
    loss_of(model, 0, 0).backward()
    by_hand = squared_norm(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(by_hand), 1)
    assert squared_norm(model) < 1.1e-6


def test_gradients_that_were_assigned_are_measured_as_they_are() -> None:
    model = mlp()
    meter = met(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    meter.add(list(model.parameters()), None)
    values = sum(p.numel() for p in model.parameters())
    assert taken(meter) == (pytest.approx(4.0 * values), 1)


def test_sparse_gradients_are_summed_where_they_meet() -> None:
    model = embedding()
    meter = met(model)
    loss_of(model, 0, 0).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.is_sparse
    meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(squared_norm(model)), 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_every_dtype_is_measured_in_at_least_fp32(dtype: torch.dtype) -> None:
    module = nn.ParameterList([torch.ones(1000, dtype=dtype), torch.ones(())])
    meter = met(module)
    (300 * module[0]).abs().sum().float().backward()
    module[1].pow(2).backward()
    meter.add(list(module.parameters()), None)
    # 1000 * 300^2 is beyond fp16, and not lost in bf16.
    assert taken(meter) == (pytest.approx(1000 * 300.0**2 + 4, rel=1e-6), 1)


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    model = nn.ModuleList([mlp(0), mlp(1)])
    meter = met(model)
    loss_of(model[0], 0, 0).backward()
    meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(squared_norm(model[0])), 1)
    meter.add([], None)
    assert taken(meter) == (0, 1)


def test_parameters_are_watched_from_the_step_after_they_join_and_not_after_they_leave() -> None:
    model = mlp()
    first, *others = model.parameters()
    meter = GradientMeter(())
    meter.watch(others)
    assert hooks_of(model) == len(others)
    for trained in (others, [first, *others], [first], others):
        model.zero_grad()
        loss_of(model, 0, 0).backward()
        by_hand = sum(float(p.grad.double().square().sum()) for p in trained)
        meter.add(trained, None)
        assert taken(meter) == (pytest.approx(by_hand), 1)
        assert hooks_of(model) == len(trained)


def test_stacked_workers_are_measured_each_for_itself() -> None:
    rows = nn.Parameter(torch.zeros(3, 5))
    wide = nn.Parameter(torch.zeros(3, 2, 2))
    meter = GradientMeter((3,))
    meter.watch([rows, wide])
    scale = torch.tensor([1.0, 2.0, 3.0])
    (rows.sum(1) @ scale + wide.sum((1, 2)) @ scale).backward()
    meter.add([rows, wide], None)
    expected = torch.stack([9 * scale.double() ** 2, torch.ones(3, dtype=torch.float64)], dim=-1)
    torch.testing.assert_close(meter.take(), expected)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_step_that_overflowed_is_not_counted(bad: float) -> None:
    model = mlp()
    meter = met(model)
    loss_of(model, 0, 0).backward()
    by_hand = squared_norm(model)
    meter.add(list(model.parameters()), None)
    model.zero_grad()
    (bad * loss_of(model, 0, 1)).backward()
    meter.add(list(model.parameters()), None)
    assert taken(meter) == (pytest.approx(by_hand), 1)


def test_hooks_go_with_the_meter() -> None:
    model = mlp()
    meter = met(model)
    assert hooks_of(model) == 4
    del meter
    gc.collect()
    assert hooks_of(model) == 0
    loss_of(model, 0, 0).backward()


# ------------------------------------------------------------------ under GradScaler


def amp_phi(
    loop: Callable[[nn.Module, ConsensusOptimizer, GradScaler], Any],
) -> tuple[float, float]:
    """phi^2 as it went into the round after one step of two workers, of which this is one."""
    model = mlp()
    optimizer = ConsensusOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), METHOD, timeout=30)
    loop(model, optimizer, GradScaler("cpu", init_scale=1024.0))
    memory = optimizer.state_dict()[KEY]["control"]
    return memory["phi_sum"], memory["phi_weight"]


def plain(model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler) -> None:
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped_scaled(model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler) -> None:
    scaler.scale(loss_of(model, 0, 0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


def unscaled(model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler) -> None:
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def accumulated(model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler) -> None:
    for _ in range(2):
        scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.step(optimizer)
    scaler.update()


def unscaled_and_clipped(
    model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler
) -> None:
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


LOOPS = {f.__name__: f for f in (plain, clipped_scaled, unscaled, accumulated)}


def amp_rank(rank: int) -> dict[str, tuple[float, float]]:
    return {name: amp_phi(loop) for name, loop in LOOPS.items()} | {
        "unscaled_and_clipped": amp_phi(unscaled_and_clipped),
        "overflow": amp_phi(overflow_then_plain),
    }


def overflow_then_plain(
    model: nn.Module, optimizer: ConsensusOptimizer, scaler: GradScaler
) -> None:
    rank = optimizer.transport.rank
    scaler.scale(loss_of(model, 0, 0) * (torch.inf if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def test_under_a_scaler_phi_is_that_of_the_unscaled_gradients() -> None:
    model = mlp()
    loss_of(model, 0, 0).backward()
    by_hand = squared_norm(model)
    for found in run_ranks(2, amp_rank):
        for name in LOOPS:
            expected = 4 * by_hand if name == "accumulated" else by_hand
            assert found[name] == (pytest.approx(expected, rel=1e-5), 1.0), name
        # unscale_ hides the factor, so that only what clipping left is known.
        assert found["unscaled_and_clipped"][0] == pytest.approx(1e-6, rel=1e-2)
        # Rank 1 overflowed: what is known is rank 0's norm.
        assert found["overflow"] == (pytest.approx(by_hand, rel=1e-5), 1.0)


# ------------------------------------------------------------------ through the optimizer


def test_the_first_step_is_measured_before_clipping_too() -> None:
    for found in run_ranks(2, clip_rank):
        by_hand, phi = found
        assert phi == pytest.approx(by_hand)


def clip_rank(rank: int) -> tuple[float, float]:
    model = mlp()
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), METHOD, timeout=30
    )
    loss_of(model, 0, 0).backward()
    by_hand = squared_norm(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    return by_hand, optimizer.state_dict()[KEY]["control"]["phi_sum"]


def test_a_simulation_measures_the_mean_over_its_workers() -> None:
    simulation = Simulation(mlp(), 4, METHOD)
    x, y = (torch.stack(part) for part in zip(*(batch(m, 0) for m in range(4)), strict=True))
    model = mlp()
    by_hand = []
    for rank in range(4):
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        by_hand.append(squared_norm(model))
    simulation.step(x, y)
    memory = simulation.optimizer.state_dict()[KEY]["control"]
    assert memory["phi_sum"] == pytest.approx(sum(by_hand) / 4)


def stacked_optimizer(model: nn.Module) -> ConsensusOptimizer:
    return ConsensusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), METHOD, transport=StackedTransport(2)
    )


def stacked_model() -> nn.ParameterList:
    return nn.ParameterList([torch.ones(2, 3), torch.ones(2, 4)])


def train(model: nn.ParameterList, optimizer: ConsensusOptimizer, steps: int) -> list[Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p.pow(4).sum() for p in model), torch.zeros(())).backward()
        optimizer.step()
    return [p.detach().clone() for p in model]


def copies(how: str, pair: tuple[nn.Module, ConsensusOptimizer]) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(pair)
    if how == "pickle":
        return pickle.loads(pickle.dumps(pair))
    stream = io.BytesIO()
    torch.save(pair, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_work_and_have_the_hooks_of_their_own_optimizer_alone(how: str) -> None:
    model = stacked_model()
    optimizer = stacked_optimizer(model)
    train(model, optimizer, 2)
    twin_model, twin = copies(how, (model, optimizer))
    assert hooks_of(twin_model) == 0
    assert hooks_of(model) == 2
    twin.transport = StackedTransport(2)
    for ours, theirs in zip(train(model, optimizer, 3), train(twin_model, twin, 3), strict=True):
        assert torch.equal(ours, theirs)
    assert hooks_of(twin_model) == 2
    assert hooks_of(model) == 2
    assert same(twin.state_dict()[KEY], optimizer.state_dict()[KEY])


def test_a_new_transport_or_optimizer_leaves_no_hook_of_the_old_one() -> None:
    model = stacked_model()
    optimizer = stacked_optimizer(model)
    train(model, optimizer, 1)
    optimizer.transport = StackedTransport(2)
    train(model, optimizer, 1)
    gc.collect()
    assert hooks_of(model) == 2
    del optimizer
    gc.collect()
    assert hooks_of(model) == 0
    optimizer = stacked_optimizer(model)
    train(model, optimizer, 1)
    assert hooks_of(model) == 2


def test_a_parameter_that_is_frozen_and_thawed_counts_while_it_is_trained() -> None:
    model = stacked_model()
    optimizer = stacked_optimizer(model)
    for frozen in (False, True, False, False):
        first, second = (parameter.detach().clone() for parameter in model)
        model[0].requires_grad_(not frozen)
        train(model, optimizer, 1)
        parts = [second] if frozen else [first, second]
        by_hand = sum(float((4 * p**3).square().sum()) for p in parts) / 2
        memory = optimizer.state_dict()[KEY]["control"]
        assert memory["phi_sum"] == pytest.approx(by_hand)


def test_methods_that_do_not_follow_gradients_hook_nothing() -> None:
    model = stacked_model()
    optimizer = ConsensusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        consensus_control("ring", 0.5, during=(0.0, 1.0)),
        transport=StackedTransport(2),
    )
    train(model, optimizer, 1)
    assert hooks_of(model) == 0
