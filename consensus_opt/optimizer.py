"""ConsensusOptimizer: the optimizer that the user holds.

It is a ``torch.optim.Optimizer`` in every habit (hooks, schedulers, checkpoints, AMP, pickle), and
keeps nothing of its own that the inner optimizer has: ``param_groups``, ``state`` and ``defaults``
are the inner optimizer's, looked up each time (contract C5). What it adds is one thing: after the
inner step, it lets :class:`~consensus_opt.rounds.Rounds` count and, when due, communicate.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from consensus_opt.amp import is_unscaled, lent, unscale
from consensus_opt.arguments import check_kinds
from consensus_opt.buffers import Buffers, Recompute, averaged_buffers, name_call
from consensus_opt.checks import flag, seconds, whole
from consensus_opt.joining import UnevenData
from consensus_opt.meeting import LocalStep
from consensus_opt.methods import Method
from consensus_opt.momentum import QuasiGlobal, check_momentum
from consensus_opt.state import travelling_state
from consensus_opt.telemetry import Sink, as_sinks
from consensus_opt.transport import Transport
from consensus_opt.uneven import UnevenRounds
from consensus_opt.view import OptimizerView

KEY = "consensus"
"""Where the wrapper's own state lies in ``state_dict()``."""


class ConsensusOptimizer(OptimizerView, UnevenData):
    """Wraps an optimizer so that its worker takes local steps and now and then averages.

    ::

        x_m <- x_m + alpha (x_C - x_m) + lambda (x_m - x_A) / ||x_m - x_A||    when a round is due

    Constructing it is a collective call: all ranks construct it with the same method and the same
    model. A world of one worker runs the inner optimizer, bit for bit.

    Args:
        optimizer: Any optimizer; its ``step`` stays local. Do not average gradients as well.
        method: What to do, for example ``local_sgd(period=4)``, ``gossip_sgd("ring")``, ``dppf()``.
        model: The module whose buffers (BatchNorm statistics) belong to the parameters. They are
            local in training; ``averaged()`` and ``synchronize()`` average floating-point ones.
        transport: How to reach the other workers; found from what is initialised if not given.
        shards: How to reach the ranks that hold the other pieces of this replica, where it is
            sharded; ``transport`` then reaches the same piece of the other replicas.
        total_steps: Number of steps that training will take, for schedules over training.
        broadcast: Start all workers from rank 0's parameters and buffers; False keeps their own.
        telemetry: Called with a ``RoundRecord`` after each round; one callable or several.
        timeout: Seconds to wait for a peer, for a transport that is found.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the method does not fit the number of workers.
        RankMismatchError: On every rank, if ranks differ in method or parameters.
    """

    _step_supports_amp_scaling = True
    _views = True
    """Whether parameters may move into one flat buffer; not where others hold their memory."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        model: nn.Module | None = None,
        transport: Transport | None = None,
        shards: Transport | None = None,
        total_steps: int | None = None,
        broadcast: bool = True,
        telemetry: Sink | Sequence[Sink] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if isinstance(optimizer, ConsensusOptimizer):
            raise TypeError(
                "optimizer is a ConsensusOptimizer already, and one method runs at a time; wrap "
                "the optimizer inside it: ConsensusOptimizer(optimizer.inner, method)"
            )
        check_kinds(optimizer, method, model, transport, shards)
        if total_steps is not None:
            total_steps = whole(total_steps, "total_steps", "total_steps=epochs * len(loader)")
        # Before `_inner` exists, what the base class assigns to the live views is ignored.
        super().__init__(optimizer.param_groups, getattr(optimizer, "defaults", {}))
        if method.state == "quasi_global":
            check_momentum(optimizer.param_groups)
        self._inner = optimizer
        self._model = model
        self._found_inf: Tensor | None = None
        self._averaging = False
        self._timeout = seconds(timeout)
        self._rounds = UnevenRounds(method, total_steps, as_sinks(telemetry), self._views)
        self._rounds.connect(transport or _find_transport(timeout), shards)
        everything = self._everything() if flag(broadcast, "broadcast", "broadcast=False") else []
        self._connected().start(self._trainable(), everything, self._lr())

    # ------------------------------------------------------------------ what communication did

    @property
    def method(self) -> Method:
        """The method that runs."""
        return self._rounds.method

    @property
    def transport(self) -> Transport:
        """The way to the other workers; a pickled copy finds one at its first step, or is given."""
        if not hasattr(self._rounds, "transport"):
            if self._rounds.pieces > 1:
                raise RuntimeError(
                    f"this is a copy of the optimizer of a replica in {self._rounds.pieces} "
                    "pieces, and does not know their ranks; write optimizer.connect(transport, "
                    "shards) before its first step"
                )
            self._rounds.connect(_find_transport(self._timeout))
        return self._rounds.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._rounds.connect(transport)

    @property
    def shards(self) -> Transport:
        """The way to the other pieces of this replica; of size 1 where it is whole."""
        return self._rounds.shards

    def connect(self, transport: Transport, shards: Transport | None = None) -> None:
        """Reach the other workers, and the other pieces of this replica, by these from now on."""
        self._rounds.connect(transport, shards)

    @property
    def clock(self) -> int:
        """Calls of ``step()`` so far."""
        return self._rounds.clock

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return self._rounds.rounds

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this process has sent in rounds so far."""
        return self._rounds.bytes_sent

    @property
    def step_applied(self) -> bool:
        """Whether the last ``step()`` changed parameters: False after an overflow under AMP."""
        return self._found_inf is None or not bool(self._found_inf.item())

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step, and communicate if a round is due.

        Under ``torch.amp.GradScaler`` an overflow skips the inner step on this rank only; the round
        happens all the same, because the other ranks are in it (contract C4).

        Args:
            closure: Handed to the inner optimizer; it may be called several times, and communicates
                never.

        Returns:
            What the inner optimizer's step returned.

        Raises:
            RuntimeError: If called inside ``averaged()``.
            RankMismatchError: If ranks differ in parameters, method or clock.
            PeerError: If a peer died or did not answer in time.
            EndOfDataError: If a worker has run out of data, in ``join("stop")``.
        """
        if self._only_fills_state():
            return self._inner.step()
        if self._averaging:
            raise RuntimeError(
                "step() was called inside 'with optimizer.averaged():', where the parameters are "
                "the mean model's and will be put back; train outside of the block"
            )
        self._announce()
        # GradScaler sets these two for the duration of a step, and deletes them after it.
        self._found_inf = getattr(self, "found_inf", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None and is_unscaled(self._inner):
            scale = None
        follows = self.method.state == "quasi_global" and self.transport.size > 1
        momentum = QuasiGlobal(self.param_groups, self.state) if follows else None
        if self.method.mix_first:
            self._communicate(scale)
        loss = self._inner_step(closure, scale)
        if not self.method.mix_first:
            self._communicate(scale)
        if momentum is not None and self.step_applied:
            momentum.renew(self.state)
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _communicate(self, scale: Tensor | None) -> None:
        self._connected().tick(self._local_step(scale))

    def _local_step(self, scale: Tensor | None = None) -> LocalStep:
        parameters, batch = self._trainable(), self.transport.batch
        return LocalStep(
            parameters,
            state=travelling_state(self.method.state, self.state, parameters, batch),
            lr=self._lr(),
            gradient_scale=scale,
            # The user's own unscale_() has changed gradients since backward, and hides the factor.
            remeasure=self._found_inf is not None and scale is None,
            gradient_norm=self._gradient_norm(),
        )

    def _gradient_norm(self) -> float | None:
        """Return the norm of the step's gradients where the engine tells it."""
        return None

    def _outlast(self) -> None:
        """Follow workers with more data until none has any."""
        self._connected().outlast(self._local_step(), self._all_parameters(), self._buffers())

    def _follow_step(self) -> None:
        """Follow workers with more data for one step."""
        self._connected().follow_step(self._local_step(), self._all_parameters(), self._buffers())

    def _connected(self) -> UnevenRounds:
        """Return the rounds after the transport is known."""
        _ = self.transport
        self._rounds.uneven = self._mode()
        return self._rounds

    def _inner_step(self, closure: Callable[[], Any] | None, scale: Tensor | None) -> Any:
        arguments = () if closure is None else (closure,)
        if self._found_inf is None:
            return self._inner.step(*arguments)
        if getattr(self._inner, "_step_supports_amp_scaling", False):
            with lent(self._inner, grad_scale=scale, found_inf=self._found_inf):
                return self._inner.step(*arguments)
        if not self.step_applied:
            return None
        if scale is not None:
            unscale(self._all_parameters(), scale)
        return self._inner.step(*arguments)

    # ------------------------------------------------------------------ the mean model

    @contextmanager
    def averaged(self, buffers: Buffers = "average") -> Iterator[None]:
        """Put the mean model in place, and restore every bit of this worker's own afterwards.

        A collective call: enter it on all ranks. Memory: one more model while it lasts.

        Args:
            buffers: What the mean model has for the buffers of ``model``: the "average" of the
                floating-point ones, this worker's own ("local"), or the average with BatchNorm
                statistics that ``Recompute(batches)`` takes anew from data.

        Raises:
            ValueError: If ``buffers`` is none of these, or there is no BatchNorm to recompute.
        """
        operation = self._name_call("averaged", buffers)
        chosen = averaged_buffers(operation, self._buffers())
        held = self._connected().averaged(operation, self._all_parameters(), chosen, self._model)
        with held:
            outer, self._averaging = self._averaging, True
            try:
                self._recompute(buffers)
                yield
            finally:
                self._averaging = outer

    def synchronize(self, buffers: Buffers = "average") -> None:
        """Make all workers equal to the mean; collective, with ``buffers`` as in averaged()."""
        operation = self._name_call("synchronize", buffers)
        chosen = averaged_buffers(operation, self._buffers())
        self._connected().synchronize(operation, self._all_parameters(), chosen)
        self._recompute(buffers)

    def _name_call(self, call: str, buffers: Buffers) -> str:
        if isinstance(buffers, Recompute):
            self.check_outside_join("buffers=Recompute(...)")
        return name_call(call, buffers, self._model)

    def _recompute(self, buffers: Buffers) -> None:
        if isinstance(buffers, Recompute) and self._model is not None:
            buffers.run(self._model, self.transport)

    def mean_of(self, value: float | Tensor) -> float:
        """Return the mean of a number over the workers, with the same bits on all; collective.

        ``scheduler.step(optimizer.mean_of(loss))`` keeps ReduceLROnPlateau, and so the learning
        rate, the same on all ranks; a decision to stop early is one too.
        """
        self.check_outside_join("mean_of()")
        return self._connected().mean_of(value)

    def consensus_distance(self) -> float:
        """Return ``Xi = sqrt(mean_m ||x_m - x_A||^2)`` over all parameters, exactly; collective."""
        return math.hypot(*self._connected().distances(self._all_parameters()).values())

    def consensus_distances(self) -> dict[str, float]:
        """Return Xi of each parameter by its name, exactly; a collective call.

        Names are those of ``model``; without one, ``"GROUP.INDEX"`` in the parameter groups. Their
        squares add up to the square of :meth:`consensus_distance`.
        """
        each = self._connected().distances(self._all_parameters())
        names = {
            id(p): f"{g}.{i}"
            for g, group in enumerate(self.param_groups)
            for i, p in enumerate(group["params"])
        }
        if self._model is not None:
            names |= {id(p): name for name, p in self._model.named_parameters()}
        return {names[key]: value for key, value in each.items()}

    # ------------------------------------------------------------------ checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, and under ``"consensus"`` the wrapper's own.

        It is this rank's own state and sends no message. Workers differ between rounds: for an
        exact resume each rank saves its own.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = {**self._inner.state_dict(), KEY: self._rounds.state_dict()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = _or(post_hook(self, state), state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or (with a warning) of the inner optimizer alone.

        A dict of the key ``"consensus"`` alone leaves the inner optimizer as it is: for loaders
        that know only ``"state"`` and ``"param_groups"``.
        """
        state_dict = {**state_dict}  # hooks may change it, and it is the caller's
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        if state_dict.keys() != {KEY}:
            self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != KEY})
        if KEY in state_dict:
            self._rounds.load_state_dict(state_dict[KEY])
        else:
            warnings.warn(
                f"the checkpoint has no {KEY!r} entry: it is of an optimizer without "
                "ConsensusOptimizer, or of get_state_dict(), beside which to save "
                f"optimizer.state_dict()[{KEY!r}]; the communication clock stays at {self.clock}",
                stacklevel=2,
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled views of stacked workers would each carry the whole flat buffer.
        self._rounds.release()
        return {
            "inner": self._inner,
            "model": self._model,
            "method": self.method,
            "total_steps": self._rounds.total_steps,
            "rounds": self._rounds.state_dict(),
            "timeout": self._timeout,
            "pieces": self._rounds.pieces,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner = state["inner"]
        super().__init__(inner.param_groups, getattr(inner, "defaults", {}))
        self._inner, self._model, self._timeout = inner, state["model"], state["timeout"]
        self._found_inf, self._averaging = None, False
        self._rounds = UnevenRounds(state["method"], state["total_steps"])
        self._rounds.load_state_dict(state["rounds"])
        self._rounds.pieces = state["pieces"]

    def __deepcopy__(self, memo: dict[int, Any]) -> ConsensusOptimizer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.connect(self.transport, self.shards)
        return twin

    # ------------------------------------------------------------------ what is averaged

    def _everything(self) -> list[Tensor]:
        """Return what all workers start from."""
        return [*self._all_parameters(), *self._buffers()]

    def _buffers(self) -> list[Tensor]:
        return [] if self._model is None else list(self._model.buffers())


def _find_transport(timeout: float) -> Transport:
    # Adapters build on the core; here, once, the core asks for one.
    from consensus_opt.integrations import find_transport

    return find_transport(timeout)


def _or(result: dict[str, Any] | None, default: dict[str, Any]) -> dict[str, Any]:
    """Hooks may return a replacement."""
    return default if result is None else result
