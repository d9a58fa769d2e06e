"""What each rank runs in the tests of DeepSpeed: named checks, and a report of their results.

    deepspeed --num_accelerators 4 --module tests.deepspeed_worker FOLDER CHECK [CHECK ...]

Results are what the engine did; what it should have done is in test_deepspeed.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor, nn

from consensus_opt.integrations.deepspeed import EngineOptimizer, consensus_of, initialize
from tests.launchers import report
from tests.problems import batch, mlp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RING = {"method": "gossip_sgd", "topology": "ring"}
MEAN = {"method": "local_sgd", "period": 1}
MIX_FIRST = {"method": "dsgd_ac", "topology": "ring", "lr_reference": 0.2}
STEPS = 6
RESUMED = [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")]

CHECKS: dict[str, Callable[..., Any]] = {}
Check = Callable[..., Any]


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def rank() -> int:
    return int(os.environ["RANK"])


def config(
    stage: int = 0, dtype: str = "fp32", consensus: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 10_000, **more.pop("zero", {})}
    made = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}
    made |= {"gradient_clipping": 0.0, **more}  # DeepSpeed clips at norm 1 by default
    if dtype != "fp32":
        made[dtype] = {"enabled": True, **({"loss_scale": 128.0} if dtype == "fp16" else {})}
    return {**made, "consensus": {"timeout": 30, **(consensus or RING)}}


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def make(stage: int = 0, dtype: str = "fp32", seed: int = 0, **more: Any) -> Any:
    model = mlp(seed)
    return initialize(
        model=model, optimizer=sgd(model.parameters()), config=config(stage, dtype, **more)
    )[0]


def loss_of(engine: Any, step: int) -> Tensor:
    x, y = batch(rank(), step)
    dtype = next(engine.module.parameters()).dtype
    return nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)


def train(engine: Any, steps: Any) -> Any:
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()
    return engine


def masters(engine: Any, numel: int | None = None) -> list[float]:
    """The fp32 weights, without the padding of ZeRO."""
    flat = torch.cat([p.detach().flatten() for p in consensus_of(engine)._trainable()])
    return flat[: weights(engine).numel() if numel is None else numel].tolist()


def weights(engine: Any) -> Tensor:
    """The weights that the model computes with."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])


def rounded(engine: Any) -> bool:
    """Whether the model computes with its masters, rounded."""
    now = weights(engine)
    return torch.equal(now, torch.tensor(masters(engine)).to(now.dtype))


def trajectory(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    engine = make(stage, dtype, **more)
    consensus = consensus_of(engine)
    path, agree = [], [rounded(engine)]
    for step in range(STEPS):
        train(engine, [step])
        path.append(masters(engine))
        agree.append(rounded(engine))
    before, outputs = weights(engine), loss_of(engine, 0).item()
    with consensus.averaged():
        averaged, averaged_agree = masters(engine), rounded(engine)
        averaged_outputs = loss_of(engine, 0).item()
    return {
        "path": path,
        "agree": agree,
        "averaged": averaged,
        "averaged_agree": averaged_agree,
        "averaged_changes_outputs": averaged_outputs != outputs,
        "restored": masters(engine) == path[-1] and torch.equal(weights(engine), before),
        "same_outputs": loss_of(engine, 0).item() == outputs,
        "distance": consensus.consensus_distance(),
        "optimizer": type(engine.optimizer).__name__,
    }


@check
def trajectories(folder: Path) -> dict[str, Any]:
    return {f"{s}-{d}": trajectory(s, d) for s in range(4) for d in DTYPES}


@check
def accumulates_bf16_in_fp32(folder: Path) -> dict[str, Any]:
    return trajectory(1, "bf16", data_types={"grad_accum_dtype": "fp32"})


@check
def methods(folder: Path) -> dict[str, Any]:
    blocks = json.loads((folder / "methods.json").read_text())
    return {
        f"{name} {stage}-{dtype}": masters(
            train(make(stage, dtype, consensus={**block, "total_steps": STEPS}), range(STEPS))
        )
        for name, block in blocks.items()
        for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "bf16"))
    }


PHI = {"method": "consensus_control", "topology": "ring", "during": [0.0, 1.0]}


@check
def gradient_targets(folder: Path) -> dict[str, Any]:
    kinds = {
        f"{stage}-{dtype}": targets(stage, dtype, 0.0) for stage, dtype in [*RESUMED, (0, "fp16")]
    }
    return kinds | {"clipped": [targets(stage, "fp32", 0.01)[0] for stage in (0, 2)]}


def targets(stage: int, dtype: str, clipping: float) -> list[float | None]:
    records: list[Any] = []
    block = {**PHI, "telemetry": records.append}
    train(make(stage, dtype, consensus=block, gradient_clipping=clipping), range(STEPS))
    return [record.target for record in records]


@check
def no_norm(folder: Path) -> str:
    try:
        make(1, consensus=PHI, zero={"compute_grad_norm": False})
    except ValueError as error:
        return str(error)
    return ""


@check
def quadratic_sync(folder: Path) -> dict[str, Any]:
    """Periods that follow a falling learning rate, and a record of each round in a file."""
    model = mlp()
    optimizer = sgd(model.parameters())
    file = folder / "rounds.jsonl"
    engine = initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
        config=config(
            consensus={
                "method": "quadratic_sync",
                "coefficient": 0.1,
                "min_period": 1,
                "telemetry": str(file),
            }
        ),
    )[0]
    train(engine, range(12))
    dist.barrier()
    lines = file.read_text().splitlines()
    return {"steps": [json.loads(line)["step"] for line in lines], "weights": masters(engine)}


@check
def r143(folder: Path) -> dict[str, Any]:
    engine = make(3, "bf16", zero={"stage3_param_persistence_threshold": 0})
    train(engine, range(2))
    consensus_of(engine).synchronize()
    outside = [parameter.numel() for parameter in engine.module.parameters()]
    return {"outside": outside, "masters": masters(engine), "agree": rounded(engine)}


@check
def r144(folder: Path) -> dict[str, Any]:
    class Unknown(torch.optim.SGD):
        pass

    model = mlp()
    return {
        "torch's own": masters(train(make(1), range(2))),
        "told not to": error(lambda: make(1, zero_allow_untested_optimizer=False)),
        "unknown": error(
            lambda: initialize(
                model=model, optimizer=Unknown(model.parameters(), lr=0.1), config=config(1)
            )
        ),
    }


@check
def r146(folder: Path) -> dict[str, Any]:
    model = mlp()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model.parameters()), 1, 0.5)
    named = config(optimizer={"type": "SGD", "params": {"lr": 0.1}})
    refused = error(lambda: initialize(model=model, lr_scheduler=scheduler, config=named))
    engine, _, _, made = initialize(
        model=model,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        config=named,
    )
    train(engine, range(2))
    return {"refused": refused, "lr": engine.get_lr(), "same": made is engine.lr_scheduler}


@check
def saves(folder: Path) -> dict[str, Any]:
    """Save after 3 of 6 steps, with a round due after 4: resumed, the same bits as without."""
    results = {}
    for stage, dtype in RESUMED:
        block = {"method": "gossip_sgd", "topology": "one_peer_exponential", "period": 2}
        engine = train(make(stage, dtype, consensus=block), range(3))
        place, state = str(folder / f"{stage}-{dtype}"), {"epoch": 7, "best": [0.5]}
        engine.save_checkpoint(place, client_state=state)
        saved = masters(engine)
        train(engine, range(3, 6))
        resumed = make(stage, dtype, seed=1, consensus=block)
        path, found = resumed.load_checkpoint(place)
        loaded, clock, agree = masters(resumed), consensus_of(resumed).clock, rounded(resumed)
        train(resumed, range(3, 6))
        results[f"{stage}-{dtype}"] = {
            "saved": saved,
            "loaded": loaded,
            "clock": clock,
            "agree": agree,
            "went on": masters(engine),
            "resumed": masters(resumed),
            "client": {key: found[key] for key in state},
            "other keys": "consensus" in found,
            "path": str(Path(path).relative_to(folder)),
            "exchanges": [consensus_of(e)._rounds.exchanges for e in (engine, resumed)],
        }
    return results


@check
def loads(folder: Path) -> dict[str, Any]:
    """Load what other ranks saved."""
    results = {}
    for stage, dtype in RESUMED:
        engine = make(stage, dtype, seed=1)
        engine.load_checkpoint(str(folder / f"{stage}-{dtype}"))
        loaded, clock = masters(engine), consensus_of(engine).clock
        train(engine, range(3, 5))
        results[f"{stage}-{dtype}"] = {
            "loaded": loaded,
            "clock": clock,
            "later": consensus_of(engine).clock,
            "finite": bool(weights(engine).isfinite().all()),
        }
    return results


@check
def r148(folder: Path) -> dict[str, Any]:
    engine = train(make(), range(1))
    return {
        "refused": error(
            lambda: engine.save_checkpoint(str(folder / "r148"), client_state={"consensus": 1})
        )
    }


@check
def plain_checkpoint(folder: Path) -> dict[str, Any]:
    """What DeepSpeed saved without consensus starts all workers alike."""
    model = mlp(3)
    plain = {key: value for key, value in config().items() if key != "consensus"}
    engine = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=plain)[0]
    engine.save_checkpoint(str(folder / "plain"))
    started = make()
    started.load_checkpoint(str(folder / "plain"), load_module_only=True)
    module_only = masters(started)
    started = make()
    started.load_checkpoint(str(folder / "plain"))
    return {
        "plain": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "module only": module_only,
        "all": masters(started),
        "clock": consensus_of(started).clock,
        "dp": engine.dp_world_size,
    }


@check
def r150(folder: Path) -> dict[str, Any]:
    engine = make(consensus=MEAN, gradient_accumulation_steps=4)
    seen = []
    for step in range(8):
        before = masters(engine)
        train(engine, [step])
        seen.append([consensus_of(engine).clock, masters(engine) != before])
    first = make(consensus=MIX_FIRST, gradient_accumulation_steps=4)
    mixed = []
    for step in range(8):
        before = masters(first)
        train(first, [step])
        mixed.append([consensus_of(first).clock, masters(first) != before])
    own = make(consensus=MEAN, gradient_accumulation_steps=4, managed_gradient_accumulation=False)
    for step in range(8):
        own.backward(loss_of(own, step))
        if step % 4 == 3:
            own.step()
    clocks = [consensus_of(own).clock, consensus_of(own).rounds]
    return {
        "seen": seen,
        "mixed": mixed,
        "weights": masters(engine),
        "own": masters(own),
        "own clock": clocks,
    }


@check
def r151(folder: Path) -> dict[str, Any]:
    engine = make()
    return {
        "backend": dist.get_backend(),
        "device": str(engine.device),
        "world": dist.get_world_size(),
        "transport": type(consensus_of(engine).transport).__name__,
        "workers": consensus_of(engine).transport.size,
    }


@check
def r154(folder: Path) -> dict[str, Any]:
    """Rank 1's loss is infinite in step 2, at each stage."""
    results = {}
    for stage in range(4):
        model = mlp()
        made = config(stage, "fp16", MEAN)
        made["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine = initialize(model=model, optimizer=sgd(model.parameters()), config=made)[0]
        applied = []
        for step in range(5):
            loss = loss_of(engine, step)
            engine.backward(loss * float("inf") if (rank(), step) == (1, 2) else loss)
            engine.step()
            applied.append(consensus_of(engine).step_applied)
        results[str(stage)] = {
            "applied": applied,
            "skipped": engine.skipped_steps,
            "clock": consensus_of(engine).clock,
            "rounds": consensus_of(engine).rounds,
            "masters": masters(engine),
            "agree": rounded(engine),
        }
    return results


@check
def r155(folder: Path) -> dict[str, Any]:
    results = {}
    for dtype in ("bf16", "fp16"):
        engine = make(0, dtype, consensus={"method": "local_sgd", "period": 2})
        parts = []
        for step in range(4):
            train(engine, [step])
            parts.append([masters(engine), rounded(engine)])
        results[dtype] = parts
    return results


@check
def ways_to_an_optimizer(folder: Path) -> dict[str, Any]:
    """The same training, however the optimizer, the model and the configuration are given."""
    named = config(
        optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    )
    file = folder / f"config_{rank()}.json"
    file.write_text(json.dumps(named))
    model, arguments = mlp(), Namespace(deepspeed_config=str(file), local_rank=rank())
    by_name = initialize(args=arguments, model=model)
    a_callable, a_file = mlp(), mlp()
    scheduled = config(scheduler=named["scheduler"])
    by_callable = initialize(model=a_callable, optimizer=sgd, config=scheduled)
    by_file = initialize(model=a_file, optimizer=sgd(a_file.parameters()), config=str(file))
    return {
        "kept": arguments.deepspeed_config == str(file),
        "returned": by_name[1] is by_name[0].optimizer and by_name[3] is by_name[0].lr_scheduler,
        "weights": [
            masters(train(engine, range(STEPS))) for engine, *_ in (by_name, by_callable, by_file)
        ],
    }


@check
def clips(folder: Path) -> list[list[float]]:
    return [masters(train(make(s, gradient_clipping=0.1), range(STEPS))) for s in (0, 1, 3)]


@check
def shares_data(folder: Path) -> dict[str, Any]:
    data = [(torch.full((6,), float(i)), i) for i in range(32)]
    model = mlp()
    engine, _, loader, _ = initialize(
        model=model,
        optimizer=sgd(model.parameters()),
        training_data=data,  # type: ignore[arg-type]
        config={**config(), "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4},
    )
    own = [int(i) for _, labels in loader for i in labels]
    test = engine.deepspeed_io(data, route="eval", num_local_io_workers=0)
    return {
        "seen": own,
        "evaluated": [int(i) for _, labels in test for i in labels],
        "batch": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()],
    }


class Partly(nn.Module):
    """A frozen layer, a buffer, and two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.rest = nn.Linear(6, 6), mlp(rank())
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 1.0 + rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.frozen(x) * self.scale.to(x.dtype))


@check
def partly_trained(folder: Path) -> dict[str, Any]:
    results = {}
    for stage, dtype in ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")):
        torch.manual_seed(rank())
        model = Partly()
        first, *others = model.rest.parameters()
        optimizer = sgd([{"params": [first], "lr": 0.2}, {"params": others}])
        engine = initialize(model=model, optimizer=optimizer, config=config(stage, dtype, MEAN))[0]
        start, frozen = weights(engine).tolist(), weights(engine)[:42].tolist()
        train(engine, range(3))
        own = {
            name: safe_get_full_fp32_param(parameter)
            for name, parameter in model.rest.named_parameters()
            if stage > 0
        }
        after = weights(engine)
        seen = torch.cat([own[name].flatten() for name in own]) if own else after[42:]
        results[f"{stage}-{dtype}"] = {
            "start": start,
            "frozen": frozen,
            "frozen after": after[:42].tolist(),
            "after": after.tolist(),
            "deepspeed sees": torch.equal(seen.to(after.dtype), after[42:]),
            "buffer": model.scale.tolist(),
        }
    return results


@check
def two_engines(folder: Path) -> dict[str, Any]:
    """Two of ours take turns, one of DeepSpeed's own beside them averages gradients."""
    one, two = make(0, consensus=RING), make(2, "bf16", consensus=MEAN)
    untouched = groups.mpu is None
    model = mlp()
    plain = {key: value for key, value in config().items() if key != "consensus"}
    third = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=plain)[0]
    for step in range(STEPS):
        for engine in (one, two, third):
            train(engine, [step])
    return {
        "one": masters(one),
        "two": masters(two),
        "third": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "untouched": untouched and groups.mpu is None,
        "no consensus": error(lambda: consensus_of(third)),
        "alone": [
            masters(train(make(0, consensus=RING), range(STEPS))),
            masters(train(make(2, "bf16", consensus=MEAN), range(STEPS))),
        ],
    }


@check
def inside_averaged(folder: Path) -> dict[str, Any]:
    engine = make()
    with consensus_of(engine).averaged():
        engine.backward(loss_of(engine, 0))
        return {"refused": error(engine.step)}


@check
def alone(folder: Path) -> dict[str, Any]:
    """A world of one is the inner optimizer."""
    results = {}
    for stage, dtype in ((0, "fp32"), (0, "bf16"), (3, "bf16")):
        engine = train(make(stage, dtype, consensus={"method": "dppf"}), range(STEPS))
        model = mlp()
        plain = {k: v for k, v in config(stage, dtype).items() if k != "consensus"}
        plain["zero_allow_untested_optimizer"] = True
        other = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=plain)[
            0
        ]
        train(other, range(STEPS))
        results[f"{stage}-{dtype}"] = {
            "ours": weights(engine).tolist(),
            "plain": weights(other).tolist(),
            "clock": consensus_of(engine).clock,
            "kind": isinstance(consensus_of(engine), EngineOptimizer),
        }
    return results


@check
def other_models(folder: Path) -> dict[str, Any]:
    """Ranks that disagree hear of it, all of them."""
    model = nn.Linear(6, 3 + (rank() == 1))
    return {
        "refused": error(
            lambda: initialize(model=model, optimizer=sgd(model.parameters()), config=config())
        )
    }


def error(function: Callable[[], Any]) -> list[str]:
    try:
        function()
    except Exception as caught:
        return [type(caught).__name__, str(caught)]
    return ["none", ""]


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # The CPU computes in fp16, only slowly; DeepSpeed wants oneDNN to do it.
    get_accelerator().is_fp16_supported = lambda: True
    results: dict[str, Any] = {}
    try:
        for name in names:
            results[name] = CHECKS[name](Path(folder))
    except BaseException:
        # The other ranks cannot go on either.
        results["failed"] = f"{name} on rank {rank()}:\n{traceback.format_exc()}"
        raise
    finally:
        report(rank(), results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
