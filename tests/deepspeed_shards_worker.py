"""What each rank runs in the tests of DeepSpeed with replicas of two ranks.

deepspeed --num_accelerators 4 --module tests.deepspeed_shards_worker FOLDER CHECK [CHECK ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor, nn

from consensus_opt.integrations.deepspeed import consensus_of, initialize
from tests import deepspeed_worker
from tests.deepspeed_worker import check, config, error, loss_of, masters, rank, sgd, train, weights
from tests.problems import mlp

STEPS = 5
BLOCKS: dict[str, dict[str, Any]] = {
    "mean": {"method": "local_sgd", "period": 2},
    "dppf": {"method": "dppf", "alpha": 0.2, "lam": 0.3, "period": 2},
    "momentum_too": {"method": "gossip_sgd", "topology": "ring", "period": 2, "state": "average"},
    "control": {
        "method": "consensus_control",
        "topology": "complete",
        "target": 0.1,
        "during": [0.0, 1.0],
    },
    "mix_first": {"method": "dsgd_ac", "topology": "ring", "lr_reference": 0.2},
}


def make(stage: int, dtype: str = "fp32", block: str = "mean", seed: int = 0, **more: Any) -> Any:
    model = more.pop("model", None) or mlp(seed)
    consensus = {**BLOCKS[block], "replica_size": more.pop("replica_size", 2)}
    made = config(stage, dtype, consensus=consensus, **more)
    return initialize(model=model, optimizer=sgd(model.parameters()), config=made)[0]


def whole(engine: Any) -> list[float]:
    """The fp32 weights of this replica, put together from its ranks."""
    if not engine.zero_optimization():
        return masters(engine)
    full = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return torch.cat([p.detach().flatten() for p in full if p is not None]).tolist()


def rounded(engine: Any) -> bool:
    now = weights(engine)
    return torch.equal(now, torch.tensor(whole(engine)).to(now.dtype))


def trajectory(stage: int, dtype: str, block: str, **more: Any) -> dict[str, Any]:
    engine = make(stage, dtype, block, **more)
    consensus = consensus_of(engine)
    path, agree = [], [rounded(engine)]
    for step in range(STEPS):
        train(engine, [step])
        path.append(whole(engine))
        agree.append(rounded(engine))
    before = weights(engine)
    with consensus.averaged():
        averaged = whole(engine)
        agree.append(rounded(engine))
    return {
        "path": path,
        "agree": all(agree),
        "averaged": averaged,
        "restored": whole(engine) == path[-1] and torch.equal(weights(engine), before),
        "distance": consensus.consensus_distance(),
        "bytes": consensus.bytes_sent,
        "held": sum(p.numel() for p in consensus._trainable()),
    }


@check
def pieces(folder: Path) -> dict[str, Any]:
    kinds = [(s, d) for s in range(4) for d in ("fp32", "bf16")] + [(2, "fp16"), (3, "fp16")]
    return {f"{s}-{d}": trajectory(s, d, "mean") for s, d in kinds}


@check
def piece_methods(folder: Path) -> dict[str, Any]:
    return {
        f"{block} {stage}": trajectory(stage, "fp32", block)
        for block in list(BLOCKS)[1:]
        for stage in (0, 1, 3)
    }


@check
def pieces_clip(folder: Path) -> dict[str, Any]:
    return {
        str(stage): trajectory(
            stage, "fp32", "mean", gradient_clipping=0.1, gradient_accumulation_steps=2
        )
        for stage in (1, 2, 3)
    }


@check
def pieces_overflow(folder: Path) -> dict[str, Any]:
    """Rank 1's loss is infinite in step 2: its replica skips, and the round happens."""
    results = {}
    for stage in range(1, 4):
        model = mlp()
        made = config(stage, "fp16", {"method": "local_sgd", "period": 1, "replica_size": 2})
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine = initialize(model=model, optimizer=sgd(model.parameters()), config=made)[0]
        applied = []
        for step in range(4):
            loss = loss_of(engine, step)
            engine.backward(loss * float("inf") if (rank(), step) == (1, 2) else loss)
            engine.step()
            applied.append(consensus_of(engine).step_applied)
        results[str(stage)] = {
            "applied": applied,
            "clock": consensus_of(engine).clock,
            "rounds": consensus_of(engine).rounds,
            "whole": whole(engine),
            "agree": rounded(engine),
        }
    return results


@check
def pieces_uneven(folder: Path) -> dict[str, Any]:
    """The second replica has two batches, the first one four."""
    results = {}
    for stage in (0, 1, 3):
        engine = make(stage)
        consensus = consensus_of(engine)
        with consensus.join():
            train(engine, range(4 - rank() // 2 * 2))
        results[str(stage)] = {
            "clock": consensus.clock,
            "rounds": consensus.rounds,
            "whole": whole(engine),
            "agree": rounded(engine),
        }
    return results


@check
def pieces_saved(folder: Path) -> dict[str, Any]:
    """Save after 3 of 6 steps, with a round due after 4: resumed, the same bits as without."""
    results = {}
    for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")):
        engine = train(make(stage, dtype, "dppf"), range(3))
        place = str(folder / f"pieces-{stage}")
        engine.save_checkpoint(place)
        saved = whole(engine)
        train(engine, range(3, 6))
        resumed = make(stage, dtype, "dppf", seed=1)
        resumed.load_checkpoint(place)
        loaded, clock, agree = whole(resumed), consensus_of(resumed).clock, rounded(resumed)
        train(resumed, range(3, 6))
        results[f"{stage}-{dtype}"] = {
            "loaded": loaded == saved,
            "clock": clock,
            "agree": agree,
            "went on": whole(resumed) == whole(engine),
            "saved": saved,
            "folders": sorted(path.name for path in Path(place).iterdir()),
        }
    return results


class Partly(nn.Module):
    """A frozen layer, two layers with one weight, a buffer, and two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.two.weight = self.one.weight
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 1.0 + rank()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.one(self.frozen(x) * self.scale.to(x.dtype))))
        return self.last(x)


@check
def pieces_partly_trained(folder: Path) -> dict[str, Any]:
    results = {}
    for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")):
        torch.manual_seed(rank())
        model = Partly()
        named = dict(model.named_parameters())
        trained = [p for name, p in named.items() if "frozen" not in name]
        optimizer = sgd([{"params": trained[:1], "lr": 0.2}, {"params": trained[1:]}])
        made = config(stage, dtype, {"method": "local_sgd", "period": 1, "replica_size": 2})
        engine = initialize(model=model, optimizer=optimizer, config=made)[0]
        start = weights(engine).tolist()
        train(engine, range(3))
        results[f"{stage}-{dtype}"] = {
            "start": start,
            "after": weights(engine).tolist(),
            "distances": list(consensus_of(engine).consensus_distances().values()),
        }
    return results


@check
def pieces_beside_others(folder: Path) -> dict[str, Any]:
    """Engines with replicas of two, of one and of all ranks, and DeepSpeed's own, take turns."""
    two, one, every = make(2), make(3, replica_size=1), make(1, replica_size=4)
    model = mlp()
    plain = {key: value for key, value in config().items() if key != "consensus"}
    own = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=plain)[0]
    for step in range(STEPS):
        for engine in (two, one, every, own):
            train(engine, [step])
    data = [(torch.full((6,), float(i)), i) for i in range(32)]
    shared = two.deepspeed_io(data, num_local_io_workers=0)
    return {
        "workers": [consensus_of(e).transport.size for e in (two, one, every)],
        "two": whole(two),
        "every": whole(every),
        "own": weights(own).tolist(),
        "untouched": groups.mpu is None,
        "seen": [int(i) for _, labels in shared for i in labels],
        "refused": error(lambda: make(2, replica_size=3)),
    }


if __name__ == "__main__":
    deepspeed_worker.main(*sys.argv[1:])
