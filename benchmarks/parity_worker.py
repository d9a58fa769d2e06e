"""What each worker does for `benchmarks.parity`: one small training with each method.

    mpirun -n 4 python -m benchmarks.parity_worker --engine mpi --steps 24 --out FOLDER

Everything but the engine is fixed: digits, an MLP, the order of the images by rank and step.
`stacked()` is the same training with all workers in one process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import consensus_opt
from benchmarks import data
from benchmarks.launch import ENGINES, Worker, launch
from benchmarks.models import build
from consensus_opt import (
    ConsensusOptimizer,
    GradientNorm,
    Method,
    RoundRecord,
    StackedTransport,
)

Recipe = dict[str, Any]

METHODS: dict[str, Recipe] = {
    "local_sgd": {"method": "local_sgd", "period": 4},
    "ring gossip": {"method": "gossip_sgd", "topology": "ring"},
    "one-peer gossip": {"method": "gossip_sgd", "topology": "one_peer_exponential"},
    "dppf": {"method": "dppf", "alpha": 0.1, "lam": 0.5, "period": 4},
    "control": {
        "method": "consensus_control",
        "topology": "ring",
        "target": GradientNorm(0.04),
        "during": (0.0, 0.75),
        "at_least": 0.1,
    },
}
"""By name, as the "consensus" block of a DeepSpeed configuration."""

BATCH = 32


def recipe(block: Recipe) -> Method:
    """The method of a block."""
    arguments = {key: value for key, value in block.items() if key != "method"}
    method: Method = getattr(consensus_opt, block["method"])(**arguments)
    return method


def model_of(split: data.Split) -> nn.Module:
    """The model that every worker starts from."""
    torch.manual_seed(0)
    return build("mlp", split)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


def batches(split: data.Split, rank: int, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one worker."""
    samples = len(split.train_x)
    endless = (
        part
        for epoch in count(1)
        for part in data.batches(samples, BATCH, rank=rank, size=size, seed=0, epoch=epoch)
    )
    for part in islice(endless, steps):
        yield split.train_x[part], split.train_y[part]


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Log:
    """A telemetry sink that keeps what was decided in each round."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, ...]] = []

    def __call__(self, record: RoundRecord) -> None:
        """Keep one round."""
        known = (record.distance, record.target)
        numbers = (math.nan if number is None else number for number in known)
        self._rounds.append((record.step, record.exchanges, *numbers))

    def table(self) -> Tensor:
        """Step, exchanges, distance and target of each round, (rounds, 4); NaN where unknown."""
        return torch.tensor(self._rounds, dtype=torch.float64)


def train(block: Recipe, split: data.Split, worker: Worker, steps: int) -> tuple[Tensor, Tensor]:
    """Train on this worker's batches; returns its parameters after the last step, and its log."""
    model, log = model_of(split), Log()
    network, optimizer = _wrap(model, block, worker, steps, log)
    for images, labels in batches(split, worker.rank, worker.size, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels)
        network.backward(loss) if hasattr(network, "backward") else loss.backward()
        optimizer.step()
    return flat(model), log.table()


def _wrap(model: nn.Module, block: Recipe, worker: Worker, steps: int, log: Log) -> tuple[Any, Any]:
    if worker.engine != "deepspeed":
        return model, ConsensusOptimizer(
            sgd(model.parameters()),
            recipe(block),
            transport=worker.transport,
            total_steps=steps,
            telemetry=log,
        )
    from consensus_opt.integrations import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,  # DeepSpeed clips at norm 1 by default
        "consensus": {**block, "total_steps": steps, "telemetry": log},
    }
    engine = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]
    return engine, engine


def stacked(block: Recipe, split: data.Split, n: int, steps: int) -> tuple[Tensor, Tensor]:
    """Train n workers as the rows of one tensor; returns their parameters, (n, P), and their log.

    Each worker's gradient is computed from a copy of its parameters, which begins where a process's
    own would: the bits of a matrix product depend on the place of its factors in memory.
    """
    model, log = model_of(split), Log()
    rows = nn.Parameter(flat(model).repeat(n, 1))
    optimizer = ConsensusOptimizer(
        sgd([rows]),
        recipe(block),
        transport=StackedTransport(n),
        total_steps=steps,
        telemetry=log,
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    lengths = [parameter.numel() for parameter in parameters]
    for everyone in zip(*(batches(split, m, n, steps) for m in range(n)), strict=True):
        gradients = []
        for row, (images, labels) in zip(rows.detach(), everyone, strict=True):
            own = row.clone().requires_grad_()
            pieces = zip(own.split(lengths), parameters, strict=True)
            weights = dict(zip(names, (p.view(like.shape) for p, like in pieces), strict=True))
            F.cross_entropy(functional_call(model, weights, (images,)), labels).backward()
            gradients.append(own.grad)
        rows.grad = torch.stack(gradients)
        optimizer.step()
    return rows.detach(), log.table()


def main() -> None:
    """Train with every method, and leave parameters and logs in `--out`/RANK.pt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="an existing folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    split = data.load("digits")
    with launch(engine=options.engine) as worker:
        ended = {k: train(block, split, worker, options.steps) for k, block in METHODS.items()}
        torch.save(ended, options.out / f"{worker.rank}.pt")


if __name__ == "__main__":
    main()
