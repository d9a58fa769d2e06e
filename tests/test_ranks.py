"""Real ranks: how training starts, what averaging leaves behind, what is sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from consensus_opt import ConsensusOptimizer, Method, dppf, gossip_sgd, local_sgd
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import batch, flat, mlp, random_rows, same, train

State = dict[str, Tensor]


class Net(nn.Module):
    """BatchNorm, a frozen weight, and buffers of integers and truth values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.register_buffer("count", torch.tensor([rank, 2**40 + rank]))
        self.register_buffer("mask", torch.tensor([rank % 2 == 0, rank % 2 == 1]))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def snapshot(model: nn.Module) -> State:
    return copy.deepcopy(dict(model.state_dict()))


def wrap(model: nn.Module, method: Method, **options: Any) -> ConsensusOptimizer:
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ConsensusOptimizer(inner, method, model=model, timeout=60, **options)


def start(rank: int, share: bool) -> tuple[State, State]:
    model = Net(rank)
    own = snapshot(model)
    wrap(model, gossip_sgd("ring"), broadcast=share)
    return own, snapshot(model)


@pytest.mark.parametrize("share", [True, False])
def test_R066_training_starts_from_rank_0_or_from_each_ranks_own(share: bool) -> None:
    outcomes = run_ranks(4, start, share)
    for own, now in outcomes:
        assert same(now, outcomes[0][0] if share else own)


def evaluate_mean(rank: int) -> dict[str, Any]:
    model = Net(rank)
    optimizer = wrap(model, gossip_sgd("one_peer_exponential"), broadcast=False)
    train(model, optimizer, range(3), rank)
    seen: dict[str, Any] = {"before": snapshot(model)}
    with optimizer.averaged():
        seen["inside"] = snapshot(model)
        model(batch(rank, 99)[0])  # BatchNorm counts and moves its statistics
    seen["after"] = snapshot(model)
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        _ = 1 / 0
    seen["after an error"] = snapshot(model)
    with optimizer.averaged():
        with optimizer.averaged():
            seen["nested"] = snapshot(model)
        with pytest.raises(RuntimeError, match=r"inside 'with optimizer.averaged\(\):'.*outside"):
            optimizer.step()
    seen["clock"] = optimizer.clock
    seen["distance"] = optimizer.consensus_distance()
    optimizer.synchronize()
    seen["synchronized"] = snapshot(model)
    return seen


def test_R067_R140_the_mean_model_is_put_in_place_and_every_bit_is_restored() -> None:
    outcomes = run_ranks(4, evaluate_mean)
    names = [name for name, value in outcomes[0]["before"].items() if value.is_floating_point()]
    means = {n: torch.stack([o["before"][n] for o in outcomes]).mean(0) for n in names}
    means["frozen"] = outcomes[0]["before"]["frozen"]
    for outcome in outcomes:
        for key in ("inside", "nested", "synchronized"):
            for name in set(names) - {"frozen"}:
                torch.testing.assert_close(outcome[key][name], means[name])
                assert same(outcome[key][name], outcomes[0][key][name])
            for name in set(outcome["before"]) - set(names) | {"frozen"}:
                assert same(outcome[key][name], outcome["before"][name])
        assert same(outcome["after"], outcome["before"])
        assert same(outcome["after an error"], outcome["before"])
        assert outcome["clock"] == 3


def test_the_consensus_distance_is_exact_and_the_same_on_all_ranks() -> None:
    outcomes = run_ranks(4, evaluate_mean)
    trained = [n for n in outcomes[0]["before"] if n.endswith(("weight", "bias"))]
    rows = torch.stack([torch.cat([o["before"][n].flatten() for n in trained]) for o in outcomes])
    expected = (rows - rows.mean(0)).double().square().sum(1).mean().sqrt()
    assert len({outcome["distance"] for outcome in outcomes}) == 1
    assert outcomes[0]["distance"] == pytest.approx(float(expected), rel=1e-5)


def train_with_own_collectives(rank: int) -> tuple[Tensor, list[float]]:
    model, sums = mlp(seed=rank), []
    optimizer = wrap(model, local_sgd(2))
    for step in range(5):
        if rank == 1 and step == 1:
            optimizer.zero_grad()  # this rank has no gradient at all
            optimizer.step()
        else:
            train(model, optimizer, [step], rank)
        flag = torch.tensor([float(rank + step)])
        dist.all_reduce(flag)
        sums.append(float(flag))
        if step % 2 == 1:
            after_round = flat(model)
    return after_round, sums


@pytest.mark.parametrize("n", [2, 3, 4])
def test_R051_R054_all_ranks_have_the_same_bits_after_a_complete_average(n: int) -> None:
    outcomes = run_ranks(n, train_with_own_collectives)
    for parameters, sums in outcomes:
        assert same(parameters, outcomes[0][0])
        assert sums == [sum(range(n)) + n * step for step in range(5)]


def train_subgroup(rank: int) -> tuple[Tensor, Tensor, int]:
    group = dist.new_group([1, 3])
    model = mlp(seed=rank)
    if rank in (1, 3):
        optimizer = wrap(model, gossip_sgd("ring"), transport=TorchTransport(group, timeout=60))
        train(model, optimizer, range(2), rank)
        size = optimizer.transport.size
    else:
        train(model, SGD(model.parameters(), lr=0.1), range(2), rank)
        size = 1
    total = flat(model)
    dist.all_reduce(total)
    return flat(model), total, size


def test_R156_a_subgroup_averages_among_itself_alone() -> None:
    outcomes = run_ranks(4, train_subgroup)
    assert [size for *_, size in outcomes] == [1, 2, 1, 2]
    assert same(outcomes[1][0], outcomes[3][0])
    for rank in (0, 2):
        model = mlp(seed=rank)
        train(model, SGD(model.parameters(), lr=0.1), range(2), rank)
        assert same(outcomes[rank][0], flat(model))
    total = torch.stack([parameters for parameters, *_ in outcomes]).sum(0)
    torch.testing.assert_close(outcomes[0][1], total)


def train_gan(rank: int) -> list[Tensor]:
    """Two optimizers, stepped in turn; the second loss also fills gradients of the first model."""
    generator, judge = mlp(0, outputs=6), mlp(1, outputs=1)
    makers = wrap(generator, local_sgd(2)), wrap(judge, gossip_sgd("ring"))
    for step in range(4):
        for model, optimizer in zip((generator, judge), makers, strict=True):
            optimizer.zero_grad()
            judge(generator(batch(rank, step)[0])).square().mean().backward()
            before = [flat(m) for m in (generator, judge)]
            optimizer.step()
            other = judge if model is generator else generator
            assert same(flat(other), before[0 if other is generator else 1])
    return [flat(generator), flat(judge)]


def test_R055_R014_two_optimizers_in_one_process_do_not_touch_each_others_parameters() -> None:
    outcomes = run_ranks(3, train_gan)
    for models in outcomes:
        assert same(models[0], outcomes[0][0])
        torch.testing.assert_close(models[1], outcomes[0][1])


WIDTH = 1001
METHODS: dict[str, Method] = {
    "all_reduce": local_sgd(1),
    "dppf": dppf(0.1, 0.1, period=1),
    "ring": gossip_sgd("ring"),
    "ring_twice": gossip_sgd("ring", exchanges=2),
    "one_peer": gossip_sgd("one_peer_exponential"),
    "torus": gossip_sgd("torus:2x2"),
    "star": gossip_sgd("star"),
}


def count_bytes(rank: int) -> dict[tuple[str, str], int]:
    sent = {}
    for dtype in ("float32", "float64", "bfloat16"):
        for name, method in METHODS.items():
            parameter = nn.Parameter(random_rows(4, WIDTH, dtype=getattr(torch, dtype))[rank])
            optimizer = ConsensusOptimizer(SGD([parameter]), method, broadcast=False, timeout=60)
            for _ in range(3):
                optimizer.step()
            sent[name, dtype] = optimizer.bytes_sent
    return sent


def test_the_bytes_that_are_counted_are_those_of_the_formula() -> None:
    for rank, sent in enumerate(run_ranks(4, count_bytes)):
        for dtype, size in (("float32", 4), ("float64", 8), ("bfloat16", 2)):
            # A ring all-reduce sends 2 (n - 1) / n of the vector; half precision travels as fp32.
            reduced = 3 * (2 * 3 * WIDTH * max(size, 4) // 4)
            assert sent["all_reduce", dtype] == sent["dppf", dtype] == reduced
            assert sent["ring", dtype] == 3 * 2 * WIDTH * size
            assert sent["ring_twice", dtype] == 2 * 3 * 2 * WIDTH * size
            assert sent["one_peer", dtype] == 3 * WIDTH * size
            assert sent["torus", dtype] == 3 * 2 * WIDTH * size
            assert sent["star", dtype] == 3 * (3 if rank == 0 else 1) * WIDTH * size


def mix_once(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    results = {}
    for name, method in METHODS.items():
        parameter = nn.Parameter(random_rows(4, WIDTH, dtype=dtype)[rank])
        optimizer = ConsensusOptimizer(SGD([parameter]), method, broadcast=False, timeout=60)
        optimizer.step()
        results[name] = parameter.detach().clone()
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_R090_a_round_is_the_numpy_mixing_of_the_ranks(dtype: torch.dtype) -> None:
    outcomes = run_ranks(4, mix_once, dtype)
    rows = random_rows(4, WIDTH, dtype=dtype).double()
    tolerance = 1e-14 if dtype == torch.float64 else 2e-3
    for name in ("ring", "one_peer_exponential", "torus:2x2", "star"):
        key = {"one_peer_exponential": "one_peer", "torus:2x2": "torus"}.get(name, name)
        mixed = torch.stack([outcome[key] for outcome in outcomes]).double()
        expected = topology(name).mixing(4, 0).weights @ rows.numpy()
        torch.testing.assert_close(mixed, torch.tensor(expected), rtol=tolerance, atol=tolerance)


def train_nothing(rank: int) -> list[tuple[int, float]]:
    """Everything frozen, or without elements; and a buffer whose elements share one place."""
    frozen, empty = mlp(seed=rank).requires_grad_(False), nn.Linear(3, 0)
    frozen.register_buffer("shared", torch.full((1,), float(rank)).expand(4))
    results = []
    for model in (frozen, empty):
        for method in (local_sgd(1), gossip_sgd("ring"), dppf(period=1)):
            optimizer = wrap(model, method)
            optimizer.step()
            with optimizer.averaged():
                pass
            results.append((optimizer.rounds, optimizer.consensus_distance()))
    assert same(flat(frozen), flat(mlp(seed=0)))
    assert frozen.get_buffer("shared").tolist() == [0.0] * 4
    return results


def test_a_model_with_nothing_to_average_goes_through_its_rounds() -> None:
    assert run_ranks(2, train_nothing) == [[(1, 0.0)] * 6] * 2
