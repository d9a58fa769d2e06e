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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from consensus_opt.buffers import calls
from consensus_opt.errors import RankMismatchError
from consensus_opt.exchange import PointToPoint
from consensus_opt.mixing import MixingMatrix
from consensus_opt.transport import Transport

ASKING = "step(), if all ranks have data"
ENDED = "the end of its data"
OWING = "the end of its data, with steps that no round has seen"

OPERATIONS = (
    "the start of training",
    "step()",
    *calls("averaged"),
    *calls("synchronize"),
    "consensus_distance()",
    "mean_of()",
    ASKING,
    ENDED,
    OWING,
)

KINDS = ("parameter", "start value")
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
        state: Hash of the list of optimizer state that travels.
        checksum: Of the parameters, as :mod:`consensus_opt.slips` asks for it.
    """

    fingerprint: int
    clock: int
    exchanges: int
    operation: int
    lr: float
    state: int = 0
    checksum: int = 0

    def row(self, batch: tuple[int, ...]) -> Tensor:
        """Return the header as numbers, shape ``batch + (7,)``."""
        numbers = torch.tensor(astuple(self), dtype=torch.float64)
        return numbers.repeat(*batch, 1).view(*batch, len(numbers))


@dataclass(frozen=True)
class Agreement:
    """What all ranks go on with after they have met.

    Attributes:
        operation: What they are about to do; ``ENDED`` where no rank has more data.
        clock: That of the rank that is furthest, so that a rank that restarted from an older state
            joins the others; so are ``exchanges``.
        exchanges: The phase of the topology.
        lr: Learning rate of the first rank that has data.
        together: Whether all ranks with data were equally far.
        ended: The ranks without more data.
        members: The ranks whose models count: those in the operation, and those that have ended
            with steps that no round has seen yet.
        state: Each rank's hash of its travelling state.
    """

    operation: str
    clock: int
    exchanges: int
    lr: float
    together: bool
    ended: tuple[int, ...]
    members: tuple[int, ...]
    state: tuple[int, ...]


def describe(entries: Sequence[tuple[str, object]]) -> str:
    """Write what must be equal on all ranks, one entry a line, without memory addresses."""
    text = "\n".join(f"{name}: {value}" for name, value in entries)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


Look = Callable[[Header, Mapping[int, Header]], None]
"""Takes this rank's header and those that it met, by rank."""


def _look_away(own: Header, others: Mapping[int, Header]) -> None:
    """See nothing in the headers."""


@lru_cache(maxsize=16)
def fingerprint(description: str) -> int:
    """Return 52 bits that differ when descriptions do."""
    return int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big") >> 12


def meet_all(
    transport: Transport, header: Header, description: str, look: Look = _look_away
) -> Agreement:
    """Compare headers among all ranks and return what all go on with.

    Raises:
        RankMismatchError: On every rank, if descriptions or operations differ. Names the ranks that
            differ from the majority, and what differs.
    """
    rows = [Header(*row) for row in transport.gather(header.row(transport.batch)).tolist()]
    if len({row.fingerprint for row in rows}) > 1:
        raise _description_mismatch(gather_texts(transport, description))
    calls = [OPERATIONS[int(row.operation)] for row in rows]
    busy = [m for m, call in enumerate(calls) if call not in (ENDED, OWING)]
    if len({calls[m] for m in busy}) > 1:
        raise _call_mismatch(calls)
    look(header, dict(enumerate(rows)))
    return Agreement(
        operation=calls[busy[0]] if busy else ENDED,
        clock=int(max(row.clock for row in rows)),
        exchanges=int(max((row.clock, row.exchanges) for row in rows)[1]),
        lr=rows[busy[0] if busy else 0].lr,
        together=len({(rows[m].clock, rows[m].exchanges) for m in busy}) <= 1,
        ended=tuple(m for m in range(len(rows)) if m not in busy),
        members=tuple(m for m, call in enumerate(calls) if not busy or call != ENDED),
        state=tuple(int(row.state) for row in rows),
    )


def _call_mismatch(calls: list[str]) -> RankMismatchError:
    each = ", ".join(f"rank {m}: {call}" for m, call in enumerate(calls))
    return RankMismatchError(
        f"ranks are in different calls ({each}); averaged(), synchronize() and "
        "consensus_distance() are collective: call them on all ranks, outside 'if rank == 0'. If "
        "ranks take different numbers of steps, write 'with optimizer.join():' around the loop"
    )


def meet_neighbours(
    transport: PointToPoint, header: Header, mixing: MixingMatrix, look: Look = _look_away
) -> None:
    """Compare headers with the ranks from which this one receives.

    Raises:
        RankMismatchError: Soon on every rank. Names the first neighbour that differs, and how.
    """
    rows = transport.gather_neighbours(header.row(transport.batch), mixing)
    peers = [peer for peer, _ in mixing.receives(transport.rank)]
    for peer, row in zip(peers, rows.tolist(), strict=True):
        if row[0] != header.fingerprint:
            transport.give_up(
                f"rank {peer} has other parameters or another method than rank {transport.rank}; "
                "call add_param_group and change requires_grad in the same step on all ranks"
            )
        if row[1] != header.clock:
            transport.give_up(
                f"rank {peer} is at step {int(row[1])} and rank {transport.rank} at step "
                f"{header.clock}; load the same step on all ranks, and call step() equally often"
            )
    look(header, {m: Header(*row) for m, row in zip(peers, rows.tolist(), strict=False)})


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
        "method, broadcast and join(); build them from the same arguments on every rank"
    )


def _count(lines: list[str], kind: str) -> str:
    return f"{sum(line.startswith(kind) for line in lines)} {kind}s"
