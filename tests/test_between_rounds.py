"""Messages go out in due steps and in named calls, and nowhere else.

The transports here are real ones that also write down what they are asked for.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam

from consensus_opt import ConsensusOptimizer, Method, StackedTransport, dppf, gossip_sgd, local_sgd
from consensus_opt.integrations.torch_distributed import TorchTransport
from tests.harness import run_ranks
from tests.problems import flat, loss_of, mlp, random_rows, same, train

METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(4),
    "ring": gossip_sgd("ring", period=4),
    "one_peer": gossip_sgd("one_peer_exponential", period=4),
    "dppf": dppf(period=4),
}


class Noted(StackedTransport):
    """Writes down the operations that carry parameters, and all operations."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.averages: list[tuple[int, ...]] = []
        self.calls = 0

    def start_mean(self, flat: Tensor, out: Tensor) -> Any:
        self.averages.append(flat.shape)
        self.calls += 1
        return super().start_mean(flat, out)

    def start_exchange(self, flat: Tensor, *args: Any) -> Any:
        self.averages.append(flat.shape)
        self.calls += 1
        return super().start_exchange(flat, *args)

    def broadcast(self, *args: Any) -> None:
        self.calls += 1
        super().broadcast(*args)

    def gather(self, values: Tensor) -> Tensor:
        self.calls += 1
        return super().gather(values)


def four(
    method: Method, shapes: tuple[tuple[int, ...], ...] = ((5,),), momentum: float = 0.0
) -> tuple[list[nn.Parameter], ConsensusOptimizer, Noted]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, *shape)) for shape in shapes]
    transport = Noted(4)
    optimizer = ConsensusOptimizer(
        SGD(parameters, lr=0.1, momentum=momentum), method, transport=transport
    )
    return parameters, optimizer, transport


@pytest.mark.parametrize("name", METHODS)
def test_R011_R020_R050_each_due_step_makes_one_exchange_also_with_clipping(name: str) -> None:
    parameters, optimizer, transport = four(METHODS[name], ((5,), (2, 3)))
    for step in range(1, 13):
        sum(p.square().sum() for p in parameters).backward()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        assert len(transport.averages) == step // 4
    assert set(transport.averages) == {(4, 11)}


@pytest.mark.parametrize("name", METHODS)
def test_R012_R071_R087_R119_outside_of_due_steps_nothing_is_sent_or_written(name: str) -> None:
    (parameter,), optimizer, transport = four(METHODS[name])
    optimizer.step()
    for _ in range(2):
        for _ in range(3):
            before, calls = parameter.detach().clone(), transport.calls
            optimizer.zero_grad()
            loss = (parameter * parameter.detach()).sum()
            loss.backward()
            nn.utils.clip_grad_norm_([parameter], 0.1)
            assert parameter.grad is not None
            assert float(parameter.grad.norm()) == pytest.approx(0.1, rel=1e-3)
            assert same(parameter, before)
            expected = before.add(parameter.grad, alpha=-0.1)
            if optimizer.clock % 4 == 3:
                break
            optimizer.step()
            assert same(parameter, expected)
            assert transport.calls == calls
        optimizer.step()
        assert transport.calls > calls


def test_R134_R135_reading_evaluating_and_copying_send_nothing() -> None:
    (parameter,), optimizer, transport = four(local_sgd(1), momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls, before = transport.calls, parameter.detach().clone()
    saved = optimizer.state_dict()
    copy.deepcopy(optimizer)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    _ = (optimizer.clock, optimizer.rounds, optimizer.bytes_sent, optimizer.step_applied)
    _ = (repr(optimizer), optimizer.state, optimizer.param_groups, optimizer.defaults)
    with torch.no_grad():
        (parameter * 2).sum()
    assert transport.calls == calls
    assert same(parameter, before)


def rank_0_does_more(rank: int) -> tuple[Tensor, float]:
    """Rank 0 saves and evaluates by itself in each step, as the usual scripts do."""
    model = mlp(seed=rank)
    optimizer = ConsensusOptimizer(Adam(model.parameters()), local_sgd(2), timeout=20)
    losses = []
    for step in range(4):
        train(model, optimizer, [step], rank)
        if rank == 0:
            copy.deepcopy(optimizer.state_dict())
            with torch.no_grad():
                losses.append(float(loss_of(model.eval(), 0, 99)))
            model.train()
    return flat(model), sum(losses)


def test_R134_R135_rank_0_saves_and_evaluates_alone_while_others_go_on() -> None:
    first, second = run_ranks(2, rank_0_does_more)
    assert same(first[0], second[0])
    assert first[1] > 0 == second[1]


def accumulate(parts: int) -> tuple[Tensor, int, int]:
    (parameter,), optimizer, _ = four(local_sgd(2))
    with torch.no_grad():
        parameter.copy_(random_rows(4, 5))
    for step in range(3 * parts):
        (parameter.square().sum() / parts).backward()
        if step % parts == parts - 1:
            optimizer.step()
            optimizer.zero_grad()
    return parameter.detach(), optimizer.clock, optimizer.rounds


def test_R070_the_period_counts_optimizer_steps_and_not_accumulated_batches() -> None:
    one, clock, rounds = accumulate(1)
    accumulated = accumulate(4)
    assert (clock, rounds) == accumulated[1:] == (3, 1)
    torch.testing.assert_close(accumulated[0], one)


@pytest.mark.parametrize("where", ["at the top", "after the step", "twice", "between"])
def test_R004_R019_R074_zero_grad_is_legal_anywhere_and_counts_nothing(where: str) -> None:
    def run(where: str) -> tuple[Tensor, int, int]:
        model = mlp()
        optimizer = ConsensusOptimizer(
            SGD(model.parameters(), lr=0.1), local_sgd(2), transport=None
        )
        for step in range(5):
            if where in ("at the top", "twice"):
                optimizer.zero_grad()
            if where == "between":  # a bad batch is dropped
                loss_of(model, 0, 50 + step).backward()
                optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
            if where in ("after the step", "twice", "between"):
                optimizer.zero_grad(set_to_none=False)
        return flat(model), optimizer.clock, optimizer.rounds

    assert same(run(where), run("at the top"))


WAITS = 9


def wait_for_nobody(rank: int) -> int:
    """Rank 1 takes its first step after rank 0 has taken all that need nobody."""
    model = mlp()
    optimizer = ConsensusOptimizer(
        SGD(model.parameters(), lr=0.1), local_sgd(WAITS + 1), timeout=20
    )
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 was not held up"])
    train(model, optimizer, range(WAITS), rank)
    if rank == 0:
        store.set("rank 0 was not held up", "")
    assert optimizer.rounds == 0
    train(model, optimizer, [WAITS], rank)
    return optimizer.rounds


def test_R071_between_rounds_no_rank_waits_for_another() -> None:
    assert run_ranks(2, wait_for_nobody) == [1, 1]


def test_R086_five_hundred_parameters_travel_in_one_exchange_for_each_dtype() -> None:
    parameters = [nn.Parameter(torch.randn(4, 3, dtype=torch.float32)) for _ in range(300)]
    parameters += [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(200)]
    transport = Noted(4)
    optimizer = ConsensusOptimizer(SGD(parameters), gossip_sgd("ring"), transport=transport)
    optimizer.step()
    assert transport.averages == [(4, 900), (4, 600)]


def test_R092_a_frozen_part_takes_no_part_in_rounds_and_stays_where_it_is() -> None:
    trained, frozen = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4, 95))
    frozen.requires_grad_(False)
    values, place = frozen.detach().clone(), frozen.data_ptr()
    transport = Noted(4)
    optimizer = ConsensusOptimizer(
        SGD([trained, frozen], lr=0.1), dppf(period=1), transport=transport, broadcast=False
    )
    trained.grad = torch.zeros_like(trained)
    optimizer.step()
    with optimizer.averaged():
        assert same(frozen, values)
    assert {shape[-1] for shape in transport.averages} <= {5, 0}
    assert same(frozen, values)
    assert frozen.data_ptr() == place


def train_beside_own_collectives(rank: int) -> tuple[Tensor, list[float]]:
    """A thread of the user reduces over the default group all the while."""
    model, sums = mlp(), []
    transport = TorchTransport(timeout=60)

    def reduce() -> None:
        for step in range(50):
            value = torch.tensor([float(rank + step)])
            dist.all_reduce(value)
            sums.append(value.item())

    optimizer = ConsensusOptimizer(
        SGD(model.parameters(), lr=0.1), dppf(period=1), transport=transport
    )
    thread = threading.Thread(target=reduce)
    thread.start()
    train(model, optimizer, range(20), rank)
    thread.join()
    optimizer.synchronize()
    return flat(model), sums


def test_R054_R087_a_thread_of_the_user_may_reduce_meanwhile() -> None:
    outcomes = run_ranks(3, train_beside_own_collectives)
    for parameters, sums in outcomes:
        assert same(parameters, outcomes[0][0])
        assert sums == [3.0 + 3 * step for step in range(50)]
