"""How an inner optimizer steps under ``torch.amp.GradScaler`` (contract C4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def lent(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes for a while."""
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(target, name)


def unscale(parameters: Sequence[Tensor], scale: Tensor) -> None:
    """Divide the gradients by GradScaler's factor, as its ``unscale_`` does."""
    inverse = scale.double().reciprocal().float()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(inverse.to(parameter.grad.device))
