"""What becomes of momentum and moments, where workers see unlike data."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.data import load
from benchmarks.evaluate import score
from consensus_opt import (
    ConsensusOptimizer,
    Method,
    StackedTransport,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.optimizer import KEY
from consensus_opt.simulation import Simulation
from consensus_opt.topology import topology
from consensus_opt.transport import SoloTransport
from tests.problems import Make, random_rows, same

N, WIDTH = 6, 5


def descend(method: Method, make: Make, gradient: object, start: Tensor, steps: int) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = ConsensusOptimizer(
        make([parameter]), method, transport=StackedTransport(len(start))
    )
    for _ in range(steps):
        parameter.grad = gradient(parameter.detach())
        optimizer.step()
    return parameter.detach()


# ------------------------------------------------------------------ Adam


def test_adam_with_moments_of_its_own_goes_to_the_median_of_the_optima_not_to_their_mean() -> None:
    """Workers minimize ``(x - b_m)^2 / 2``, exactly; the optimum of their sum is the mean of b.

    Moments that settle make a worker's step ``g / sqrt(g^2)``, a sign: the steps cancel where as
    many optima lie above as below. Averaged moments give ``mean(g) / sqrt(mean(g^2))``.
    """
    optima = torch.tensor([0.0, 1.0, 2.0, 30.0, 50.0], dtype=torch.float64).unsqueeze(1)
    adam = partial(torch.optim.Adam, lr=0.1)
    start = torch.full_like(optima, 5.0)
    for method in (local_sgd, partial(gossip_sgd, "complete")):
        ends = {
            state: descend(method(1, state=state), adam, lambda x: x - optima, start, 700).mean()
            for state in ("local", "average")
        }
        assert ends["local"].item() == pytest.approx(optima.median().item(), abs=0.5)
        assert ends["average"].item() == pytest.approx(optima.mean().item(), abs=0.5)


def accuracy(method: Method, make: Make, steps: int = 120) -> float:
    """Ten workers learn digits, each from images of (nearly) one digit."""
    split, n = load("digits"), 10
    torch.manual_seed(0)
    simulation = Simulation(models.build("mlp", split), n, method, make)
    generator = torch.Generator().manual_seed(0)
    sorted_by_digit = split.train_y.argsort(stable=True)
    each = len(sorted_by_digit) // n
    own = sorted_by_digit[: n * each].view(n, each)
    for _ in range(steps):
        index = own.gather(1, torch.randint(0, each, (n, 8), generator=generator))
        simulation.step(split.train_x[index], split.train_y[index])
    return score(simulation.mean(), split.test_x, split.test_y)[1] / len(split.test_x)


def test_decentralized_adam_fails_on_unlike_data_and_travelling_moments_repair_it() -> None:
    adam = partial(torch.optim.Adam, lr=3e-3)
    local, average = (accuracy(gossip_sgd("ring", state=s), adam) for s in ("local", "average"))
    assert local < 0.7
    assert average > 0.8


# ------------------------------------------------------------------ quasi-global momentum


def by_hand(
    start: Tensor, targets: Tensor, weights: list[Tensor], lr: float, beta: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Quasi-global momentum as in the paper, one mixing matrix a step."""
    x, momentum = start.clone(), torch.zeros_like(start)
    for mixing in weights:
        gradient = x - targets
        used = beta * momentum + gradient
        half = x - lr * (gradient + beta * used if nesterov else used)
        mixed = mixing @ half
        momentum = beta * momentum + (1 - beta) * (x - mixed) / lr
        x = mixed
    return x, momentum


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("period", [1, 3])
def test_momentum_follows_the_way_that_the_parameters_went(period: int, nesterov: bool) -> None:
    start, targets = (random_rows(N, WIDTH, seed, torch.float64) for seed in (0, 1))
    ring = torch.from_numpy(topology("ring").mixing(N).weights.copy())
    weights = [ring if t % period == 0 else torch.eye(N, dtype=torch.float64) for t in range(1, 8)]
    expected, momentum = by_hand(start, targets, weights, 0.1, 0.8, nesterov)
    parameter = nn.Parameter(start.clone())
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([parameter], lr=0.1, momentum=0.8, nesterov=nesterov),
        gossip_sgd("ring", period=period, state="quasi_global"),
        transport=StackedTransport(N),
        broadcast=False,
    )
    for _ in range(7):
        parameter.grad = parameter.detach() - targets
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
    buffer = optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(buffer, momentum, rtol=1e-12, atol=1e-12)


def test_it_sends_no_more_than_local_momentum_and_alone_it_is_sgd_bit_for_bit() -> None:
    def run(state: str, transport: object) -> tuple[Tensor, int]:
        parameter = nn.Parameter(random_rows(transport.size, WIDTH).squeeze(0))
        optimizer = ConsensusOptimizer(
            torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
            gossip_sgd("ring", state=state),
            transport=transport,
        )
        for step in range(5):
            parameter.grad = random_rows(transport.size, WIDTH, seed=step).squeeze(0)
            optimizer.step()
        return parameter.detach(), optimizer.bytes_sent

    alone, _ = run("quasi_global", SoloTransport())
    assert same(alone, run("local", SoloTransport())[0])
    together, sent = run("quasi_global", StackedTransport(N))
    plain, plain_sent = run("local", StackedTransport(N))
    assert sent == plain_sent > 0
    assert not same(together, plain)


def test_a_rate_of_zero_leaves_momentum_as_it_was_and_maximize_is_followed() -> None:
    def momentum(lr: float, maximize: bool) -> Tensor:
        parameter = nn.Parameter(torch.zeros(N, WIDTH, dtype=torch.float64))
        optimizer = ConsensusOptimizer(
            torch.optim.SGD([parameter], lr=lr, momentum=0.5, maximize=maximize),
            gossip_sgd("complete", state="quasi_global"),
            transport=StackedTransport(N),
        )
        for _ in range(3):
            parameter.grad = torch.ones(N, WIDTH, dtype=torch.float64)
            optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"]

    # d = m / 2 + 1, m <- m / 2 + d / 2 from 0: 1/2, 7/8, 37/32.
    ones = torch.ones(N, WIDTH, dtype=torch.float64)
    assert same(momentum(0.0, False), 0 * ones)
    torch.testing.assert_close(momentum(0.25, False), 37 / 32 * ones)
    torch.testing.assert_close(momentum(0.25, True), -37 / 32 * ones)


def test_it_keeps_nothing_of_its_own_in_a_checkpoint() -> None:
    parameter = nn.Parameter(random_rows(N, WIDTH))
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
        gossip_sgd("ring", period=3, state="quasi_global"),
        transport=StackedTransport(N),
    )
    plain = ConsensusOptimizer(
        torch.optim.SGD([nn.Parameter(random_rows(N, WIDTH))], lr=0.1, momentum=0.9),
        gossip_sgd("ring", period=3),
        transport=StackedTransport(N),
    )
    assert optimizer.state_dict()[KEY].keys() == plain.state_dict()[KEY].keys()


def test_with_unlike_data_it_learns_more_than_local_momentum() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    local, quasi_global = (
        accuracy(gossip_sgd("ring", state=state), sgd) for state in ("local", "quasi_global")
    )
    assert quasi_global > local + 0.03


def test_what_cannot_be_quasi_global_is_refused() -> None:
    parameter = nn.Parameter(random_rows(N, WIDTH))
    method = gossip_sgd("ring", state="quasi_global")
    for inner in (torch.optim.SGD([parameter], lr=0.1), torch.optim.Adam([parameter])):
        with pytest.raises(ValueError, match=r"group 0 has momentum .* above 0; write .*SGD"):
            ConsensusOptimizer(inner, method, transport=StackedTransport(N))
    with pytest.raises(ValueError, match=r"round before; write state='local'"):
        Method(average=dsgd_ac("ring", 0.1).average, mix_first=True, state="quasi_global")
    with pytest.raises(ValueError, match=r"must be one of .*quasi_global.*; write"):
        gossip_sgd("ring", state="global")
