"""benchmarks.train under torchrun; in the first attempt, rank 1 kills itself after epoch 2."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from benchmarks import train
from consensus_opt import checkpoint


def die_after(folder: str, step: int) -> None:
    while (checkpoint.latest(folder) or 0) < step:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder = sys.argv[sys.argv.index("--checkpoint") + 1]
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        step = int(os.environ["DIE_AFTER_STEP"])
        threading.Thread(target=die_after, args=(folder, step), daemon=True).start()
    train.main()
