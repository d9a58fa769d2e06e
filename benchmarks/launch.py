"""Where a process learns which worker it is, and which engine carries its messages.

`launch()` joins the workers that a launcher started (torchrun, mpirun, horovodrun, deepspeed) and
gives the training loop a `Worker` with the transport to the others. `distribute()` makes model and
optimizer ready to train together: this is all that differs between engines and methods.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.recipes import recipe
from benchmarks.record import ROUNDS
from benchmarks.sharding import fully_sharded, nodes
from consensus_opt import ConsensusOptimizer, JsonLines
from consensus_opt.integrations.environment import place
from consensus_opt.transport import SoloTransport, Transport

ENGINES = ("torch", "mpi", "horovod", "deepspeed")
TIMEOUT = 120.0


@dataclass(frozen=True)
class Worker:
    """This process among the others; `engine` carries the messages."""

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
def launch(device: str = "cpu", engine: str | None = None) -> Iterator[Worker]:
    """Join the other workers, and leave them in good order.

    Args:
        device: "cpu", or "cuda" (the GPU numbered LOCAL_RANK).
        engine: one of `ENGINES`; by default the one that the launcher is for.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    where = torch.device(device, local_rank if device == "cuda" else 0)
    if device == "cuda":
        torch.cuda.set_device(where)
    started = place()
    if engine is None and started is not None and started.size > 1:
        horovod = started.variable == "HOROVOD_SIZE"
        engine = "mpi" if started.mpi else "horovod" if horovod else "torch"
    with _transport(engine, device) as transport:
        yield Worker(transport, where, engine or "alone")


@contextmanager
def _transport(engine: str | None, device: str) -> Iterator[Transport]:
    if engine is None:
        yield SoloTransport()
    elif engine == "mpi":
        from consensus_opt.integrations.mpi import MPITransport

        yield MPITransport(timeout=TIMEOUT)
    elif engine == "horovod":
        import horovod.torch as hvd

        from consensus_opt.integrations.horovod import HorovodTransport

        hvd.init()
        yield HorovodTransport(timeout=TIMEOUT)
        hvd.barrier()
        hvd.shutdown()
    else:
        from consensus_opt.integrations.torch_distributed import TorchTransport

        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
        try:
            yield TorchTransport(timeout=TIMEOUT)
        finally:
            dist.destroy_process_group()


def distribute(
    model: nn.Module, optimizer: Optimizer, options: Namespace, worker: Worker, steps: int
) -> tuple[Any, Any]:
    """What to call and what to step, so that the workers train one model together."""
    rounds = Path(options.out) / ROUNDS
    if worker.engine == "deepspeed" and options.method != "sync":
        return _engine(model, optimizer, options, steps, rounds)
    method = recipe(options, steps)
    if method is None:
        return _average_gradients(model, optimizer, worker)
    more: dict[str, Any] = {
        "total_steps": steps,
        "telemetry": JsonLines(rounds) if worker.first else None,
    }
    if options.sharding:
        make = fully_sharded if options.sharding == "fsdp2" else nodes
        return make(model, optimizer, method, options, **more)
    return model, ConsensusOptimizer(
        optimizer, method, model=model, transport=worker.transport, **more
    )


def _average_gradients(
    model: nn.Module, optimizer: Optimizer, worker: Worker
) -> tuple[nn.Module, Any]:
    """Synchronous SGD, as users of each engine write it."""
    if worker.engine in ("torch", "deepspeed"):
        return DistributedDataParallel(model), optimizer
    if worker.engine == "horovod":
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def average(*_: Any) -> None:
        for parameter in model.parameters():
            worker.transport.mean(parameter.grad.view(-1))

    optimizer.register_step_pre_hook(average)
    return model, optimizer


def _engine(
    model: nn.Module, optimizer: Optimizer, options: Namespace, steps: int, rounds: Path
) -> tuple[Any, Any]:
    """A DeepSpeed engine, whose method is the "consensus" block of its configuration."""
    from consensus_opt.integrations import deepspeed

    config = json.loads(Path(options.deepspeed_config).read_text())
    config["train_micro_batch_size_per_gpu"] = options.batch_size
    config["consensus"] |= {"total_steps": steps, "telemetry": str(rounds)}
    if options.sharding:
        config["zero_optimization"] = {"stage": int(options.sharding.removeprefix("zero"))}
        config["consensus"]["replica_size"] = options.replica_size
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine, deepspeed.consensus_of(engine)
