"""Optimizers that call their closure: a step is at most one round, whatever they evaluate."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer as others
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from consensus_opt import ConsensusOptimizer, Method, dppf, gossip_sgd
from tests.harness import run_ranks
from tests.problems import average_by_hand, batch, flat, loss_of, mlp, same

ALPHA, LAM, PERIOD, STEPS = 0.3, 0.2, 3, 8
RHO, LR, MOMENTUM = 0.1, 0.05, 0.9
SHARP: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SAM": lambda m: others.SAM(m.parameters(), SGD, rho=RHO, lr=LR, momentum=MOMENTUM),
    "LookSAM": lambda m: others.LookSAM(m.parameters(), SGD, k=2, lr=LR),
    "FriendlySAM": lambda m: others.FriendlySAM(m.parameters(), SGD, lr=LR),
    "BSAM": lambda m: others.BSAM(m.parameters(), num_data=64, lr=LR),
}
"""By name: one to three further evaluations in a step."""


class Closure:
    """Evaluates a batch, and notes the optimizer's clock and rounds whenever it is called."""

    def __init__(self, model: nn.Module, optimizer: ConsensusOptimizer, rank: int) -> None:
        self.model, self.optimizer, self.rank = model, optimizer, rank
        self.step = 0
        self.seen: list[tuple[int, int]] = []

    def __call__(self) -> Tensor:
        self.seen.append((self.optimizer.clock, self.optimizer.rounds))
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.rank, self.step)
        loss.backward()
        return loss


def train_sharply(
    closure: Closure, optimizer: ConsensusOptimizer, steps: range = range(STEPS)
) -> None:
    for closure.step in steps:
        closure()
        optimizer.step(closure)


def seen_by_closures(rank: int) -> dict[str, tuple[int, list[tuple[int, int]], int]]:
    results = {}
    for name, make in SHARP.items():
        torch.manual_seed(rank)  # FriendlySAM and BSAM draw
        model = mlp()
        optimizer = ConsensusOptimizer(make(model), dppf(ALPHA, LAM, PERIOD), timeout=60)
        closure = Closure(model, optimizer, rank)
        train_sharply(closure, optimizer)
        results[name] = optimizer.clock, closure.seen, optimizer.rounds
    return results


def test_a_step_with_further_evaluations_is_one_step_and_at_most_one_round() -> None:
    for outcome in run_ranks(2, seen_by_closures):
        for name, (clock, seen, rounds) in outcome.items():
            assert (clock, rounds) == (STEPS, STEPS // PERIOD), name
            assert len(seen) >= 2 * STEPS, name
            assert all(at == time // PERIOD for time, at in seen), name


def trained_dppf_sam(rank: int) -> Tensor:
    model = mlp().double()
    method = dppf(ALPHA, LAM, PERIOD, schedule="constant")
    optimizer = ConsensusOptimizer(SHARP["SAM"](model), method, timeout=60)
    for step in range(STEPS):
        sharp_gradient(model, optimizer, rank, step)
    return flat(model)


def sharp_gradient(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        double_loss(model, rank, step).backward()

    closure()
    optimizer.step(closure)


def double_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x.double()), y)


def dppf_sam_by_hand(n: int) -> list[Tensor]:
    """For each worker m: SAM, heavy ball, and every PERIOD steps pull and push.

    g = grad f_m(x_m);  v <- MOMENTUM v + grad f_m(x_m + RHO g / ||g||);  x_m <- x_m - LR v
    x_m <- x_m + ALPHA (x_A - x_m) + LAM (x_m - x_A) / ||x_m - x_A||
    """

    def gradient(x: Tensor, rank: int, step: int) -> Tensor:
        model = mlp().double()
        nn.utils.vector_to_parameters(x, model.parameters())
        pieces = torch.autograd.grad(double_loss(model, rank, step), list(model.parameters()))
        return torch.cat([piece.flatten() for piece in pieces])

    workers = [flat(mlp().double()) for _ in range(n)]
    velocities = [torch.zeros_like(x) for x in workers]
    for step in range(STEPS):
        for m, x in enumerate(workers):
            g = gradient(x, m, step)
            sharp = gradient(x + RHO * g / g.norm(), m, step)
            velocities[m] = MOMENTUM * velocities[m] + sharp
            workers[m] = x - LR * velocities[m]
        if (step + 1) % PERIOD == 0:
            mean = torch.stack(workers).mean(0)
            workers = [
                x + ALPHA * (mean - x) + LAM * (x - mean) / (x - mean).norm() for x in workers
            ]
    return workers


def test_dppf_over_sam_is_what_the_formulas_say() -> None:
    expected = dppf_sam_by_hand(3)
    for rank, parameters in enumerate(run_ranks(3, trained_dppf_sam)):
        # SAM takes norms in fp32.
        torch.testing.assert_close(parameters, expected[rank], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)


def resume_sam(rank: int, stop: int) -> tuple[Tensor, Tensor]:
    ends = []
    model, resumed_model = mlp(), mlp(seed=7)
    method: Method = gossip_sgd("ring", period=2)
    optimizer = ConsensusOptimizer(SHARP["SAM"](model), method, timeout=60)
    train_sharply(Closure(model, optimizer, rank), optimizer, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = ConsensusOptimizer(SHARP["SAM"](resumed_model), method, timeout=60)
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, other in ((model, optimizer), (resumed_model, resumed)):
        train_sharply(Closure(each, other, rank), other, range(stop, STEPS))
        ends.append(flat(each))
    return ends[0], ends[1]


@pytest.mark.parametrize("stop", [3, 4])
def test_sam_resumes_with_the_same_bits(stop: int) -> None:
    for end, resumed in run_ranks(2, resume_sam, stop):
        assert same(end, resumed)


def line_searches(rank: int) -> tuple[Tensor, list[tuple[int, int]]]:
    model = mlp()
    inner = LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
    optimizer = ConsensusOptimizer(inner, dppf(1.0, 0.0, period=2), timeout=60)
    closure = Closure(model, optimizer, rank)
    for closure.step in range(5):
        optimizer.step(closure)
    return flat(model), closure.seen


def test_lbfgs_searches_along_lines_of_different_lengths_and_meets_once_a_step() -> None:
    models = [mlp(), mlp()]
    inners = [LBFGS(m.parameters(), max_iter=6, line_search_fn="strong_wolfe") for m in models]
    for step in range(5):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):

            def closure(model: nn.Module = model, rank: int = rank, step: int = step) -> Tensor:
                model.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            inner.step(closure)
        if step % 2 == 1:
            average_by_hand(models)
    outcomes = run_ranks(2, line_searches)
    for model, (parameters, seen) in zip(models, outcomes, strict=True):
        assert same(parameters, flat(model))
        assert all(at == time // 2 for time, at in seen)
    assert len(outcomes[0][1]) != len(outcomes[1][1])  # evaluations differ between the ranks
