"""What stacked workers should do, worked out apart: bare optimizers and matrices in float64.

Each worker has parameters and a bare optimizer of its own. A round multiplies the workers' rows by
matrices in float64 and returns, beside the result, how far rounding in the parameters' own dtype
may take them from it. After each call the workers take over the bits that they were compared with,
so that errors do not add up and bounds stay tight.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from consensus_opt import Every, Gossip, Method, PostLocal, QuadraticSync, schedules
from consensus_opt.acceleration import accelerate

LOCAL = 4
"""Roundings that a local step may differ by: rows of stacked tensors are cut otherwise."""

COUNTERS = ("step", "mu_product")
"""State that is the same on all workers, and looks like a parameter's where that has no axis."""


def real_rows(tensor: Tensor) -> Tensor:
    """The workers' values as rows of float64; complex ones as pairs of reals."""
    data = tensor.detach()
    data = torch.view_as_real(data.to(torch.complex128)) if data.is_complex() else data.double()
    return data.reshape(data.shape[0], -1)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def arithmetic_eps(dtype: torch.dtype) -> float:
    return min(eps(dtype), eps(torch.float32))


def least(dtype: torch.dtype) -> float:
    """What is lost below the smallest number of a dtype."""
    return 4 * torch.finfo(dtype).smallest_normal * eps(dtype)


@dataclass
class Value:
    """Rows in float64, and a bound for each element's error."""

    rows: Tensor
    error: Tensor
    dtype: torch.dtype

    def times(self, weights: np.ndarray) -> Value:
        """The rows after one exchange, rounded to the dtype."""
        w = torch.tensor(weights)
        rows, size = w @ self.rows, w.abs() @ (self.rows.abs() + self.error)
        terms = 2 + int((w != 0).sum(1).max())
        rounding = terms * arithmetic_eps(self.dtype) * size + eps(self.dtype) * rows.abs()
        return Value(rows, w.abs() @ self.error + rounding + least(self.dtype), self.dtype)

    def as_tensor(self, like: Tensor) -> Tensor:
        """The rows in the shape and dtype of a stacked tensor."""
        rows = self.rows
        if like.is_complex():
            rows = torch.view_as_complex(rows.reshape(*like.shape, 2).contiguous())
        return rows.reshape(like.shape).to(like.dtype)

    def widened(self, factor: float, least: float) -> Value:
        """The same rows with a larger bound."""
        return Value(self.rows, self.error * factor + least, self.dtype)

    def assert_equals(self, tensor: Tensor, what: str) -> None:
        found = real_rows(tensor)
        away = (found - self.rows).abs() - self.error
        assert not found.isnan().any(), f"{what} is not a number: {tensor}"
        assert away.numel() == 0 or float(away.max()) <= 0, (
            f"{what} is off by {float(away.max()):g} beyond rounding: {found} is not {self.rows}"
        )


def value(tensor: Tensor, roundings: float = 0.0) -> Value:
    rows = real_rows(tensor)
    size = rows.abs().amax(dim=1, keepdim=True) if rows.numel() else rows.sum(1, keepdim=True)
    error = roundings * eps(tensor.dtype) * (size + rows.abs()) + bool(roundings) * least(
        tensor.dtype
    )
    return Value(rows, error.expand_as(rows), tensor.dtype)


def next_due(timing: Any, step: int, lr: float, total: int | None) -> int:
    """The next round by trying each step."""
    if isinstance(timing, QuadraticSync):
        period = max(timing.min_period, math.floor((timing.coefficient / lr) ** 2))
        return min(step + period, total) if total and step < total else step + period
    due = step + 1
    while not _is_due(timing, due):
        due += 1
    return due


def _is_due(timing: Every | PostLocal, step: int) -> bool:
    if isinstance(timing, Every):
        return step % timing.period == 0
    return step <= timing.until or (step - timing.until) % timing.period == 0


def strength(schedule: Any, step: int, total: int | None, lr: float) -> float:
    """The formula of each schedule."""
    progress = 1.0 if total is None else min(1.0, step / total)
    if isinstance(schedule, schedules.LrPower):
        share = min(1.0, lr / schedule.reference) ** schedule.power
        return 1.0 if step <= schedule.start else schedule.least + (1 - schedule.least) * share
    if isinstance(schedule, schedules.Linear):
        return schedule.start * (1 - progress) + schedule.value * progress
    if isinstance(schedule, schedules.CosineUp):
        return schedule.value * math.sin(math.pi * progress / 2) ** 2
    if isinstance(schedule, schedules.CosineDown):
        progress = 0.0 if total is None else progress
        return schedule.value * math.cos(math.pi * progress / 2) ** 2
    return float(schedule.value)


def matrices(method: Method, n: int, first: int, made: int) -> list[np.ndarray]:
    """The matrices of the exchanges of one round, which are made together."""
    average = method.average
    if not isinstance(average, Gossip):
        return [np.full((n, n), 1 / n)] * bool(made)
    if average.accelerated and made:
        return [w.weights for w in accelerate(average.topology.mixing(n, 0), made)]
    return [average.topology.mixing(n, first + k).weights for k in range(made)]


def moved(
    starts: Sequence[Value], centres: Sequence[Value], pull: float, push: float
) -> list[Value] | None:
    """``x + alpha (c - x) + lambda (x - c) / r``; None where r is about what rounding makes."""
    differences = [c.rows - x.rows for x, c in zip(starts, centres, strict=True)]
    squared = sum((d.square().sum(1) for d in differences), torch.zeros(1, dtype=torch.float64))
    r = squared.sqrt()
    floor = _norm([c.rows * (8 * eps(c.dtype)) for c in centres])
    unsure = _norm([c.error + x.error for x, c in zip(starts, centres, strict=True)])
    if push > 0 and bool(((r < 4 * floor + 4 * unsure) & (r > 0)).any()):
        return None
    safe = torch.where(r > floor, r, torch.inf)
    weight = pull - push / safe
    slack = push * (unsure / safe + 1e-4) / safe
    results = []
    for x, c, d in zip(starts, centres, differences, strict=True):
        w = weight.expand(len(d)).unsqueeze(1)
        doubt = slack.expand(len(d)).unsqueeze(1)
        rows = x.rows + w * d
        rounding = 4 * eps(x.dtype) * (x.rows.abs() + (w.abs() + doubt) * d.abs())
        error = x.error * (1 - w).abs() + c.error * w.abs() + doubt * d.abs() + rounding
        results.append(Value(rows, error + least(x.dtype), x.dtype))
    return results


def _norm(parts: Sequence[Tensor]) -> Tensor:
    squares = (part.square().sum(1) for part in parts)
    return sum(squares, torch.zeros(1, dtype=torch.float64)).sqrt()


class Workers:
    """n workers with bare optimizers, which follow a stacked optimizer's bits."""

    def __init__(self, n: int, make: Any, groups: Sequence[dict[str, Any]]) -> None:
        self.n = n
        self.stacked: list[nn.Parameter] = []
        self.own: list[list[nn.Parameter]] = [[] for _ in range(n)]
        self._adopt([p for group in groups for p in group["params"]])
        self.optimizers = [make(own[: len(groups[0]["params"])]) for own in self.own]

    def _adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        for p in parameters:
            twin = self._shared_with(p)
            for m, own in enumerate(self.own):
                data = (
                    p.detach()[m].clone() if twin is None else own[twin].detach().view(p[m].shape)
                )
                own.append(nn.Parameter(data, requires_grad=p.requires_grad))
            self.stacked.append(p)

    def _shared_with(self, parameter: nn.Parameter) -> int | None:
        pointers = [p.untyped_storage().data_ptr() for p in self.stacked]
        pointer = parameter.untyped_storage().data_ptr()
        fits = parameter.numel() > 0 and pointer in pointers
        return pointers.index(pointer) if fits else None

    def replace(self, parameters: Sequence[nn.Parameter]) -> None:
        """Follow other tensors of the same values; they share no memory."""
        self.stacked = list(parameters)
        self.part()

    def part(self, index: int | None = None) -> None:
        """Give a parameter, by default each one, memory of its own."""
        for own in self.own:
            for p in own if index is None else [own[index]]:
                p.data = p.data.clone()

    def is_shared(self, parameter: nn.Parameter) -> bool:
        """Tell whether another parameter lies in the same memory."""
        pointers = [p.untyped_storage().data_ptr() for p in self.stacked]
        return pointers.count(parameter.untyped_storage().data_ptr()) > 1

    def add(self, parameter: nn.Parameter) -> None:
        self._adopt([parameter])
        for own, optimizer in zip(self.own, self.optimizers, strict=True):
            optimizer.add_param_group({"params": [own[-1]]})

    def reload(self) -> None:
        """Load the state that each bare optimizer has."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def take_gradients(self, scale: float) -> None:
        """Take the rows of the stacked gradients, which were multiplied by ``scale``."""
        for m, own in enumerate(self.own):
            for p, stacked in zip(own, self.stacked, strict=True):
                p.requires_grad = stacked.requires_grad
                p.grad = None if stacked.grad is None else stacked.grad[m].div(scale)

    def step(self) -> None:
        """A local step of each worker."""
        for optimizer in self.optimizers:
            optimizer.step()

    def rows(self, index: int) -> Tensor:
        """A parameter, one row a worker."""
        return torch.stack([own[index].detach() for own in self.own])

    def state_rows(self, index: int) -> dict[str, Tensor]:
        """The state tensors of a parameter that have its shape, one row a worker."""
        each = [
            optimizer.state.get(own[index], {})
            for optimizer, own in zip(self.optimizers, self.own, strict=True)
        ]
        return {
            name: torch.stack([state[name] for state in each])
            for name in _names(each[0], self.own[0][index])
        }

    @torch.no_grad()
    def put(self, index: int, rows: Tensor, name: str | None = None) -> None:
        """Overwrite a parameter, or a tensor of its state, with these rows."""
        for m, (own, optimizer) in enumerate(zip(self.own, self.optimizers, strict=True)):
            target = own[index] if name is None else optimizer.state[own[index]][name]
            target.copy_(rows[m].view_as(target) if rows.dtype == target.dtype else rows[m])

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the bits of the stacked parameters and their state."""
        for i, p in enumerate(self.stacked):
            self.put(i, p.detach())
            for name in self.state_rows(i):
                self.put(i, optimizer.state[p][name], name)


def _names(state: dict[str, Any], like: Tensor) -> list[str]:
    return sorted(
        name
        for name, held in state.items()
        if isinstance(held, Tensor) and name not in COUNTERS and held.shape == like.shape
    )
