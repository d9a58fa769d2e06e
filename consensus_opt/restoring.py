"""Put back what a block of code changed: parameters, buffers, and the memory where they lay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from consensus_opt.flat import FlatParameters


@contextmanager
def restored(parts: Sequence[FlatParameters], module: nn.Module | None) -> Iterator[None]:
    """Restore every bit of some packed parameters, and of a module's buffers, afterwards.

    That holds for values, and also where the block moved parameters elsewhere (``module.half()``,
    ``module.cpu()``) or the module replaced its buffers. Memory: one copy while it lasts.
    """
    memory = [(tensor, tensor.data) for part in parts for tensor in part.tensors]
    registers = [each._buffers for each in module.modules()] if module is not None else []
    entries = [dict(register) for register in registers]
    buffers = {id(b): b for entry in entries for b in entry.values() if b is not None}
    held = FlatParameters((b for b in buffers.values() if not b.is_sparse), views=False)
    held.pack()
    parts = [*parts, held]
    values = [(flat, flat.clone()) for part in parts for flat in part.buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own in memory:
                _put_back(tensor, own)
            for value, copy in values:
                value.copy_(copy)
            for part in parts:
                part.unpack()
            for register, entry in zip(registers, entries, strict=True):
                register.update(entry)


def _put_back(tensor: Tensor, own: Tensor) -> None:
    here = (tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.device)
    if here != (own.data_ptr(), own.dtype, own.stride(), own.device):
        tensor.data = own
