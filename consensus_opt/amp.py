"""How an inner optimizer steps under ``torch.amp.GradScaler`` (contract C4)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState


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


def is_unscaled(optimizer: Any) -> bool:
    """Tell whether the GradScaler that is calling ``step`` has unscaled this optimizer's gradients.

    It knows an optimizer by its identity, so that after ``scaler.unscale_(wrapper.inner)`` it takes
    those of the wrapper for scaled ones. And it does not say who it is.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    states = {} if frame is None else frame.f_locals["self"]._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED
