"""What each rank runs in the tests of Horovod: named checks in one job, because starting it is slow.

    horovodrun -np 4 python -m tests.horovod_worker CHECK [CHECK ...]

A check returns what happened beside what should have; test_horovod.py compares and says why.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import consensus_opt.integrations.horovod as hvd
from consensus_opt import ConsensusOptimizer, PeerError, StackedTransport, gossip_sgd, local_sgd
from consensus_opt.topology import topology
from tests import test_parity as parity
from tests.launchers import report
from tests.problems import average_by_hand, flat, loss_of, mlp, random_rows, stacked, train

CHECKS: dict[str, Callable[[], Any]] = {}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TIMEOUT = 30.0
EVERY_THIRD = local_sgd(3)


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    hvd.init(process_sets=SETS if hvd_size() == 4 else [])
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CHECKS[name]()
        except Exception:
            found[name] = Failed(traceback.format_exc())
    report(hvd.rank(), found)
    hvd.barrier()
    hvd.shutdown()


class Failed(str):
    """The traceback of a check that raised."""


if __name__ == "__main__":
    main(sys.argv[1:])
