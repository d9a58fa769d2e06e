"""What a worker runs in the elastic test: one dies in a round, later another one comes.

    horovodrun --host-discovery-script SCRIPT ... python -m tests.horovod_elastic FOLDER

FOLDER/hosts is the list of machines that SCRIPT prints; each process writes what it sees to a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import consensus_opt.integrations.horovod as hvd
from consensus_opt import PeerError, gossip_sgd
from tests.problems import flat, loss_of, mlp

DIES, ALONE, JOINED, LAST = 5, 6, 8, 12
"""Steps: a worker dies, a machine is added, the other one waits for it, all is done."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, method=gossip_sgd("ring", period=2), timeout=20.0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    def note(event: str, **values: Any) -> None:
        seen = {"event": event, "rank": hvd.rank(), "size": hvd.size(), "step": state.step}
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**seen, "clock": optimizer.clock, **values}) + "\n")

    @hvd.elastic.run
    def work(state: Any) -> None:
        note("begin")
        while state.step < LAST:
            if state.step == DIES and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                os._exit(1)
            if state.step == ALONE and hvd.size() == 1:
                (folder / "hosts").write_text("localhost:2\n")
            take_step()
            while state.step == JOINED and hvd.size() == 1:
                time.sleep(0.1)
                state.commit()
            state.commit()

    def take_step() -> None:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), state.step).backward()
        try:
            optimizer.step()
        except PeerError as error:
            note("error", ranks=error.ranks)
            raise
        state.step += 1
        note("step", transport=[optimizer.transport.rank, optimizer.transport.size])

    work(state)
    parameters = flat(model).tolist()
    note("end", parameters=parameters, exchanges=optimizer.state_dict()["consensus"]["exchanges"])
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
