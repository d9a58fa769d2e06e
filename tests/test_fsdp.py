"""fully_shard inside replicas and consensus between them: 4 ranks are 2 replicas of 2 pieces.

The oracle is the same training with two whole replicas, each on the batches of its two ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from consensus_opt import (
    ConsensusOptimizer,
    GradientNorm,
    Method,
    RoundRecord,
    StackedTransport,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.integrations import fsdp
from tests.harness import run_ranks
from tests.problems import batch, same

STEPS = 5
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(2),
    "gossip": gossip_sgd("ring"),
    "dppf": dppf(alpha=0.2, lam=0.3, period=2),
    "state_too": gossip_sgd("ring", period=2, state="average"),
    "mix_first": dsgd_ac("ring", lr_reference=0.2),
    "phi": consensus_control("complete", target=GradientNorm(0.25), during=(0.0, 1.0), most=1),
}
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


class Net(nn.Module):
    """Two layers with one weight, a frozen bias, a layer of one row, and a buffer."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.again = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.again.weight = self.middle.weight
        self.middle.bias.requires_grad_(False)
        self.one, self.last = nn.Linear(7, 1), nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros(2))
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        inside = functools.partial(checkpoint, self._inside, use_reentrant=False)
        x = inside(x) if self._checkpointed else self._inside(x)
        return self.last(x) + self.one(x)

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(torch.tanh(self.middle(x))))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with options of their own; the frozen bias is in one of them."""
    named = dict(model.named_parameters())
    small = [p for name, p in named.items() if "bias" in name]
    return [
        {"params": [p for name, p in named.items() if "bias" not in name]},
        {"params": small, "lr": 0.02, "weight_decay": 0.1},
    ]


def loss(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x).float(), y)


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def sharded(mesh: DeviceMesh, half: bool = False, **options: Any) -> Net:
    model = Net(**options)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters of this replica, by name; a collective call among its ranks."""
    fsdp_model: Any = model
    for module in (fsdp_model.first, fsdp_model.last, fsdp_model):
        module.reshard()
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    optimizer: ConsensusOptimizer,
    rank: int,
    steps: Sequence[int],
    parts: int = 1,
    clip: float | None = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            (loss(model, rank, parts * step + part) / parts).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def trajectory(
    rank: int, mesh: DeviceMesh, kind: str, method: Method, half: bool = False, **options: Any
) -> dict[str, Any]:
    model = sharded(mesh, half, checkpointed=options.pop("checkpointed", False))
    inner = OPTIMIZERS[kind](groups_of(model))
    records: list[RoundRecord] = []
    optimizer = fsdp.consensus(
        model, inner, method, mesh, timeout=20, total_steps=STEPS, telemetry=records.append
    )
    train(model, optimizer, rank, range(STEPS), **options)
    own, outputs = whole(model), loss(model, 0, 9).item()
    with optimizer.averaged():
        mean, mean_outputs = whole(model), loss(model, 0, 9).item()
        inside = loss(model, 0, 9).item()
    return {
        "own": own,
        "mean": mean,
        "outputs": [outputs, mean_outputs, inside],
        "restored": same(whole(model), own) and loss(model, 0, 9).item() == outputs,
        "distance": optimizer.consensus_distance(),
        "distances": optimizer.consensus_distances(),
        "targets": [r.target for r in records if r.target is not None],
        "bytes": optimizer.bytes_sent,
    }


class Oracle:
    """Two whole replicas as stacked workers."""

    def __init__(self, kind: str, method: Method, half: bool = False) -> None:
        self.model, self._half = Net(), half
        for p in self.model.parameters():
            p.data = torch.stack([p.data, p.data])
        self.records: list[RoundRecord] = []
        self.optimizer = ConsensusOptimizer(
            OPTIMIZERS[kind](groups_of(self.model)),
            method,
            transport=StackedTransport(2),
            total_steps=STEPS,
            telemetry=self.records.append,
        )

    def of(self, replica: int) -> dict[str, Tensor]:
        return {name: p[replica] for name, p in self.model.named_parameters()}

    def gradients(self, replica: int, step: int, parts: int) -> list[Tensor]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        losses = [
            loss(self._call(replica), rank, parts * step + part)
            for rank in (2 * replica, 2 * replica + 1)
            for part in range(parts)
        ]
        mean = torch.stack(losses).mean()
        return [g[replica] for g in torch.autograd.grad(mean, trained)]

    def _call(self, replica: int) -> Callable[[Tensor], Tensor]:
        weights = self.of(replica)
        if not self._half:
            return lambda x: functional_call(self.model, weights, (x,))
        low = {name: w.bfloat16() for name, w in weights.items()}
        return lambda x: functional_call(self.model, low, (x.bfloat16(),))

    def train(self, parts: int = 1, clip: float | None = None) -> Oracle:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for step in range(STEPS):
            each = [self.gradients(replica, step, parts) for replica in range(2)]
            if clip is not None:
                for gradients in each:
                    norm = torch.stack([g.norm() for g in gradients]).norm()
                    for g in gradients:
                        g.mul_(min(1.0, clip / (norm.item() + 1e-6)))
            for parameter, pair in zip(trained, zip(*each, strict=True), strict=True):
                parameter.grad = torch.stack(pair)
            self.optimizer.step()
        return self


def check(found: list[dict[str, Any]], oracle: Oracle, rtol: float = 1e-5) -> None:
    for rank, result in enumerate(found):
        for name, value in oracle.of(rank // 2).items():
            torch.testing.assert_close(result["own"][name], value, rtol=rtol, atol=rtol / 10)
            mean = oracle.model.get_parameter(name).detach().mean(0)
            torch.testing.assert_close(result["mean"][name], mean, rtol=rtol, atol=rtol / 10)
        assert result["restored"]
        own, mean, again = result["outputs"]
        assert (own == again, mean == again) == (result["distance"] < 1e-6, True)
        expected = oracle.optimizer.consensus_distance()
        assert result["distance"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    names = {name for name, p in Net().named_parameters() if p.requires_grad}
    assert set(found[0]["distances"]) == names


def trajectories(rank: int) -> dict[str, Any]:
    mesh = mesh_of_four()
    found = {
        f"{kind} {name}": trajectory(rank, mesh, kind, method)
        for name, method in METHODS.items()
        for kind in OPTIMIZERS
    }
    found["accumulates and clips"] = trajectory(
        rank, mesh, "sgd", METHODS["gossip"], parts=2, clip=0.3, checkpointed=True
    )
    found["bf16"] = trajectory(rank, mesh, "sgd", METHODS["dppf"], half=True)
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, trajectories, timeout=120)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_R058_pieces_move_as_whole_replicas_do(
    four: list[dict[str, Any]], name: str, kind: str
) -> None:
    oracle = Oracle(kind, METHODS[name]).train()
    check([rank[f"{kind} {name}"] for rank in four], oracle)
    for replica in (four[:2], four[2:]):
        sent = sum(rank[f"{kind} {name}"]["bytes"] for rank in replica)
        # A sketch of 514 numbers goes to the other piece and to the other replica, from each rank.
        sketches = 3 * 514 * 8 * STEPS if name == "phi" else 0
        assert sent - sketches == oracle.optimizer.bytes_sent / 2
    targets = [record.target for record in oracle.records if record.target is not None]
    assert len(targets) == (STEPS if name == "phi" else 0)
    for rank in four:
        assert rank[f"{kind} {name}"]["targets"] == pytest.approx(targets, rel=1e-5)


def test_gradients_are_accumulated_recomputed_and_clipped_in_each_replica(
    four: list[dict[str, Any]],
) -> None:
    oracle = Oracle("sgd", METHODS["gossip"]).train(parts=2, clip=0.3)
    check([rank["accumulates and clips"] for rank in four], oracle)


def test_mixed_precision_moves_the_fp32_pieces(four: list[dict[str, Any]]) -> None:
    check([r["bf16"] for r in four], Oracle("sgd", METHODS["dppf"], half=True).train(), rtol=2e-2)


def uneven(rank: int) -> tuple[dict[str, Tensor], float, int]:
    """The second replica has two batches, the first one four."""
    mesh = mesh_of_four()
    model = sharded(mesh)
    optimizer = fsdp.consensus(
        model, OPTIMIZERS["sgd"](groups_of(model)), local_sgd(2), mesh, timeout=20
    )
    with optimizer.join():
        train(model, optimizer, rank, range(4 - rank // 2 * 2))
    return whole(model), loss(model, 0, 9).item(), optimizer.clock


def test_a_replica_may_run_out_of_data_before_the_other() -> None:
    found = run_ranks(4, uneven, timeout=120)
    for parameters, after, clock in found:
        assert same(parameters, found[0][0])
        assert (after, clock) == (found[0][1], 4)


# -------------------------------------------------------------------------- checkpoints


def resumed(rank: int, folder: Path) -> dict[str, Any]:
    mesh = mesh_of_four()
    method = gossip_sgd("one_peer_exponential", period=2)

    def make() -> tuple[nn.Module, fsdp.FSDPOptimizer]:
        model = sharded(mesh)
        inner = OPTIMIZERS["adamw"](groups_of(model))
        return model, fsdp.consensus(model, inner, method, mesh, timeout=20)

    model, optimizer = make()
    train(model, optimizer, rank, range(3))
    fsdp.save(folder, model, optimizer)
    saved = whole(model)
    train(model, optimizer, rank, range(3, 7))
    other, again = make()
    fsdp.load(folder, other, again)
    loaded, clock = whole(other), again.clock
    train(other, again, rank, range(3, 7))
    with pytest.raises(FileNotFoundError, match=r"fsdp\.save"):
        fsdp.load(folder / "elsewhere", other, again)
    return {
        "loaded": same(loaded, saved),
        "clock": clock,
        "went on": same(whole(other), whole(model)),
        "rounds": [optimizer.rounds, again.rounds],
        "saved": saved,
    }


def test_training_resumes_with_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(4, resumed, tmp_path)
    for outcome in outcomes:
        assert outcome["loaded"]
        assert outcome["went on"]
        assert (outcome["clock"], outcome["rounds"]) == (3, [3, 3])
    assert not same(outcomes[0]["saved"], outcomes[2]["saved"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica_0", "replica_1"]
    one = run_ranks(2, loads_elsewhere, tmp_path)
    assert same(one[0], outcomes[0]["saved"])


def loads_elsewhere(rank: int, folder: Path) -> dict[str, Tensor]:
    """A replica on one rank takes what two ranks saved, and does so at the same step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = sharded(mesh)
    inner = OPTIMIZERS["adamw"](groups_of(model))
    optimizer = fsdp.consensus(model, inner, local_sgd(2), mesh, timeout=20)
    fsdp.load(folder, model, optimizer)
    found = whole(model)
    train(model, optimizer, rank, range(3, 5))
    assert optimizer.clock == 5
    return found


# -------------------------------------------------------------------------- refusals


def refused(rank: int) -> list[str]:
    mesh = mesh_of_four()

    def attempt(model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> str:
        with pytest.raises((ValueError, TypeError)) as raised:
            call(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(raised.value)

    across_all = Net()
    fully_shard(across_all, mesh=mesh)
    over_all_ranks = Net()
    fully_shard(over_all_ranks, mesh=init_device_mesh("cpu", (4,)))

    def wrap(model: nn.Module, inner: Any, **names: str) -> Any:
        return fsdp.consensus(model, inner, local_sgd(1), mesh, timeout=20, **names)

    return [
        attempt(across_all, wrap),
        attempt(over_all_ranks, wrap),
        attempt(Net(), wrap),
        attempt(sharded(mesh), functools.partial(wrap, replicate="node")),
        attempt(sharded(mesh), lambda m, o: ConsensusOptimizer(o, local_sgd(1), timeout=20)),
    ]


def test_R058_what_is_not_sharded_inside_a_replica_alone_is_refused() -> None:
    parts = [
        "lies on the ranks [0, 1, 2, 3] | mesh=mesh['shard']",
        "lies on the ranks [0, 1, 2, 3] | mesh=mesh['shard']",
        "is not sharded | mesh=mesh['shard']",
        "needs 'node' and 'shard' | replicate=",
        "a DTensor on 2 ranks | fsdp.consensus(",
    ]
    for texts in run_ranks(4, refused):
        for text, wanted in zip(texts, parts, strict=True):
            assert all(part in text for part in wanted.split(" | ")), text
    assert not dist.is_initialized()
