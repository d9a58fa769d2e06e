"""What a DeepSpeed configuration says: its ``"consensus"`` block, and what cannot be had beside it.

The keys of the block are the arguments of the recipe that it names, read from the recipe's own
signature, so that the two cannot drift apart. Nothing here needs DeepSpeed.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from consensus_opt import methods
from consensus_opt.checks import whole
from consensus_opt.methods import Method
from consensus_opt.optimizer import ConsensusOptimizer

BLOCK = "consensus"

RECIPES = {
    name: function
    for name, function in vars(methods).items()
    if inspect.isfunction(function) and inspect.signature(function).return_annotation == "Method"
}

OPTIONS = ("replica_size", "total_steps", "timeout", "broadcast", "telemetry")
"""What the block takes beside the arguments of the recipe."""

LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which launchers tell how many ranks a machine has."""

ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
"""Optimizers that do the same to a tensor as to ZeRO's flat pieces of it."""

_COMPRESSED = re.compile("one.?bit|1.?bit|zero.?one", re.IGNORECASE)

_ONE_MODEL = "a worker's model lies on 'replica_size' ranks, as ZeRO splits it"
_SPLIT = f"it splits a model over several ranks, and here {_ONE_MODEL}; leave it out"
_OFFLOAD = (
    "it keeps the master weights where rounds do not reach them; leave it out, and save memory "
    "with ZeRO stages 1 to 3"
)
_LOOP = "it replaces engine.step(), which counts the steps between rounds; leave it out"
_DATA = "it samples data as if all workers were one; leave it out, and pass a sampler"

_REFUSED = {
    "tensor_parallel.autotp_size": _SPLIT,
    "sequence_parallel_size": _SPLIT,
    "expert_parallel": _SPLIT,
    "zero_optimization.zero_hpz_partition_size": _SPLIT,
    "zero_optimization.zero_quantized_gradients": _SPLIT,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.zenflow": _LOOP,
    "hybrid_engine": _LOOP,
    "compile.deepcompile": _LOOP,
    "autotuning": _LOOP,
    "elasticity": "it fits batches to ranks that share one model; leave it out",
    "data_efficiency": _DATA,
    "curriculum_learning": _DATA,
}


def consensus(config: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Return the method of the ``"consensus"`` block, and the options for ConsensusOptimizer.

    Raises:
        ValueError: If there is no block, or a key is unknown or lacking; says what is known.
    """
    block = config.get(BLOCK)
    if not isinstance(block, Mapping):
        raise ValueError(
            f"the {BLOCK!r} block of the DeepSpeed configuration is {block!r}, and has to be an "
            'object that names a method; write "consensus": {"method": "local_sgd", "period": 4}, '
            "or call deepspeed.initialize() to train without consensus"
        )
    name = block.get("method")
    if name not in RECIPES:
        raise ValueError(
            f"'method' in the {BLOCK!r} block is {name!r}; known are {', '.join(RECIPES)}; "
            'write for example "method": "dppf"'
        )
    parameters = inspect.signature(RECIPES[name]).parameters
    needed = [key for key, value in parameters.items() if value.default is value.empty]
    known = ["method", *parameters, *OPTIONS]
    unknown = [key for key in block if key not in known]
    lacking = [key for key in needed if key not in block]
    if unknown or lacking:
        raise ValueError(
            f"the {BLOCK!r} block of method {name!r} "
            f"{f'has the unknown key {unknown[0]!r}' if unknown else f'lacks {lacking[0]!r}'}; it "
            f"takes {', '.join(known)}, and needs {', '.join(['method', *needed])}"
        )
    arguments = {key: block[key] for key in parameters if key in block}
    method = RECIPES[name](
        **{k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    )
    if method.state == "quasi_global":
        raise ValueError(
            "'state' is 'quasi_global', for which momentum is rewritten around each step, and "
            'DeepSpeed keeps it in places of its own; write "state": "average" or "local"'
        )
    return method, {key: block[key] for key in OPTIONS if key in block}


def engine_config(config: Mapping[str, Any], workers: int, optimizer: object) -> dict[str, Any]:
    """Return the configuration of one worker's engine.

    It has no ``"consensus"`` block, and of ``"train_batch_size"``, in DeepSpeed the batch of all
    workers, it has this worker's part. ``"zero_allow_untested_optimizer"`` is set for the
    optimizers of torch.optim that work elementwise; for others DeepSpeed asks for it.

    Raises:
        ValueError: If something is configured that cannot work here; says why, and what to write.
    """
    _refuse(config)
    engine = {key: value for key, value in config.items() if key != BLOCK}
    batch = engine.get("train_batch_size")
    if isinstance(batch, int):
        if batch % workers:
            raise ValueError(
                f"'train_batch_size' is {batch}, the batch of all {workers} workers, which cannot "
                f"share it equally; write a multiple of {workers}, or leave it out and write "
                "'train_micro_batch_size_per_gpu'"
            )
        engine["train_batch_size"] = batch // workers
    named = getattr(torch.optim, str(_at(config, "optimizer.type")), None)
    if (named if optimizer is None else type(optimizer)) in ELEMENTWISE:
        engine.setdefault("zero_allow_untested_optimizer", True)
    return engine


def replica_size(config: Mapping[str, Any], given: Any, world: int) -> int:
    """Return the number of ranks on which a worker's model lies.

    By default that is a machine's ranks with ZeRO on several machines, and else one: the workers of
    a single machine would otherwise be one worker. The ranks of a replica follow each other.

    Raises:
        TypeError: If the size is no integer.
        ValueError: If the ranks cannot be shared out so.
    """
    sizes = [int(os.environ[name]) for name in LOCAL_SIZES if name in os.environ]
    local = sizes[0] if sizes else 1
    sharded = int(_at(config, "zero_optimization.stage") or 0) > 0
    usual = local if sharded and local < world else 1
    example = f'"{BLOCK}": {{"replica_size": 8, ...}}'
    size = usual if given is None else whole(given, "'replica_size'", example)
    if world % size:
        raise ValueError(
            f"'replica_size' is {size}{' (the ranks of this machine)' if given is None else ''}, "
            f"and there are {world} ranks, which cannot be shared out so; it must divide their "
            f"number; write {example}"
        )
    return size


def check_model(model: Any, mpu: Any, mesh_param: Any) -> None:
    """Raise ``ValueError`` for a model that lies on several ranks."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}, and has to be a torch.nn.Module: write model=model")
    if mpu is not None or mesh_param is not None:
        raise ValueError(
            f"mpu and mesh_param say which ranks share a model, and here {_ONE_MODEL}, for which "
            f"initialize makes the mpu; leave them out, and write the size in the {BLOCK!r} block"
        )
    if any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__):
        raise ValueError(
            f"model is a PipelineModule, whose stages lie on several ranks, and here {_ONE_MODEL}; "
            "write its layers as a torch.nn.Sequential"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            "model was made under deepspeed.zero.Init(), which split it over all ranks, and here "
            f"{_ONE_MODEL}; make it outside of that block, and ZeRO stage 3 will split it"
        )
    if any(hasattr(module, "set_deepspeed_parallelism") for module in model.modules()):
        raise ValueError(
            "model has DeepSpeed's mixture-of-experts layers, whose experts lie on several ranks, "
            f"and here {_ONE_MODEL}; use experts that are ordinary modules"
        )


def check_optimizer(optimizer: Any, lr_scheduler: Any, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a lacking optimizer, or a scheduler of another one."""
    if optimizer is None and _at(config, "optimizer.type") is None:
        raise ValueError(
            "there is no optimizer, neither as optimizer= nor in the configuration; write "
            'optimizer=torch.optim.AdamW(model.parameters()) or "optimizer": {"type": "AdamW", ...}'
        )
    if isinstance(optimizer, ConsensusOptimizer):
        raise ValueError(
            "optimizer is a ConsensusOptimizer, which initialize makes itself from the "
            f"{BLOCK!r} block; pass the optimizer inside it: optimizer=optimizer.inner"
        )
    of = getattr(lr_scheduler, "optimizer", None)
    if of is not None and of is not optimizer:
        raise ValueError(
            f"lr_scheduler is made for a {type(of).__name__} that is not the engine's optimizer, "
            f"which {'the configuration names' if optimizer is None else 'optimizer= gives'}; pass "
            "a callable that makes it, lr_scheduler=lambda optimizer: StepLR(optimizer, 30), or "
            'name it in the configuration, "scheduler": {"type": "WarmupLR", ...}'
        )


def _refuse(config: Mapping[str, Any]) -> None:
    for path, reason in _REFUSED.items():
        if _is_on(_at(config, path)):
            raise ValueError(f"{path!r} cannot be combined with {BLOCK!r}: {reason}")
    kind = str(_at(config, "optimizer.type"))
    if _COMPRESSED.search(kind):
        raise ValueError(
            f"the optimizer {kind!r} compresses an all-reduce of gradients, and workers that "
            'average parameters make none; write "optimizer": {"type": "AdamW", ...}'
        )


def _at(config: Any, path: str) -> Any:
    """Return the value at a dotted path, None where there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("enabled", value.get("device", bool(value)))
    return value is True or value not in (None, False, 0, 1, "none")
