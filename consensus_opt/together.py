"""What every rank does for itself succeeds on all ranks, or fails on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from consensus_opt.transport import Transport


@contextmanager
def together(transport: Transport, what: str) -> Iterator[None]:
    """Leave when all ranks have run the block, which sends no message itself.

    Raises:
        RuntimeError: On every rank, if one could not: names it, chained to its own error there.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    failed = torch.full((*transport.batch, 1), float(error is not None), dtype=torch.float64)
    rows = transport.gather(failed).flatten().tolist()
    if any(rows):
        ranks = [rank for rank, flag in enumerate(rows) if flag]
        raise RuntimeError(f"ranks {ranks} could not {what}: {error or 'see there'}") from error
