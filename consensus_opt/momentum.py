"""Quasi-global momentum: momentum along the way that a worker went together with the others.

With unlike data, local momentum pulls each worker on toward its own optimum. Here the momentum
follows the parameters, through the local step and the exchanges after it; no message is needed:

    d = (x_t - x_{t+1}) / lr        m <- beta m + (1 - beta) d

A step without a round counts as one whose exchange changed nothing.

Source: Lin et al., "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on
Heterogeneous Data", ICML 2021, with its mu = beta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BUFFER = "momentum_buffer"


def check_momentum(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless all parameter groups have momentum."""
    for number, group in enumerate(groups):
        if not group.get("momentum"):
            raise ValueError(
                f"the policy for optimizer state is 'quasi_global', and parameter group {number} "
                f"has momentum {group.get('momentum')!r}; it must be above 0; write "
                "torch.optim.SGD(parameters, lr, momentum=0.9), or state='average' for Adam"
            )


class QuasiGlobal:
    """Where a step starts from. Memory: two more models during the step.

    Args:
        groups: Parameter groups of an optimizer with ``momentum`` (SGD, RMSprop).
        state: Its state, where momentum is ``"momentum_buffer"``.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
        self._starts = [
            (group["lr"], group, parameter, parameter.detach().clone(), _copy(state, parameter))
            for group in groups
            for parameter in group["params"]
        ]

    @torch.no_grad()
    def renew(self, state: Mapping[Any, Any]) -> None:
        """Set the momentum after the step and its round; a rate of 0 leaves it as it was."""
        for lr, group, parameter, start, momentum in self._starts:
            buffer = state.get(parameter, {}).get(_BUFFER)
            if buffer is None:
                continue
            keep = group["momentum"]
            buffer.copy_(torch.zeros_like(buffer) if momentum is None else momentum)
            if lr != 0:
                buffer.mul_(keep).add_((start - parameter) / lr, alpha=1 - keep)


def _copy(state: Mapping[Any, Any], parameter: Tensor) -> Tensor | None:
    buffer = state.get(parameter, {}).get(_BUFFER)
    return None if buffer is None else buffer.clone()
