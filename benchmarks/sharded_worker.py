"""What each rank does for `benchmarks.sharded`: one training of two replicas of two ranks.

    torchrun --nproc-per-node 4 -m benchmarks.sharded_worker --setup zero3 --model mlp --out FOLDER

`unsharded` is the same training on two ranks, each of which takes the batches of two.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import mlp
from consensus_opt import ConsensusOptimizer, Method, dppf
from consensus_opt.hierarchy import HierarchicalTransport
from consensus_opt.integrations.torch_distributed import TorchTransport

SETUPS = ("unsharded", "zero1", "zero2", "zero3", "fsdp2", "node")
MODELS = ("mlp", "vit", "resnet50")
BLOCK: dict[str, Any] = {"method": "dppf", "alpha": 0.2, "lam": 0.3, "period": 2}
PIECES, CLASSES, SIDE = 2, 10, 32
WAIT = 240.0


def build(name: str, layers: int) -> nn.Module:
    """A model with random weights, the same on all ranks: (N, 3, 32, 32) to (N, 10)."""
    torch.manual_seed(0)
    if name == "mlp":
        return mlp(3 * SIDE * SIDE, CLASSES)
    import transformers

    if name == "vit":
        config = transformers.ViTConfig(
            hidden_size=384,
            num_hidden_layers=layers,
            num_attention_heads=6,
            intermediate_size=1536,
            image_size=SIDE,
            patch_size=8,
            num_labels=CLASSES,
        )
        return Logits(transformers.ViTForImageClassification(config))
    return Logits(
        transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES))
    )


class Logits(nn.Module):
    """A model of transformers as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (N, classes)."""
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def batch(rank: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    """The batch of one of the four ranks, the same whoever asks for it."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(size, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(0, CLASSES, (size,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Training:
    """A model on its ranks.

    Attributes:
        call: From images to logits.
        backward: Takes the loss.
        optimizer: Counts bytes and knows the distance.
        step: Ends a step.
        weights: Returns all parameters of this replica in one fp32 vector; a collective call.
    """

    call: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    optimizer: ConsensusOptimizer
    step: Callable[[], Any]
    weights: Callable[[], Tensor]


def flat(tensors: Any) -> Tensor:
    """One vector."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def method() -> Method:
    """The method of `BLOCK`."""
    return dppf(alpha=BLOCK["alpha"], lam=BLOCK["lam"], period=BLOCK["period"])


def unsharded(model: nn.Module, half: bool) -> Training:
    """Two workers on two ranks."""
    optimizer = ConsensusOptimizer(sgd(model.parameters()), method(), timeout=WAIT)
    return _plain(model, model, optimizer, half)


def node(model: nn.Module, half: bool) -> Training:
    """DistributedDataParallel inside a node, half of the vector from each rank to the other."""
    own, piece = divmod(dist.get_rank(), PIECES)
    ranks = range(dist.get_world_size())
    nodes = [dist.new_group(list(ranks)[m * PIECES : (m + 1) * PIECES]) for m in range(2)]
    others = [dist.new_group(list(ranks)[p::PIECES]) for p in range(PIECES)]
    inside, across = TorchTransport(nodes[own], WAIT), TorchTransport(others[piece], WAIT)
    network = DistributedDataParallel(model, process_group=nodes[own])
    transport = HierarchicalTransport(inside, across)
    optimizer = ConsensusOptimizer(
        sgd(model.parameters()), method(), transport=transport, timeout=WAIT
    )
    return _plain(model, network, optimizer, half)


def _plain(
    model: nn.Module, network: nn.Module, optimizer: ConsensusOptimizer, half: bool
) -> Training:
    def call(images: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits: Tensor = network(images)
        return logits

    return Training(
        call, Tensor.backward, optimizer, optimizer.step, lambda: flat(model.parameters())
    )


def fsdp2(model: nn.Module, half: bool) -> Training:
    """fully_shard, and consensus on a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from consensus_opt.integrations import fsdp

    mesh = init_device_mesh("cpu", (2, PIECES), mesh_dim_names=("replica", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    blocks = [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
    optimizer = fsdp.consensus(model, sgd(model.parameters()), method(), mesh, timeout=WAIT)

    def call(images: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits: Tensor = model(images)
        return logits

    def weights() -> Tensor:
        for module in [*blocks, model]:
            module.reshard()
        return flat(p.full_tensor() for p in model.parameters())

    return Training(call, Tensor.backward, optimizer, optimizer.step, weights)


def zero(stage: int, model: nn.Module, half: bool) -> Training:
    """DeepSpeed: a JSON file with a "consensus" block, and one changed import."""
    from deepspeed.utils import safe_get_full_fp32_param

    from consensus_opt.integrations import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "bf16": {"enabled": half},
        "consensus": {**BLOCK, "replica_size": PIECES, "timeout": WAIT},
    }
    engine = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]

    def weights() -> Tensor:
        return flat(safe_get_full_fp32_param(p) for p in model.parameters())

    def call(images: Tensor) -> Tensor:
        logits: Tensor = engine(images.bfloat16() if half else images)
        return logits

    return Training(call, engine.backward, deepspeed.consensus_of(engine), engine.step, weights)


def start(setup: str, model: nn.Module, half: bool) -> Training:
    """Make a training of one of `SETUPS`; a collective call."""
    if setup.startswith("zero"):
        return zero(int(setup[-1]), model, half)
    return {"unsharded": unsharded, "fsdp2": fsdp2, "node": node}[setup](model, half)


_FSDP = ("consensus_opt.integrations.fsdp",)
_DEEPSPEED = ("deepspeed", "consensus_opt.integrations.deepspeed")
_IMPORTED: dict[str, tuple[str, ...]] = {
    "unsharded": (),
    "node": (),
    "fsdp2": _FSDP,
    **dict.fromkeys(("zero1", "zero2", "zero3"), _DEEPSPEED),
    "vit": ("transformers.models.vit.modeling_vit",),
    "resnet50": ("transformers.models.resnet.modeling_resnet",),
}
"""What takes memory of its own, which is not counted."""


def memory(key: str) -> float:
    """Megabytes that /proc tells: VmRSS now, VmHWM at most since `forget()`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget() -> None:
    """Let VmHWM start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what it took."""
    for module in _IMPORTED[options.setup] + _IMPORTED.get(options.model, ()):
        importlib.import_module(module)
    bare = memory("VmRSS")
    whole = options.setup == "unsharded"
    model = build(options.model, options.layers)
    training = start(options.setup, model, options.dtype == "bf16")
    ranks = [dist.get_rank()]
    if whole:
        ranks = [PIECES * dist.get_rank() + piece for piece in range(PIECES)]
    for step in range(options.steps):
        parts = [batch(rank, step, options.batch) for rank in ranks]
        images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = F.cross_entropy(training.call(images).float(), labels)
        training.backward(loss)
        training.step()
        if step == 1:  # the first round has been
            forget()
    peak = memory("VmHWM") - bare
    weights = training.weights()
    replica = dist.get_rank() if whole else dist.get_rank() // PIECES
    if whole or dist.get_rank() % PIECES == 0:
        torch.save(weights, Path(options.out, f"{replica}.pt"))
    return {
        "parameters": len(weights),
        "rounds": training.optimizer.rounds,
        "bytes_sent": training.optimizer.bytes_sent,
        "distance": training.optimizer.consensus_distance(),
        "peak_mb": round(peak, 1),
        "loss": loss.item(),
    }


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setup", choices=SETUPS, required=True)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    found = run(options)
    Path(options.out, f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
