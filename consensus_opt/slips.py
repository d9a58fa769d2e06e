"""Slips that no rank can see alone and that are no error: found in the headers of rounds.

Two are common. The gradients are averaged already, by DistributedDataParallel for example, or all
ranks read the same data: then replicas never part, and there is nothing to average. And a scheduler
that looks at a local loss (ReduceLROnPlateau) lets learning rates part. Each is told once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consensus_opt.agreement import Header
from consensus_opt.flat import local

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slips:
    """Looks at headers, and warns once of each slip."""

    def __init__(self) -> None:
        self._start: int | None = None
        self._rates_told = False

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Watch whether these parameters part from other ranks' in their first local steps."""
        self._start = checksum(parameters)

    def renew(self, parameters: Sequence[Tensor]) -> None:
        """Go on from these, if still watching: mixing equal parameters rounds them too."""
        if self._start is not None:
            self.begin(parameters)

    def forget(self) -> None:
        """Watch no longer: parameters come from elsewhere, or were seen to part."""
        self._start = None

    def checksum(self, parameters: Sequence[Tensor]) -> int:
        """Return the parameters' checksum if local steps moved them, and 0 otherwise."""
        if self._start is None:
            return 0
        now = checksum(parameters)
        return 0 if now == self._start else now

    def look(self, rank: int, own: Header, met: Mapping[int, Header]) -> None:
        """Compare this rank's header with those that it met, by rank."""
        equally_far = {
            m: other
            for m, other in met.items()
            if m != rank and (other.operation, other.clock) == (own.operation, own.clock)
        }
        if not equally_far:
            return
        if own.checksum:
            self.forget()
            if all(other.checksum == own.checksum for other in equally_far.values()):
                warnings.warn(_same(rank, own, list(equally_far)), stacklevel=2)
        rates = {rank: own.lr} | {m: other.lr for m, other in equally_far.items()}
        if len(set(rates.values())) > 1 and not self._rates_told:
            self._rates_told = True
            warnings.warn(_different_rates(own, rates), stacklevel=2)


def checksum(parameters: Sequence[Tensor]) -> int:
    """Return a sum of the bits of all values, which is hardly ever the same for others; not 0."""
    total = 0
    for parameter in parameters:
        value = local(parameter.detach())
        value = torch.view_as_real(value) if value.is_complex() else value
        bits = value.contiguous().view(_INTEGERS[value.element_size()]).view(-1)
        # In parts, because each is copied to 64 bits before it is summed.
        total += sum(int(p.sum(dtype=torch.int64)) for p in torch.split(bits, 1 << 17))
    return total % ((1 << 52) - 1) + 1


def _same(rank: int, own: Header, peers: list[int]) -> str:
    return (
        f"ranks {sorted([rank, *peers])} have the same parameters, bit for bit, after {own.clock} "
        "steps of their own: there is nothing to average. Either their gradients are averaged "
        "already, by DistributedDataParallel or another optimizer: leave that away, or write "
        "consensus_opt.integrations.ddp.local_gradients(ddp_model). Or they read the same "
        "batches: give each rank its own, with a DistributedSampler"
    )


def _different_rates(own: Header, rates: Mapping[int, float]) -> str:
    each = ", ".join(f"rank {m}: {rate:g}" for m, rate in sorted(rates.items()))
    return (
        f"ranks have different learning rates at step {own.clock} ({each}), as happens where a "
        "scheduler follows a local loss; write scheduler.step(optimizer.mean_of(loss)) to give all "
        "the same, or silence this warning if it is meant"
    )
