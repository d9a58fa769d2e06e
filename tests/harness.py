"""Real ranks for tests: processes with gloo between them, a time limit, an end with the test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "numpy", "consensus_opt", "tests.harness"])


class RankFailed(AssertionError):
    """A rank raised, died or ran past the time limit."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(rank, *args)`` in n processes of one gloo group and return what each returned.

    ``function`` must be importable. Exceptions of a rank fail the test with that rank's traceback.
    """
    outcomes = run_ranks_loosely(n, function, *args, timeout=timeout)
    failed = [f"rank {m}: {o}" for m, o in enumerate(outcomes) if isinstance(o, RankFailed)]
    if failed:
        raise RankFailed("\n".join(failed))
    return outcomes


def run_ranks_loosely(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    lost: Collection[int] = (),
) -> list[Any]:
    """Like ``run_ranks``, but a rank that failed has a ``RankFailed`` as its outcome.

    Nobody waits for ranks that are ``lost``.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(n)]
        processes = [
            _context.Process(
                target=_child, args=(m, n, folder, pipes[m][1], function, args), daemon=True
            )
            for m in range(n)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            return _collect([reader for reader, _ in pipes], processes, timeout, lost)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    readers: list[Any], processes: list[Any], timeout: float, lost: Collection[int]
) -> list[Any]:
    outcomes: list[Any] = [RankFailed(f"no answer within {timeout} s") for _ in readers]
    waiting = dict(zip(readers, range(len(readers)), strict=True))
    deadline = time.monotonic() + timeout
    while set(waiting.values()) - set(lost) and time.monotonic() < deadline:
        for reader in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            m = waiting.pop(reader)
            try:
                outcomes[m] = pickle.loads(reader.recv_bytes())
            except EOFError:
                processes[m].join(5)
                outcomes[m] = RankFailed(f"died with exit code {processes[m].exitcode}")
    return outcomes


def _child(
    rank: int, n: int, folder: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    try:
        if n > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n
            )
        pipe.send_bytes(pickle.dumps(function(rank, *args)))
        # Nobody leaves while others still talk to it.
        if n > 1:
            dist.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps(RankFailed(traceback.format_exc())))
        time.sleep(0.2)
    finally:
        pipe.close()
        os._exit(0)
