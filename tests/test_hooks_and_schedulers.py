"""What plugs into an optimizer plugs into the wrapper: hooks, learning-rate schedulers, compile."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

from consensus_opt import ConsensusOptimizer, dppf, gossip_sgd, local_sgd
from tests.problems import mlp, random_rows, same, stacked, train

Scheduler = Callable[[Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: schedulers.StepLR(o, step_size=2, gamma=0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=8),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=8),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm_restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3),
    "sequential": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, total_iters=3), schedulers.ExponentialLR(o, gamma=0.9)],
        milestones=[3],
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def wrap(optimizer: Optimizer) -> ConsensusOptimizer:
    return ConsensusOptimizer(optimizer, dppf(alpha=0.5, lam=0.5, period=2))


def sgd(model: torch.nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def rates(name: str, when: str) -> list[tuple[float, float]]:
    """Learning rate and momentum over 8 steps, of the bare optimizer or of the wrapper."""
    model = mlp()
    inner = sgd(model)
    if when == "before":
        scheduler = SCHEDULERS[name](inner)
        stepped: Optimizer = wrap(inner)
    else:
        stepped = inner if when == "bare" else wrap(inner)
        scheduler = SCHEDULERS[name](stepped)
    sequence = []
    for step in range(8):
        train(model, stepped, [step])
        (group,) = stepped.param_groups
        sequence.append((float(group["lr"]), float(group["momentum"])))
        advance(scheduler)
    return sequence


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_R099_a_scheduler_runs_as_on_the_bare_optimizer_and_without_a_warning(
    name: str, when: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequence = rates(name, when)
    assert sequence == rates(name, "bare")
    assert len({lr for lr, _ in sequence}) > 1


def rates_after_loading(make: Callable[[Optimizer], Optimizer]) -> list[float]:
    """Learning rates of an optimizer that is loaded, with a scheduler that is made after that."""
    model = mlp()
    optimizer, loaded = make(sgd(model)), make(sgd(mlp()))
    scheduler = schedulers.CosineAnnealingLR(optimizer, T_max=8)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    loaded.load_state_dict(optimizer.state_dict())
    scheduler = schedulers.CosineAnnealingLR(loaded, T_max=8, last_epoch=scheduler.last_epoch - 1)
    sequence = []
    for step in range(3):
        train(model, loaded, [step])
        sequence.append(loaded.param_groups[0]["lr"])
        scheduler.step()
    return sequence


def test_R115_a_scheduler_made_after_loading_continues_as_on_the_bare_optimizer() -> None:
    assert rates_after_loading(wrap) == rates_after_loading(lambda optimizer: optimizer)


def test_R100_step_hooks_of_wrapper_and_inner_fire_once_a_step_and_in_their_order() -> None:
    model = mlp()
    inner = sgd(model)
    wrapped = wrap(inner)
    fired: list[tuple[str, Optimizer]] = []
    for name, optimizer in (("wrapper", wrapped), ("inner", inner)):
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs, name=name: fired.append((f"{name} pre", o))
        )
        optimizer.register_step_post_hook(
            lambda o, args, kwargs, name=name: fired.append((f"{name} post", o))
        )
    train(model, wrapped, range(2))
    once = [
        ("wrapper pre", wrapped),
        ("inner pre", inner),
        ("inner post", inner),
        ("wrapper post", wrapped),
    ]
    assert fired == once * 2


def test_a_hook_on_all_optimizers_sees_the_inner_step_and_then_the_wrappers() -> None:
    rows = random_rows(4, 5)
    parameter, wrapped = stacked(rows, local_sgd(1))
    seen: list[tuple[Optimizer, torch.Tensor]] = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append((optimizer, parameter.detach().clone()))
    )
    wrapped.step()
    hook.remove()
    assert [optimizer for optimizer, _ in seen] == [wrapped.inner, wrapped]
    assert same(seen[0][1], rows)
    torch.testing.assert_close(seen[1][1], rows.mean(0).expand(4, 5))


def test_R120_a_post_hook_of_the_wrapper_sees_mixed_parameters_and_one_of_the_inner_does_not() -> (
    None
):
    rows = random_rows(4, 5)
    parameter, wrapped = stacked(rows, local_sgd(1))
    seen = {}
    wrapped.register_step_post_hook(lambda *_: seen.update(wrapper=parameter.detach().clone()))
    wrapped.inner.register_step_post_hook(lambda *_: seen.update(inner=parameter.detach().clone()))
    wrapped.step()
    assert same(seen["inner"], rows)
    torch.testing.assert_close(seen["wrapper"], rows.mean(0).expand(4, 5))


def test_R100_state_dict_hooks_fire_once_and_may_replace_the_state() -> None:
    wrapped = wrap(sgd(mlp()))
    fired: list[str] = []

    def mark(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        fired.append("post")
        return {**state, "mine": 7}

    wrapped.register_state_dict_pre_hook(lambda optimizer: fired.append("pre"))
    wrapped.register_state_dict_post_hook(mark)
    wrapped.inner.register_state_dict_post_hook(lambda *_: fired.append("inner post"))
    assert wrapped.state_dict()["mine"] == 7
    assert fired == ["pre", "inner post", "post"]


def test_R100_load_state_dict_hooks_fire_once_and_leave_the_callers_dict_alone() -> None:
    wrapped = wrap(sgd(mlp()))
    saved = {**wrapped.state_dict(), "mine": 7}
    fired: list[str] = []

    def strip(optimizer: Optimizer, state: dict[str, Any]) -> None:
        fired.append(f"pre {state.pop('mine')}")

    wrapped.register_load_state_dict_pre_hook(strip)
    wrapped.register_load_state_dict_post_hook(lambda optimizer: fired.append("post"))
    wrapped.inner.register_load_state_dict_post_hook(lambda optimizer: fired.append("inner post"))
    wrapped.load_state_dict(saved)
    assert fired == ["pre 7", "inner post", "post"]
    assert saved["mine"] == 7


def test_a_load_hook_may_hand_over_another_state() -> None:
    wrapped = wrap(sgd(mlp()))
    other = copy.deepcopy(wrapped.state_dict())
    other["param_groups"][0]["lr"] = 0.7
    wrapped.register_load_state_dict_pre_hook(lambda optimizer, state: other)
    wrapped.load_state_dict(wrapped.state_dict())
    assert wrapped.param_groups[0]["lr"] == 0.7


def test_R118_a_compiled_step_gives_the_same_bits_with_few_compilations() -> None:
    compilations: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compilations.append(1)
        return graph.forward

    rows = random_rows(4, 5)
    results = []
    for compiled in (False, True):
        parameter, wrapped = stacked(rows, gossip_sgd("one_peer_exponential"), lr=0.1)
        step = torch.compile(wrapped.step, backend=count) if compiled else wrapped.step
        for _ in range(20):
            parameter.grad = parameter.detach() * 0.5
            step()
        assert wrapped.rounds == 20
        results.append(parameter.detach())
    assert same(*results)
    assert len(compilations) <= 4
