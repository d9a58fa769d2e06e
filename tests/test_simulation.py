"""n virtual workers equal n models that are trained one by one and averaged by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, AdamW, Optimizer

from consensus_opt import Method, dppf, gossip_sgd, local_sgd
from consensus_opt.simulation import Simulation
from consensus_opt.topology import topology
from tests.problems import flat, mlp, same

N, BATCH, STEPS = 5, 6, 6


class Tied(nn.Module):
    """An input layer that is also the output layer, a frozen shift, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 6))
        self.shift = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().square().sum()
        return self.inner(x @ self.weight.t() + self.shift) @ self.weight


def conv_net(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, bias=False),  # BatchNorm leaves a bias nothing but rounding
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = {"mlp": mlp, "tied": Tied, "conv": conv_net}[name]()
    if name == "conv":
        model(torch.randn(2, 1, 8, 8))
    return model.double()


def data(name: str, step: int, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (1, 8, 8) if name == "conv" else (6,)
    x = torch.randn(n, BATCH, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (n, BATCH), generator=generator)
    return x, y


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01),
}


def one_by_one(name: str, optimizer: str, graph: str, n: int) -> tuple[list[nn.Module], Tensor]:
    """Train n models in a loop; after each step mix their parameters with the graph's matrix."""
    models = [make(name) for _ in range(n)]
    inner = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    losses = torch.zeros(STEPS, n, dtype=torch.float64)
    for step in range(STEPS):
        x, y = data(name, step, n)
        for m, model in enumerate(models):
            inner[m].zero_grad()
            loss = cross_entropy(model(x[m]), y[m])
            loss.backward()
            inner[m].step()
            losses[step, m] = loss.detach()
        weights = torch.tensor(topology(graph).mixing(n, step).weights)
        with torch.no_grad():
            for same_parameter in zip(*(m.parameters() for m in models), strict=True):
                mixed = torch.tensordot(weights, torch.stack(list(same_parameter)), 1)
                for parameter, value in zip(same_parameter, mixed, strict=True):
                    parameter.copy_(value)
    return models, losses


@pytest.mark.parametrize("graph", ["ring", "base2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "tied", "conv"])
def test_workers_follow_models_that_are_trained_one_by_one(
    name: str, optimizer: str, graph: str
) -> None:
    model = make(name)
    start = copy.deepcopy(model.state_dict())
    simulation = Simulation(model, N, gossip_sgd(graph), OPTIMIZERS[optimizer])
    losses = torch.stack([simulation.step(*data(name, step)) for step in range(STEPS)])
    expected_models, expected_losses = one_by_one(name, optimizer, graph, N)
    torch.testing.assert_close(losses, expected_losses)
    for m, expected in enumerate(expected_models):
        torch.testing.assert_close(
            simulation.worker(m).state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12
        )
    assert same(dict(model.state_dict()), dict(start))


def test_the_mean_model_has_the_mean_of_parameters_and_statistics() -> None:
    simulation = Simulation(make("conv"), N, gossip_sgd("ring"))
    for step in range(STEPS):
        simulation.step(*data("conv", step))
    states = [simulation.worker(m).state_dict() for m in range(N)]
    mean = simulation.mean().state_dict()
    for key, value in mean.items():
        rows = torch.stack([state[key] for state in states])
        expected = rows[0] if key.endswith("num_batches_tracked") else rows.mean(0)
        torch.testing.assert_close(value, expected)
    assert all(same(simulation.worker(m).state_dict(), states[m]) for m in range(N))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", [local_sgd(1), dppf(period=2)], ids=["local_sgd", "dppf"])
def test_one_worker_is_plain_training(method: Method, optimizer: str) -> None:
    simulation = Simulation(make("conv"), 1, method, OPTIMIZERS[optimizer])
    model = make("conv")
    inner = OPTIMIZERS[optimizer](list(model.parameters()))
    for step in range(STEPS):
        x, y = data("conv", step, 1)
        inner.zero_grad()
        cross_entropy(model(x[0]), y[0]).backward()
        inner.step()
        simulation.step(x, y)
    torch.testing.assert_close(simulation.worker(0).state_dict(), model.state_dict())


def test_dropout_draws_differ_between_workers_and_are_off_in_the_mean_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    simulation = Simulation(model, N, local_sgd(1))
    x, y = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    losses = simulation.step(x.expand(N, BATCH, 6), y.expand(N, BATCH))
    assert len(set(losses.tolist())) == N
    mean = simulation.mean().eval()
    assert same(mean(x), mean(x))


def test_another_loss_is_used() -> None:
    simulation = Simulation(make("mlp"), N, local_sgd(1), loss=mse_loss)
    x, _ = data("mlp", 0)
    y = torch.randn(N, BATCH, 3, dtype=torch.float64)
    expected = torch.stack([mse_loss(make("mlp")(x[m]), y[m]) for m in range(N)])
    torch.testing.assert_close(simulation.step(x, y), expected)


@pytest.mark.parametrize(
    "method", [gossip_sgd("ring"), dppf(0.1, 0.1, period=4)], ids=["gossip", "dppf"]
)
def test_64_workers_of_a_cnn_with_30_thousand_parameters_learn(method: Method) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )
    assert 30_000 < flat(model).numel() < 40_000
    simulation = Simulation(model, 64, method, lambda p: SGD(p, lr=0.05, momentum=0.9))
    centres = torch.randn(10, 1, 14, 14)
    losses = []
    for _ in range(8):
        y = torch.randint(0, 10, (64, 4))
        losses.append(simulation.step(centres[y] + 0.3 * torch.randn(64, 4, 1, 14, 14), y).mean())
    assert losses[-1] < 0.5 * losses[0]
    accuracy = (simulation.mean().eval()(centres).argmax(1) == torch.arange(10)).float().mean()
    assert accuracy > 0.8


def test_batches_that_are_not_one_a_worker_are_refused_with_what_to_give() -> None:
    simulation = Simulation(make("mlp"), N, local_sgd(1))
    x, y = data("mlp", 0, N - 1)
    with pytest.raises(
        ValueError, match=r"4 and 4 rows, and there are 5 workers; give each worker"
    ):
        simulation.step(x, y)
