"""An optimizer whose groups, state and defaults are those of another one.

They are looked up each time and never copied (contract C5): load_state_dict, frameworks and engines
replace what lies in ``param_groups``, and both objects see it.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from consensus_opt.uneven import UnevenRounds


class OptimizerView(torch.optim.Optimizer):
    """What a wrapper shares with its inner optimizer, which it keeps in ``_inner``.

    Before there is one, what the base class assigns to the live views is ignored.
    """

    _inner: torch.optim.Optimizer
    _rounds: UnevenRounds

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups themselves."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_ready():
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state itself."""
        return getattr(self._inner, "state", {})

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_ready():
            self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults themselves."""
        return getattr(self._inner, "defaults", {})

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_ready():
            self._inner.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; it joins the next round. Call it on all ranks."""
        if self._is_ready():
            self._inner.add_param_group(param_group)
            self._rounds.watch(self._trainable())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; legal at any time."""
        if "set_to_none" in inspect.signature(self._inner.zero_grad).parameters:
            self._inner.zero_grad(set_to_none=set_to_none)
        else:
            self._inner.zero_grad()

    def _is_ready(self) -> bool:
        return "_inner" in self.__dict__

    def _all_parameters(self) -> list[Tensor]:
        unique = {id(p): p for group in self.param_groups for p in group["params"]}
        return list(unique.values())

    def _trainable(self) -> list[Tensor]:
        return [p for p in self._all_parameters() if p.requires_grad]

    def _lr(self) -> float:
        return float(self.param_groups[0].get("lr") or 0.0)  # some optimizers find it: lr=None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _only_fills_state(self) -> bool:
        """Tell whether ``torch.distributed.checkpoint`` steps so that there is state to save.

        It does so on any rank whose optimizer has no state yet, at learning rate 0 with gradients
        of 0. Such a step changes no parameter, and is no step of the training.
        """
        if self.state or any(group.get("lr") is None or group["lr"] for group in self.param_groups):
            return False
        module = sys.modules.get("torch.distributed.checkpoint.state_dict")
        if module is None:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals is not vars(module):
            frame = frame.f_back
        return frame is not None
