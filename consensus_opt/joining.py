"""Uneven data as the user meets it: ``optimizer.join()``, and torch's ``Join([optimizer])``.

Both do the same thing, see :mod:`consensus_opt.uneven`. Ours works over every transport and sends
nothing between rounds; torch's works over torch.distributed, takes several optimizers, and sends a
number in every step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from consensus_opt.errors import EndOfDataError
from consensus_opt.meeting import LocalStep
from consensus_opt.uneven import MODES, UnevenRounds

_NOT_JOINING = _JoinConfig(False, False, False)


class UnevenData(Joinable):
    """The part of ConsensusOptimizer that lets workers have different numbers of batches."""

    _join_config = _NOT_JOINING
    _uneven: str | None = None
    _rounds: UnevenRounds

    @abstractmethod
    def _connected(self) -> UnevenRounds:
        """Return the rounds, ready to communicate."""

    @abstractmethod
    def _outlast(self) -> None:
        """Follow workers with more data until none has any."""

    @abstractmethod
    def _follow_step(self) -> None:
        """Follow workers with more data for one step."""

    @abstractmethod
    def _local_step(self) -> LocalStep:
        """Return what the worker brings to a round."""

    @abstractmethod
    def _lr(self) -> float:
        """Return the learning rate that rounds go by."""

    @contextmanager
    def join(self, uneven: str = "continue") -> Iterator[None]:
        """Hold around a loop (an epoch) in which workers may have different numbers of batches.

        All ranks enter it, also one that has no batch at all. A rank that leaves the loop waits
        inside until the others have left theirs. They may call ``averaged()``, ``synchronize()``
        and ``consensus_distance()`` meanwhile. Each round opens with a header among all ranks; with
        equally many batches the result has the same bits as without.

        - "continue": the others go on. What the worker did since the last round counts in the next
          one; from then on it counts for nothing: means are over the others, and in gossip its
          weights go to those who are left, so that they still mix doubly stochastically. At the end
          a worker that missed a round takes the mean of those that did not, parameters and
          travelling optimizer state; all have the clock of the one that is furthest.
        - "stop": the others stop with it, before the first step that would end in a round: ``step``
          raises, which ends the loop, and the block swallows that. With ``period=1`` all have taken
          as many steps as the shortest; models stay as they are. Where ``scaler.unscale_`` was
          called in the last batch, call ``scaler.update()`` after the block.

        Args:
            uneven: "continue" or "stop"; the same on all ranks.

        Raises:
            ValueError: If ``uneven`` is something else.
            RuntimeError: If the block is open already.
        """
        if uneven not in MODES:
            raise ValueError(
                f"uneven is {uneven!r}; it must be one of {MODES}; write optimizer.join('continue')"
                " to go on without the workers that have run out of data"
            )
        if self._uneven is not None:
            raise RuntimeError(
                "join() was entered inside 'with optimizer.join():' of the same optimizer; leave "
                "that block first, or write one block around the whole loop"
            )
        self._uneven = uneven
        try:
            yield
            self._outlast()
        except EndOfDataError as error:
            if error.of is not self._rounds:
                raise
            for left in {"grad_scale", "found_inf"} & vars(self).keys():
                delattr(self, left)  # GradScaler would multiply by the next
        finally:
            self._uneven = None
            self._rounds.part()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what torch's ``Join`` runs once this rank has no more data."""
        return _Hook(self)

    @property
    def join_device(self) -> Any:
        """The device of what torch's ``Join`` sends."""
        return self._joinable().device

    @property
    def join_process_group(self) -> Any:
        """The process group over which torch's ``Join`` sends."""
        return self._joinable().group

    def check_outside_join(self, what: str) -> None:
        """Raise ``RuntimeError`` where workers without data could not follow."""
        if self._mode() is not None:
            raise RuntimeError(
                f"{what} was called inside 'with optimizer.join():', where a worker that has run "
                "out of data cannot take part in it; leave the block first"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _announce(self) -> None:
        """Tell the others, before a step, that this worker has data."""
        if self._join_config.enable:
            Join.notify_join_context(self)
        rounds = self._connected()
        if rounds.uneven == "stop" and rounds.ends_in_a_round(self._lr()):
            rounds.ask(self._local_step())

    def _joinable(self) -> Any:
        transport = self._connected().transport
        if not hasattr(transport, "group"):
            raise TypeError(
                f"torch's Join works over torch.distributed, and the transport is {transport!r}; "
                "write 'with optimizer.join():', which works over every transport"
            )
        return transport

    def _mode(self) -> str | None:
        return self._uneven or ("continue" if self._join_config.enable else None)


class _Hook(JoinHook):
    def __init__(self, optimizer: UnevenData) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._follow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer._outlast()
        self._optimizer._join_config = _NOT_JOINING
