"""Where a process learns which worker it is: all that the benchmarks know about launchers.

`launch()` reads what the launcher left behind (torchrun: RANK, WORLD_SIZE, LOCAL_RANK) and gives
the training loop a `Worker` with the transport to the others. A process that no launcher started is
the only worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.transport import SoloTransport, Transport

TIMEOUT = 120.0


@dataclass(frozen=True)
class Worker:
    """This process among the others; `engine` says what carries the messages."""

    transport: Transport
    device: torch.device
    engine: str

    @property
    def rank(self) -> int:
        """Number of this worker."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.transport.size

    @property
    def first(self) -> bool:
        """Whether this worker speaks for all: it prints and writes the files."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's numbers, in rank order, the same bits on every worker."""
        rows: list[list[float]] = self.transport.gather(
            torch.tensor(values, dtype=torch.float64)
        ).tolist()
        return rows

    def mean(self, value: float) -> float:
        """The mean of every worker's number."""
        return sum(row[0] for row in self.gather([value])) / self.size


@contextmanager
def launch(device: str = "cpu") -> Iterator[Worker]:
    """Join the other workers, and leave them in good order.

    Args:
        device: "cpu" (messages by gloo), or "cuda" (by NCCL; the GPU numbered LOCAL_RANK).
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device(device, local_rank if device == "cuda" else 0)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Worker(SoloTransport(), place, "alone")
        return
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
    try:
        transport = TorchTransport(timeout=TIMEOUT)
        yield Worker(transport, place, f"torch.distributed, {backend}")
    finally:
        dist.destroy_process_group()
