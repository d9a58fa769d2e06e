"""Files: one averaged model to ship, and one consistent state of all workers to resume from.

::

    FOLDER/step-00001200/worker-0-of-4.pt    this worker's model, optimizer and extra
    FOLDER/step-00001200/mean.pt             the state dict of the mean model
    FOLDER/step-00001200/complete.json       written when all files of all workers are

Each file is written under a temporary name, flushed to the disk and then renamed, so that a process
that dies leaves no half file under a final name; and what a state is without its ``complete.json``
is not loaded. The folder may lie on a disk that all workers share, or on each node's own.

The functions are collective: call them on all ranks. When they return, all ranks are done.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consensus_opt.optimizer import ConsensusOptimizer
from consensus_opt.together import together
from consensus_opt.transport import Transport

_COMPLETE = "complete.json"
_MEAN = "mean.pt"


def save(
    folder: str | Path, model: nn.Module, optimizer: ConsensusOptimizer, extra: Any = None
) -> Path:
    """Save the state of all workers at this step, and the mean model.

    Args:
        folder: Where states are kept, each in a folder of its own, ``step-CLOCK``.
        model: The module that is trained.
        optimizer: Its optimizer.
        extra: What this worker needs beside them: tensors and plain types.

    Returns:
        The folder of this state.

    Raises:
        TypeError: If ``extra`` holds other objects.
        ValueError: If replicas are sharded, or their engine saves them itself.
        RuntimeError: On every rank, if one could not write; chained to its own error on that rank.
    """
    _check_extra(extra)
    _check(optimizer, "save")
    with optimizer.averaged():
        transport = optimizer.transport
        state = Path(folder) / f"step-{optimizer.clock:08d}"
        with together(transport, f"prepare {state}"):
            state.mkdir(parents=True, exist_ok=True)
            (state / _COMPLETE).unlink(missing_ok=True)
        _write_model(state / _MEAN, model, transport)
    with together(transport, f"write {state}"):
        worker = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
        write(state / worker_name(transport.rank, _files(transport)), worker)
    with together(transport, f"complete {state}"):
        text = json.dumps({"workers": _files(transport), "clock": optimizer.clock}).encode()
        _replace(state / _COMPLETE, lambda file: file.write(text))
    return state


def load(
    folder: str | Path, model: nn.Module, optimizer: ConsensusOptimizer, step: int | None = None
) -> Any:
    """Load the latest complete state, or that of a step, and return this worker's ``extra``.

    With as many workers as saved it, each gets its own state, and training continues with the same
    bits. With another number, n instead of n', every worker starts from the mean model, and worker
    m takes the optimizer state and the ``extra`` of worker ``m mod n'``; the clock continues, the
    cycle of a time-varying topology and the control's memory start anew.

    Args:
        folder: What was given to :func:`save`.
        model: The module, built as for the run that saved.
        optimizer: Its optimizer.
        step: The clock of the state to load.

    Raises:
        FileNotFoundError: On every rank, if one of them has no complete state (of that step).
    """
    _check(optimizer, "load")
    transport = optimizer._connected().transport  # under Horovod's elastic, not the one so far
    chosen = _agree(Path(folder), transport, step)
    state = Path(folder) / f"step-{chosen:08d}"
    with together(transport, f"load {state}"):
        saved = json.loads((state / _COMPLETE).read_text())["workers"]
        worker = read(state / worker_name(transport.rank % saved, saved))
        other = saved != _files(transport)
        model.load_state_dict(read(state / _MEAN) if other else worker["model"])
        optimizer.load_state_dict(worker["optimizer"])
    return worker["extra"]


def latest(folder: str | Path) -> int | None:
    """Return the step of the latest complete state that this rank sees, or None; not collective."""
    names = [path.parent.name for path in Path(folder).glob(f"step-*/{_COMPLETE}")]
    steps = [name.removeprefix("step-") for name in names]
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def save_mean(path: str | Path, model: nn.Module, optimizer: ConsensusOptimizer) -> None:
    """Save the state dict of the mean model in one file, which rank 0 writes.

    Raises:
        RuntimeError: On every rank, if rank 0 could not write.
        ValueError: If replicas are sharded.
    """
    _check(optimizer, "save_mean")
    with optimizer.averaged():
        _write_model(Path(path), model, optimizer.transport)


# ---------------------------------------------------------------------- ranks


def _files(transport: Transport) -> int:
    """Return how many processes hold the workers."""
    return 1 if transport.batch else transport.size


def _agree(folder: Path, transport: Transport, step: int | None) -> int:
    """Return the newest state that all ranks have."""
    own = latest(folder) if step is None else _existing(folder, step)
    found = torch.tensor([-1.0 if own is None else own], dtype=torch.float64)
    steps = [int(value) for value in transport.gather(found.repeat(*transport.batch, 1)).flatten()]
    chosen = min(steps)
    if chosen < 0:
        what = "no complete state" if step is None else f"no complete state of step {step}"
        raise FileNotFoundError(
            f"rank {steps.index(chosen)} finds {what} in {folder}; give the folder that was given "
            "to consensus_opt.checkpoint.save, on a disk that every rank sees"
        )
    return chosen


def _existing(folder: Path, step: int) -> int | None:
    return step if (folder / f"step-{step:08d}" / _COMPLETE).exists() else None


# ---------------------------------------------------------------------- files


def worker_name(worker: int, workers: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker}-of-{workers}.pt"


def read(path: Path) -> Any:
    """Read a file of tensors and plain types."""
    return torch.load(path, map_location="cpu", weights_only=True)


def write(path: Path, data: Any) -> None:
    """Write a file of tensors and plain types: complete or not at all."""
    _replace(path, lambda file: torch.save(data, file))


def _write_model(path: Path, model: nn.Module, transport: Transport) -> None:
    """Let rank 0 write, while the others wait."""
    with together(transport, f"write {path}"):
        if transport.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, model.state_dict())


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    """Put a file in place at once and for good: temporary name, fsync, rename, fsync the folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot
            os.fsync(folder)
    finally:
        os.close(folder)


def _check(optimizer: ConsensusOptimizer, call: str) -> None:
    optimizer.check_outside_join(f"checkpoint.{call}()")
    if optimizer.shards.size > 1:
        raise ValueError(
            f"the replica lies in {optimizer.shards.size} pieces, and consensus_opt.checkpoint "
            "takes whole ones; write engine.save_checkpoint(folder) with DeepSpeed, and "
            "consensus_opt.integrations.fsdp.save(folder, model, optimizer) with fully_shard"
        )
    if call != "save_mean" and not optimizer.inner.state_dict():
        raise ValueError(
            f"{type(optimizer).__name__} holds no state of the inner optimizer, which its engine "
            "saves itself; write engine.save_checkpoint(folder) with DeepSpeed"
        )


def _check_extra(extra: Any) -> None:
    file = io.BytesIO()
    torch.save(extra, file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"extra is {type(extra).__name__} and holds objects that torch.load(weights_only=True) "
            "refuses; give tensors, numbers, strings, and lists and dicts of them, for example "
            "extra={'epoch': 3, 'scheduler': scheduler.state_dict()}"
        ) from error
