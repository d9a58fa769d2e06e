"""Small problems that tests train on, and what it means that two results are the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consensus_opt import ConsensusOptimizer, Method, StackedTransport

Case = tuple[Callable[[], object], type[Exception], str]
"""A wrong call, what it raises, and the parts of its text: given | allowed | to write instead."""

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def mlp(seed: int = 0, inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def matrices(seed: int = 0) -> nn.Sequential:
    """An MLP whose parameters are all matrices, as Muon wants them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


def embedding(seed: int = 0) -> nn.Sequential:
    """A model with sparse gradients alone, as SparseAdam wants them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.EmbeddingBag(10, 3, mode="sum", sparse=True))


def batch(rank: int, step: int, inputs: int = 6) -> tuple[Tensor, Tensor]:
    """A batch of worker ``rank`` at ``step``: the same whoever asks for it."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, inputs, generator=generator), torch.randint(
        0, 3, (8,), generator=generator
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    if any(isinstance(module, nn.EmbeddingBag) for module in model.modules()):
        x = (x.abs() * 10).long() % 10
    return nn.functional.cross_entropy(model(x), y)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int = 0
) -> None:
    """The ordinary loop, with a closure where the optimizer asks for one."""
    for step in steps:
        train_step(model, optimizer, step, rank)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    inner = optimizer.inner if isinstance(optimizer, ConsensusOptimizer) else optimizer
    if isinstance(inner, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    """All parameters of a model in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same(a: Any, b: Any) -> bool:
    """Tell whether two nested structures hold the same bits (and NaN in the same places)."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.allclose(_wide(a), _wide(b), 0, 0, equal_nan=True)
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def stacked(
    rows: Tensor, method: Method, lr: float = 0.0, **options: Any
) -> tuple[nn.Parameter, ConsensusOptimizer]:
    """Workers that start from these rows, moved by the method alone unless they get gradients."""
    parameter = nn.Parameter(rows.clone())
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([parameter], lr=lr),
        method,
        transport=StackedTransport(len(rows)),
        broadcast=False,
        **options,
    )
    parameter.grad = torch.zeros_like(parameter)
    return parameter, optimizer


def random_rows(n: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype)


def average_by_hand(models: Sequence[nn.Module]) -> None:
    """Give every model the mean of all, summed in the order of the ranks."""
    with torch.no_grad():
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            mean = sum(parameters[1:], parameters[0].clone()) / len(parameters)
            for parameter in parameters:
                parameter.copy_(mean)


def assert_says(case: Case) -> None:
    """Assert that the call fails, with all three parts in its text."""
    call, kind, parts = case
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert [part for part in parts.split(" | ") if part not in text] == []
