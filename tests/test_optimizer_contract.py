"""A world of one worker is the inner optimizer bit for bit; among two, its steps stay its own."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consensus_opt import ConsensusOptimizer, StackedTransport, dppf, local_sgd
from tests.harness import run_ranks
from tests.problems import (
    Make,
    average_by_hand,
    embedding,
    flat,
    loss_of,
    matrices,
    mlp,
    random_rows,
    same,
    stacked,
    train,
)

optim = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_maximize": lambda p: optim.SGD(p, lr=0.1, dampening=0.1, momentum=0.5, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam_amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adam_tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "muon": lambda p: optim.Muon(p, lr=0.01),
    "sparse_adam": lambda p: optim.SparseAdam(p, lr=0.01),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"muon": matrices, "sparse_adam": embedding}


def model_for(name: str) -> nn.Module:
    return MODELS.get(name, mlp)()


def wrap(optimizer: Optimizer) -> ConsensusOptimizer:
    return ConsensusOptimizer(optimizer, dppf(alpha=0.5, lam=0.5, period=2))


def test_no_optimizer_of_torch_is_left_out() -> None:
    known = {type(OPTIMIZERS[name](model_for(name).parameters())) for name in OPTIMIZERS}
    present = [getattr(optim, name) for name in dir(optim)]
    there = {c for c in present if isinstance(c, type) and issubclass(c, Optimizer)}
    assert there - {Optimizer} <= known


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_R091_one_worker_is_the_inner_optimizer_bit_for_bit(name: str) -> None:
    bare_model, model = model_for(name), model_for(name)
    bare = OPTIMIZERS[name](bare_model.parameters())
    wrapped = wrap(OPTIMIZERS[name](model.parameters()))
    train(bare_model, bare, range(6))
    train(model, wrapped, range(6))
    assert same(flat(model), flat(bare_model))
    state = wrapped.state_dict()
    assert state.pop("consensus")["clock"] == 6
    assert same(state, bare.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_R112_a_saved_state_continues_with_the_same_bits(name: str) -> None:
    model = model_for(name)
    wrapped = wrap(OPTIMIZERS[name](model.parameters()))
    train(model, wrapped, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": wrapped.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed_model = model_for(name)
    resumed_model.load_state_dict(saved["model"])
    resumed = wrap(OPTIMIZERS[name](resumed_model.parameters()))
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.clock == 3
    train(model, wrapped, range(3, 6))
    train(resumed_model, resumed, range(3, 6))
    assert same(flat(resumed_model), flat(model))
    assert same(resumed.state_dict(), wrapped.state_dict())


def train_two_ranks(rank: int) -> dict[str, Tensor]:
    results = {}
    for name, make in OPTIMIZERS.items():
        model = model_for(name)
        optimizer = ConsensusOptimizer(make(model.parameters()), local_sgd(2), timeout=60)
        train(model, optimizer, range(5), rank)
        results[name] = flat(model)
    return results


def test_R108_two_ranks_take_the_inner_optimizers_steps_and_average_every_second_one() -> None:
    results = run_ranks(2, train_two_ranks)
    for name, make in OPTIMIZERS.items():
        models = [model_for(name), model_for(name)]
        optimizers = [make(model.parameters()) for model in models]
        for step in range(5):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                train(model, optimizer, [step], rank)
            if step % 2 == 1:
                average_by_hand(models)
        for rank, model in enumerate(models):
            assert same(results[rank][name], flat(model)), f"{name}, rank {rank}"


@pytest.mark.parametrize("call", ["positional", "keyword", "none", "absent"])
def test_R106_a_closure_is_handed_on_and_its_loss_comes_back(call: str) -> None:
    model = mlp()
    wrapped = wrap(optim.SGD(model.parameters(), lr=0.1))
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        wrapped.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    first = closure()
    result = {
        "positional": lambda: wrapped.step(closure),
        "keyword": lambda: wrapped.step(closure=closure),
        "none": lambda: wrapped.step(None),
        "absent": lambda: wrapped.step(),
    }[call]()
    with_closure = call in ("positional", "keyword")
    assert len(calls) == 1 + with_closure
    assert same(result, first) if with_closure else result is None
    assert wrapped.clock == 1


def test_R107_R108_a_closure_that_is_called_often_is_one_step() -> None:
    rows = random_rows(4, 5)
    parameter = nn.Parameter(rows.clone())
    calls: list[int] = []
    wrapped = ConsensusOptimizer(
        optim.LBFGS([parameter], max_iter=5), local_sgd(1), transport=StackedTransport(4)
    )

    def closure() -> Tensor:
        calls.append(wrapped.rounds)
        wrapped.zero_grad()
        loss = (parameter - rows).square().square().sum()
        loss.backward()
        return loss

    wrapped.step(closure)
    assert len(calls) > 1
    assert set(calls) == {0}
    assert (wrapped.clock, wrapped.rounds) == (1, 1)


def test_R050_three_parameter_groups_are_averaged_three_times_in_twelve_steps() -> None:
    parameters = [nn.Parameter(random_rows(4, 5, seed)) for seed in range(3)]
    groups: list[dict[str, Any]] = [{"params": [p], "lr": 0.1} for p in parameters]
    wrapped = ConsensusOptimizer(optim.SGD(groups), local_sgd(4), transport=StackedTransport(4))
    for _ in range(12):
        wrapped.step()
    assert wrapped.rounds == 3


@pytest.mark.parametrize("argument", ["positional", "keyword"])
@pytest.mark.parametrize("to_none", [True, False])
def test_R096_zero_grad_is_handed_on(argument: str, to_none: bool) -> None:
    model = mlp()
    wrapped = wrap(optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0, 0).backward()
    wrapped.zero_grad(to_none) if argument == "positional" else wrapped.zero_grad(
        set_to_none=to_none
    )
    gradients = [p.grad for p in model.parameters()]
    assert all((g is None) if to_none else bool((g == 0).all()) for g in gradients)
    assert wrapped.clock == 0


def test_R104_groups_state_and_defaults_are_the_inner_optimizers_own_before_and_after_a_load() -> (
    None
):
    model = mlp()
    inner = optim.Adam(model.parameters(), lr=0.01)
    wrapped = wrap(inner)
    train(model, wrapped, range(2))
    for _ in range(2):
        assert wrapped.inner is inner
        assert wrapped.param_groups is inner.param_groups
        assert wrapped.state is inner.state
        assert wrapped.defaults is inner.defaults
        wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    inner.param_groups = [*inner.param_groups]
    assert wrapped.param_groups is inner.param_groups


def test_R116_a_group_that_is_added_joins_the_inner_optimizer_and_the_average() -> None:
    parameter, wrapped = stacked(random_rows(4, 5), local_sgd(1), lr=0.1)
    more = nn.Parameter(random_rows(4, 3, seed=1))
    means = [rows.detach().mean(0) for rows in (parameter, more)]
    wrapped.step()
    wrapped.add_param_group({"params": [more], "lr": 0.5})
    assert [group["lr"] for group in wrapped.inner.param_groups] == [0.1, 0.5]
    with wrapped.averaged():
        torch.testing.assert_close(more.detach(), means[1].expand(4, 3))
    wrapped.step()
    for rows, mean in zip((parameter, more), means, strict=True):
        torch.testing.assert_close(rows.detach(), mean.expand_as(rows))


def test_R114_the_key_set_of_a_state_dict_is_the_same_before_and_after_a_round() -> None:
    _, wrapped = stacked(random_rows(4, 5), local_sgd(2), lr=0.1)
    before = set(wrapped.state_dict()["consensus"])
    for _ in range(2):
        wrapped.step()
    assert set(wrapped.state_dict()["consensus"]) == before


def test_R052_a_checkpoint_of_the_bare_optimizer_loads_with_a_warning() -> None:
    bare_model, model = mlp(), mlp()
    bare = optim.Adam(bare_model.parameters(), lr=0.05)
    train(bare_model, bare, range(2))
    wrapped = wrap(optim.Adam(model.parameters(), lr=0.01))
    with pytest.warns(UserWarning, match="no 'consensus' entry.*clock stays at 0"):
        wrapped.load_state_dict(bare.state_dict())
    assert same(wrapped.inner.state_dict(), bare.state_dict())


def test_a_saved_state_loads_without_a_warning_and_is_left_as_it_was() -> None:
    model = mlp()
    wrapped = wrap(optim.Adam(model.parameters(), lr=0.01))
    train(model, wrapped, range(2))
    saved = wrapped.state_dict()
    copied = copy.deepcopy(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.load_state_dict(saved)
    assert same(saved, copied)


def copies(things: Any, how: str) -> Any:
    return copy.deepcopy(things) if how == "deepcopy" else pickle.loads(pickle.dumps(things))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_R102_a_copy_goes_on_with_the_same_bits(how: str) -> None:
    model = mlp()
    wrapped = wrap(optim.Adam(model.parameters(), lr=0.01))
    train(model, wrapped, range(3))
    twin_model, twin = copies((model, wrapped), how)
    assert same(twin.state_dict(), wrapped.state_dict())
    assert twin.method == wrapped.method
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    train(model, wrapped, range(3, 6))
    train(twin_model, twin, range(3, 6))
    assert same(flat(twin_model), flat(model))
    assert twin.clock == 6


def test_a_copy_of_stacked_workers_goes_on_over_the_same_transport() -> None:
    parameter, wrapped = stacked(random_rows(4, 5), dppf(0.5, 0.1, period=2))
    wrapped.step()
    twin = copy.deepcopy(wrapped)
    (twin_parameter,) = twin.param_groups[0]["params"]
    twin_parameter.grad = torch.zeros_like(twin_parameter)
    wrapped.step()
    twin.step()
    assert twin.rounds == 1
    assert same(twin_parameter, parameter)
    assert twin_parameter.data_ptr() != parameter.data_ptr()


class Plain:
    """An optimizer that only looks like one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": None}]

    def step(self) -> str:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)
        return "stepped"

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "plain"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"kind": "plain"}


def test_R031_an_optimizer_by_its_looks_works_and_equals_sgd() -> None:
    plain_model, model = mlp(), mlp()
    wrapped = wrap(Plain(plain_model.parameters()))  # type: ignore[arg-type]
    train(plain_model, wrapped, range(4))
    train(model, optim.SGD(model.parameters(), lr=0.1), range(4))
    torch.testing.assert_close(flat(plain_model), flat(model))
    wrapped.load_state_dict(wrapped.state_dict())
    assert wrapped.step() == "stepped"
    assert wrapped.defaults == {}


def test_R032_a_subclass_can_extend_the_step() -> None:
    class Clipped(ConsensusOptimizer):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            nn.utils.clip_grad_value_([p for g in self.param_groups for p in g["params"]], 0.0)
            return super().step(closure)

    model = mlp()
    start = flat(model)
    clipped = Clipped(optim.SGD(model.parameters(), lr=0.1), local_sgd(1))
    train(model, clipped, range(2))
    assert clipped.clock == 2
    assert same(flat(model), start)
