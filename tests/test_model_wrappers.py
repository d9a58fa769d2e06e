"""What people wrap around a model works beside consensus, before and after a first round."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from consensus_opt import ConsensusOptimizer, gossip_sgd, local_sgd
from tests.harness import run_ranks
from tests.problems import average_by_hand, flat, loss_of, mlp, same, train

STEPS, PERIOD, DECAY = 7, 2, 0.9


def wrap(model: nn.Module, lr: float = 0.1, broadcast: bool = True) -> ConsensusOptimizer:
    inner = SGD(model.parameters(), lr=lr, momentum=0.9)
    return ConsensusOptimizer(inner, local_sgd(PERIOD), broadcast=broadcast, timeout=30)


class Checkpointed(nn.Module):
    """Keeps no activations between its two halves."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.model[:2], x, use_reentrant=False)
        return self.model[2](hidden)  # type: ignore[no-any-return]


def train_wrapped(rank: int, how: str) -> tuple[Tensor, int]:
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compilations.append(1)
        return graph.forward

    model = mlp()
    trained: dict[str, Callable[[], Any]] = {
        "bare": lambda: model,
        "compiled": lambda: torch.compile(model, backend=backend),
        "checkpointed": lambda: Checkpointed(model),
    }
    wrapped = trained[how]()
    optimizer = wrap(model)
    train(wrapped, optimizer, range(STEPS), rank)
    with optimizer.averaged():
        loss_of(wrapped, rank, 0)
    return flat(model), len(compilations)


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_a_wrapped_model_trains_to_the_same_bits_and_compiles_once(how: str) -> None:
    bare = run_ranks(2, train_wrapped, "bare")
    for (expected, _), (parameters, compilations) in zip(
        bare, run_ranks(2, train_wrapped, how), strict=True
    ):
        assert same(parameters, expected)
        assert compilations == (how == "compiled")


def train_with_ema(rank: int, start: int) -> bool:
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, range(start), rank)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected: Tensor | None = None
    for step in range(start, STEPS):
        train(model, optimizer, [step], rank)
        ema.update_parameters(model)
        now = flat(model)
        expected = now if expected is None else DECAY * expected + (1 - DECAY) * now
    assert expected is not None
    torch.testing.assert_close(flat(ema.module), expected)
    with optimizer.averaged():
        torch.testing.assert_close(flat(ema.module), expected)  # it has memory of its own
    return not same(flat(ema.module), flat(model))


@pytest.mark.parametrize("start", [0, 3], ids=["before a round", "after a round"])
def test_a_moving_average_beside_it_is_of_what_the_worker_had(start: int) -> None:
    assert run_ranks(2, train_with_ema, start) == [True, True]


def unfreeze(rank: int) -> Tensor:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    for step in range(STEPS):
        if step == 3:
            model[0].requires_grad_(True)
        train(model, optimizer, [step], rank)
    return flat(model)


def test_R116_what_is_unfrozen_on_all_ranks_joins_the_next_round() -> None:
    models = [mlp(), mlp()]
    inners = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            model[0].requires_grad_(step >= 3)
            train(model, inner, [step], rank)
        if step % PERIOD == 1:
            average_by_hand(models)
    for model, parameters in zip(models, run_ranks(2, unfreeze), strict=True):
        assert same(parameters, flat(model))


def gan_step(generator: nn.Module, critic: nn.Module, turn: int, noise: Tensor) -> Tensor:
    made = critic(generator(noise))
    return made.square().mean() if turn else (made - 1).square().mean()


def train_gan(rank: int) -> tuple[Tensor, Tensor, list[int]]:
    generator, critic = mlp(1, outputs=6), mlp(2, outputs=1)
    optimizers = [
        ConsensusOptimizer(Adam(generator.parameters(), lr=0.01), local_sgd(2), timeout=30),
        ConsensusOptimizer(SGD(critic.parameters(), lr=0.01), gossip_sgd("ring", 3), timeout=30),
    ]
    noise = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for turn, optimizer in enumerate(optimizers):
            for each in optimizers:
                each.zero_grad()
            gan_step(generator, critic, turn, torch.randn(8, 6, generator=noise)).backward()
            optimizer.step()  # each loss fills the gradients of both
    return flat(generator), flat(critic), [optimizer.rounds for optimizer in optimizers]


def test_the_two_optimizers_of_a_gan_keep_their_own_clocks_and_parameters() -> None:
    generators = [mlp(1, outputs=6), mlp(1, outputs=6)]
    critics = [mlp(2, outputs=1), mlp(2, outputs=1)]
    inners = [
        (Adam(g.parameters(), lr=0.01), SGD(c.parameters(), lr=0.01))
        for g, c in zip(generators, critics, strict=True)
    ]
    noises = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for step in range(STEPS):
        for turn in range(2):
            for rank in range(2):
                for inner in inners[rank]:
                    inner.zero_grad()
                noise = torch.randn(8, 6, generator=noises[rank])
                gan_step(generators[rank], critics[rank], turn, noise).backward()
                inners[rank][turn].step()
            if (step + 1) % (2, 3)[turn] == 0:
                average_by_hand((generators, critics)[turn])
    for rank, (generator, critic, rounds) in enumerate(run_ranks(2, train_gan)):
        assert same(generator, flat(generators[rank]))
        torch.testing.assert_close(critic, flat(critics[rank]))
        assert rounds == [3, 2]


class WithModel(Dataset[Tensor]):
    """A data set that hands out what its model says, in the loader's processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return self.model(torch.ones(1, 6))  # type: ignore[no-any-return]


def test_a_laid_out_model_goes_to_spawned_loader_processes_and_trains_on() -> None:
    model, twin = mlp(), mlp()
    optimizer, bare = wrap(model), SGD(twin.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(2))
    with optimizer.averaged():
        pass  # lays it out
    spawn = multiprocessing.get_context("spawn")
    loader: Iterable[Tensor] = DataLoader(
        WithModel(model), batch_size=1, num_workers=1, multiprocessing_context=spawn
    )
    with torch.no_grad():
        assert all(same(made[0], model(torch.ones(1, 6))) for made in loader)
    train(model, optimizer, range(2, 4))
    with optimizer.averaged():
        train(twin, bare, range(4))
        assert same(flat(model), flat(twin))


def saved_and_loaded(model: nn.Module) -> Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < 4 * flat(model).numel() + 8000
    return flat(torch.load(io.BytesIO(file.getvalue()), weights_only=False))


def deep_copied(model: nn.Module) -> Tensor:
    twin = copy.deepcopy(model)
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in twin.parameters()}
    assert sum(each.nbytes() for each in memory.values()) == 4 * flat(model).numel()
    assert not memory.keys() & {p.untyped_storage().data_ptr() for p in model.parameters()}
    return flat(twin)


def shared(model: nn.Module) -> Tensor:
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    return flat(model)


COPIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "saved": saved_and_loaded,
    "deep copy": deep_copied,
    "pickle": lambda model: flat(pickle.loads(pickle.dumps(model))),
    "share_memory": shared,
    "float64 and back": lambda model: flat(model.double().float()),
    "channels_last": lambda model: flat(model.to(memory_format=torch.channels_last)),
}


def copy_and_go_on(rank: int, how: str) -> tuple[bool, Tensor]:
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 3))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = wrap(model, lr=0.01)
    train(model, optimizer, range(3), rank)
    before = flat(model)
    copied = how == "none" or same(COPIES[how](model), before)
    train(model, optimizer, range(3, STEPS), rank)
    return copied, flat(model)


@pytest.mark.parametrize("how", COPIES)
def test_a_laid_out_model_can_be_copied_and_moved_and_goes_on_with_the_same_bits(how: str) -> None:
    expected = run_ranks(2, copy_and_go_on, "none")
    for (copied, end), (_, undisturbed) in zip(
        run_ranks(2, copy_and_go_on, how), expected, strict=True
    ):
        assert copied
        assert same(end, undisturbed)


def assign_and_go_on(rank: int) -> tuple[Tensor, Tensor]:
    ends = []
    for assign in (True, False):
        model = mlp()
        optimizer = wrap(model)
        train(model, optimizer, range(3), rank)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if assign:  # new parameters, of which no optimizer made before knows
            model = mlp(seed=9)
            model.load_state_dict(saved[0], assign=True)
            optimizer = wrap(model, broadcast=False)  # each rank's own
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(3, STEPS), rank)
        ends.append(flat(model))
    return ends[0], ends[1]


def test_a_state_that_was_assigned_goes_on_with_an_optimizer_made_after_it() -> None:
    for assigned, expected in run_ranks(2, assign_and_go_on):
        assert same(assigned, expected)
