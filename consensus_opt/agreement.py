"""How ranks find out that they differ before it can hurt (contract C3).

Each rank describes what must be the same everywhere: the method, and the shapes and dtypes of what
is averaged. Before anything else travels, the descriptions are compared, and a difference raises
the same error on every rank. From then on a short *header* opens each round: between all ranks
where all average, between neighbours where only they do.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from consensus_opt.errors import RankMismatchError
from consensus_opt.mixing import MixingMatrix
from consensus_opt.transport import Transport

OPERATIONS = (
    "the start of training",
    "step()",
    "averaged()",
    "synchronize()",
    "consensus_distance()",
)

KINDS = ("parameter", "state tensor", "start value")
"""What is described a line each: what is averaged, and what rank 0 gives to all at the start."""


@dataclass(frozen=True)
class Header:
    """What a rank says before it averages.

    Attributes:
        fingerprint: Hash of the description, below 2^53 so that fp64 carries it.
        clock: Calls of ``step()`` so far.
        exchanges: Exchanges so far.
        operation: Index into ``OPERATIONS``.
        lr: Learning rate of the first parameter group.
    """

    fingerprint: int
    clock: int
    exchanges: int
    operation: int
    lr: float

    def row(self, batch: tuple[int, ...]) -> Tensor:
        """Return the header as numbers, shape ``batch + (5,)``."""
        numbers = (self.fingerprint, self.clock, self.exchanges, self.operation, self.lr)
        return torch.tensor(numbers, dtype=torch.float64).repeat(*batch, 1).view(*batch, 5)


def describe(entries: Sequence[tuple[str, object]]) -> str:
    """Write what must be equal on all ranks, one entry a line, without memory addresses."""
    text = "\n".join(f"{name}: {value}" for name, value in entries)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@lru_cache(maxsize=16)
def fingerprint(description: str) -> int:
    """Return 52 bits that differ when descriptions do."""
    return int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big") >> 12


def meet_all(transport: Transport, header: Header, description: str) -> tuple[Header, bool]:
    """Compare headers among all ranks and return the one that all go on with.

    The clock and phase of the rank that is furthest count, so that a rank that restarted from an
    older state joins the others, and so does rank 0's learning rate.

    Returns:
        That header, and whether all ranks were equally far.

    Raises:
        RankMismatchError: On every rank, if descriptions or operations differ. Names the ranks that
            differ from the majority, and what differs.
    """
    rows = transport.gather(header.row(transport.batch))
    if len(set(rows[:, 0].tolist())) > 1:
        raise _description_mismatch(gather_texts(transport, description))
    operations = [int(value) for value in rows[:, 3].tolist()]
    if len(set(operations)) > 1:
        calls = ", ".join(f"rank {m}: {OPERATIONS[o]}" for m, o in enumerate(operations))
        raise RankMismatchError(
            f"ranks are in different calls ({calls}); averaged(), synchronize() and "
            "consensus_distance() are collective: call them on all ranks, outside 'if rank == 0'"
        )
    clock, exchanges = (int(value) for value in max(rows[:, 1:3].tolist()))
    together = len({tuple(row) for row in rows[:, 1:3].tolist()}) == 1
    agreed = replace(header, clock=clock, exchanges=exchanges, lr=float(rows[0, 4]))
    return agreed, together


def meet_neighbours(transport: Transport, header: Header, mixing: MixingMatrix) -> None:
    """Compare headers with the ranks from which this one receives.

    Raises:
        RankMismatchError: Names the first neighbour that differs, and what differs.
    """
    rows = transport.gather_neighbours(header.row(transport.batch), mixing)
    peers = [peer for peer, _ in mixing.receives(transport.rank)]
    for peer, row in zip(peers, rows.tolist(), strict=False):
        if row[0] != header.fingerprint:
            raise RankMismatchError(
                f"rank {peer} has other parameters or another method than rank {transport.rank}; "
                "call add_param_group and change requires_grad in the same step on all ranks"
            )
        if row[1] != header.clock:
            raise RankMismatchError(
                f"rank {peer} is at step {int(row[1])} and rank {transport.rank} at step "
                f"{header.clock}; load the same step on all ranks, and call step() equally often"
            )


def gather_texts(transport: Transport, text: str) -> list[str]:
    """Collect a text from each rank."""
    data = torch.tensor(list(text.encode()), dtype=torch.float64)
    length = transport.gather(torch.tensor([float(len(data))], dtype=torch.float64))
    padded = torch.nn.functional.pad(data, (0, int(length.max()) - len(data)))
    rows = transport.gather(padded).to(torch.uint8)
    return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]


def _description_mismatch(texts: list[str]) -> RankMismatchError:
    usual = Counter(texts).most_common(1)[0][0]
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    lines, others = usual.split("\n"), texts[odd[0]].split("\n")
    counts = [(_count(others, kind), _count(lines, kind)) for kind in KINDS]
    difference = next((f"{other} instead of {own}" for other, own in counts if other != own), None)
    if difference is None:
        line, other = next((a, b) for a, b in zip(lines, others, strict=True) if a != b)
        difference = f"'{other}' instead of '{line}'"
    return RankMismatchError(
        f"ranks {odd} differ from the other {len(texts) - len(odd)}: "
        f"rank {odd[0]} has {difference}. All ranks need the same model, parameter groups, "
        "method and broadcast; build them from the same arguments on every rank"
    )


def _count(lines: list[str], kind: str) -> str:
    return f"{sum(line.startswith(kind) for line in lines)} {kind}s"
