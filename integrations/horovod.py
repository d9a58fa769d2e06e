"""Horovod's ``DistributedOptimizer`` with a consensus method inside.

The one line that a user changes is the import: ``import consensus_opt.integrations.horovod as hvd``
in place of ``import horovod.torch as hvd``. Whatever this module does not define is Horovod's own.

``hvd.shutdown()`` on one rank fails what the others still wait for: call ``hvd.barrier()`` before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from consensus_opt.buffers import Buffers
from consensus_opt.checks import whole
from consensus_opt.integrations.horovod_transport import (
    HorovodPeerError,
    HorovodTransport,
    hvd,
    initialization,
)
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer
from consensus_opt.telemetry import Sink
from consensus_opt.transport import SoloTransport
from consensus_opt.uneven import UnevenRounds

__all__ = ["DistributedOptimizer", "HorovodPeerError", "HorovodTransport"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(hvd, name)


class DistributedOptimizer(ConsensusOptimizer):
    """Takes the place of ``horovod.torch.DistributedOptimizer``: averages models, not gradients.

    What differs for who comes from Horovod:

    - Gradients stay local, so ``synchronize()`` before clipping has nothing to do and
      ``skip_synchronize()`` nothing to skip; both may stay where they are. To make all models
      equal to their mean, call ``synchronize_models()``.
    - ``zero_grad()`` is legal at any time, and gradients may accumulate over any number of backward
      passes: the method's period counts calls of ``step()``.
    - ``hvd.broadcast_parameters(model.state_dict(), 0)`` and
      ``hvd.broadcast_optimizer_state(optimizer, 0)`` work, and the latter neither counts as a step
      nor starts a round.
    - Under ``hvd.elastic`` the first step after each start or reset compares the ranks, takes the
      latest clock, and begins the topology's cycle and the control anew over the workers that there
      are; starting from equal models is left to ``TorchState``. A failed peer raises an error that
      ``hvd.elastic.run`` handles.

    Args:
        optimizer: Any optimizer, also a ``horovod.torch.DistributedOptimizer(process_set=node)``,
            which averages gradients inside a node while the models meet over ``process_set``.
        named_parameters: Accepted; names are not needed.
        compression: Only ``Compression.none``.
        backward_passes_per_step: Accepted; nothing has to be known about it.
        op: Only ``Average``.
        gradient_predivide_factor: Only 1.
        num_groups: Accepted; the model travels as one vector.
        groups: Accepted, likewise.
        sparse_as_dense: Accepted; gradients do not travel.
        process_set: The ranks that meet; all if not given.
        method: What to do, for example ``local_sgd(period=4)``, ``gossip_sgd("ring")``, ``dppf()``.
        model: As in :class:`~consensus_opt.optimizer.ConsensusOptimizer`, like all that follow.
        total_steps: Number of steps that training will take.
        broadcast: Start all workers from rank 0's model.
        telemetry: Called with a ``RoundRecord`` after each round.
        timeout: Seconds to wait for a peer.

    Raises:
        ValueError: If an argument asks for what only makes sense for gradients that travel.
    """

    _initialization: Any = None  # of a copy: it is not joined, but finds a transport

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Any = hvd.Compression.none,
        backward_passes_per_step: int = 1,
        op: Any = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = hvd.global_process_set,
        *,
        method: Method,
        model: nn.Module | None = None,
        total_steps: int | None = None,
        broadcast: bool = True,
        telemetry: Sink | Sequence[Sink] | None = None,
        timeout: float = 300.0,
    ) -> None:
        whole(backward_passes_per_step, "backward_passes_per_step")
        _check_gradient_options(compression, op, gradient_predivide_factor)
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        super().__init__(
            optimizer,
            method,
            model=model,
            # Under elastic, others may be elsewhere now: the workers meet in the first step.
            transport=SoloTransport() if elastic else HorovodTransport(process_set, timeout),
            total_steps=total_steps,
            broadcast=broadcast,
            telemetry=telemetry,
            timeout=timeout,
        )
        self._process_set = process_set
        self._initialization = object() if elastic else initialization()

    def synchronize(self) -> None:  # type: ignore[override]
        """Let an inner optimizer of Horovod finish its gradients; otherwise nothing is to do."""
        getattr(self.inner, "synchronize", lambda: None)()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Hold around ``step()`` after ``synchronize()``, as with Horovod's own optimizer."""
        skip: AbstractContextManager[None] = getattr(self.inner, "skip_synchronize", nullcontext)()
        return skip

    def synchronize_models(self, buffers: Buffers = "average") -> None:
        """Make all workers equal to the mean, parameters and floating-point buffers; collective."""
        super().synchronize(buffers)

    def _connected(self) -> UnevenRounds:
        if self._initialization is not None and self._initialization is not initialization():
            self.transport = HorovodTransport(self._process_set, self._timeout)
            self._rounds.restart()
            self._rounds.start(self._trainable(), [], self._lr())
            self._initialization = initialization()
        return super()._connected()

    def _only_fills_state(self) -> bool:
        may_lack_state = self.clock == 0 or len(self.state) == 0
        return super()._only_fills_state() or (may_lack_state and _horovod_fills_state())


def _horovod_fills_state() -> bool:
    """Tell whether ``broadcast_optimizer_state`` is stepping only so that there is state to send.

    It does so on the ranks without state, which after an elastic reset are not all.
    """
    frame, code = sys._getframe(), hvd.broadcast_optimizer_state.__code__
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_code is code


def _check_gradient_options(compression: Any, op: Any, predivide: float) -> None:
    if compression is not hvd.Compression.none:
        raise ValueError(
            f"compression is {compression!r}, which compresses gradients, and only models "
            "travel; leave it out, and keep the model in half precision to send half the bytes"
        )
    if op != hvd.Average:
        raise ValueError(
            f"op is {op!r}, and models are averaged: op=hvd.Average, or leave it out; what else is "
            "done to them is the method's, for example method=dppf()"
        )
    if predivide != 1.0:
        raise ValueError(
            f"gradient_predivide_factor is {predivide!r}, and gradients are not summed here, so it "
            "can only be 1.0; leave it out"
        )
