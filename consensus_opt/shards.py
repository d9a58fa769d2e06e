"""A replica in pieces (contract C7): what its ranks have to do together.

Workers exchange only their own piece with the same piece elsewhere. Among the pieces of one replica
nothing travels but what has to be of the whole model: a handful of scalars, and whether the meeting
with the other workers went well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from consensus_opt.agreement import (
    OPERATIONS,
    Agreement,
    Header,
    fingerprint,
    gather_texts,
    meet_all,
)
from consensus_opt.errors import PeerError, RankMismatchError
from consensus_opt.transport import Transport

Meeting = Callable[[], Agreement]
"""Meets the other workers; returns what all go on with."""

_ERRORS = (RankMismatchError, PeerError)


def check_pieces(tensors: list[Tensor], shards: Transport) -> None:
    """Raise ``TypeError`` for a DTensor that does not lie on just the ranks of this replica."""
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and mesh.size() != shards.size:
            raise TypeError(
                f"a parameter of shape {tuple(tensor.shape)} is a DTensor on {mesh.size()} ranks, "
                f"and a replica lies on {shards.size}; with fully_shard(model, mesh=mesh['shard']) "
                "write consensus_opt.integrations.fsdp.consensus(model, optimizer, method, mesh)"
            )


def meet_pieces(shards: Transport, meet: Meeting, description: str) -> Agreement:
    """Meet the other workers, and then the other pieces of this replica.

    Args:
        shards: The way to the other pieces.
        meet: The meeting of this piece with the same piece elsewhere.
        description: What must be the same on all pieces.

    Returns:
        What all ranks go on with.

    Raises:
        RankMismatchError: On all pieces, if one of them met with it, or if they differ themselves.
        PeerError: On all pieces, if one of them met with it.
    """
    found = _tell(shards, meet)
    call = OPERATIONS.index(found.operation)
    own = Header(fingerprint(description), found.clock, found.exchanges, call, found.lr)
    try:
        agreed = meet_all(shards, own, description)
    except RankMismatchError as error:
        raise RankMismatchError(f"among the {shards.size} ranks of one replica, {error}") from error
    return replace(
        found,
        clock=agreed.clock,
        exchanges=agreed.exchanges,
        lr=agreed.lr,
        together=found.together and agreed.together,
    )


def _tell(shards: Transport, meet: Meeting) -> Agreement:
    """Meet the other workers; raise on all pieces what was raised on one."""
    failure: RankMismatchError | PeerError | None = None
    try:
        found = meet()
    except _ERRORS as error:
        failure = error
    kind = 0.0 if failure is None else 1.0 + _ERRORS.index(type(failure))
    if failure is not None:
        with suppress(PeerError):
            shards.gather(_flag(kind, shards))
            gather_texts(shards, str(failure))
        raise failure
    kinds = [int(flag) for flag in shards.gather(_flag(kind, shards)).flatten().tolist()]
    if any(kinds):
        text = gather_texts(shards, "")
        piece = next(p for p, flag in enumerate(kinds) if flag)
        raise _ERRORS[kinds[piece] - 1](f"piece {piece} of this replica: {text[piece]}")
    return found


def _flag(kind: float, shards: Transport) -> Tensor:
    return torch.full((*shards.batch, 1), kind, dtype=torch.float64)
