"""DeepSpeed's engines as workers: tests/deepspeed_worker.py under its launcher, 4, 2 and 1 ranks.

The oracle is the same training without DeepSpeed: stacked workers, torch's optimizers, formulas.
Tests named r143 and so on are rows of the case table.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    RoundRecord,
    StackedTransport,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from consensus_opt.integrations import deepspeed_config as configuration
from consensus_opt.integrations.deepspeed import initialize
from tests.harness import run_ranks
from tests.launchers import launch_loosely
from tests.problems import batch, mlp

STEPS = 6
NUMEL = 83
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ENGINES = [f"{stage}-{dtype}" for stage in range(4) for dtype in DTYPES]
RESUMED = ["0-fp32", "0-bf16", "1-bf16", "2-fp16", "3-fp32", "3-bf16"]
METHODS: dict[str, tuple[dict[str, Any], Method, bool]] = {
    "ring": ({"method": "gossip_sgd", "topology": "ring"}, gossip_sgd("ring"), True),
    "one_peer": (
        {"method": "gossip_sgd", "topology": "one_peer_exponential", "period": 2, "exchanges": 2},
        gossip_sgd("one_peer_exponential", period=2, exchanges=2),
        True,
    ),
    "dppf": (
        {"method": "dppf", "alpha": 0.2, "lam": 0.3, "period": 2, "schedule": "linear"},
        dppf(alpha=0.2, lam=0.3, period=2, schedule="linear"),
        False,
    ),
    "post_local": ({"method": "post_local", "until": 3, "period": 2}, post_local(3, 2), False),
    "control": (
        {"method": "consensus_control", "topology": "ring", "target": 0.01, "during": [0.0, 0.8]},
        consensus_control("ring", target=0.01, during=(0.0, 0.8)),
        False,
    ),
    "momentum_too": (
        {"method": "gossip_sgd", "topology": "ring", "state": "average"},
        gossip_sgd("ring", state="average"),
        True,
    ),
    "mix_first": (
        {"method": "dsgd_ac", "topology": "ring", "lr_reference": 0.2, "power": 1.0},
        dsgd_ac("ring", lr_reference=0.2, power=1.0),
        True,
    ),
}
AT_FOUR = [
    *("trajectories", "accumulates_bf16_in_fp32", "methods", "quadratic_sync", "r143", "r144"),
    *("r146", "saves", "r148", "plain_checkpoint", "r150", "r151", "r154", "r155"),
    *("ways_to_an_optimizer", "clips", "shares_data", "partly_trained", "two_engines"),
    *("inside_averaged", "other_models", "gradient_targets", "no_norm"),
]
Reports = list[dict[str, Any]]

engine = pytest.mark.deepspeed


def launch(folder: Path, n: int, checks: list[str]) -> Reports:
    job = launch_loosely(
        "deepspeed", n, "tests.deepspeed_worker", [str(folder), *checks], timeout=240
    )
    silent = [rank for rank, report in enumerate(job.reports) if report is None]
    assert not silent, f"ranks {silent} reported nothing:\n{job.output[-4000:]}"
    failures = [report["failed"] for report in job.reports if "failed" in report]
    assert job.status == 0, "\n".join([*failures, job.output[-4000:]])
    return job.reports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepspeed")
    blocks = {name: block for name, (block, _, _) in METHODS.items()}
    (made / "methods.json").write_text(json.dumps(blocks))
    return made


@pytest.fixture(scope="module")
def four(folder: Path) -> Reports:
    return launch(folder, 4, AT_FOUR)


@pytest.fixture(scope="module")
def two(folder: Path, four: Reports) -> Reports:
    return launch(folder, 2, ["loads", "clips"])


@pytest.fixture(scope="module")
def one(folder: Path, four: Reports) -> Reports:
    return launch(folder, 1, ["loads", "alone"])


# -------------------------------------------------------------------------- the oracle


def stacked(
    n: int,
    method: Method,
    dtype: str = "fp32",
    steps: int = STEPS,
    *,
    total: int | None = STEPS,
    clip: float | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    telemetry: Any = None,
) -> list[Tensor]:
    """The masters of n workers after each step, without DeepSpeed."""
    model = mlp().to(DTYPES[dtype])
    rows = torch.cat([p.detach().flatten() for p in model.parameters()]).float().repeat(n, 1)
    masters = nn.Parameter(rows)
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([masters], lr=0.1, momentum=0.9, nesterov=True),
        method,
        transport=StackedTransport(n),
        total_steps=total,
        telemetry=telemetry,
    )
    scheduler = schedule(optimizer) if schedule is not None else None
    path = []
    for step in range(steps):
        gradients = [gradient(model, masters[m].detach(), m, step, dtype) for m in range(n)]
        if clip is not None:
            gradients = [g * min(1.0, clip / (g.norm().item() + 1e-6)) for g in gradients]
        masters.grad = torch.stack(gradients)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        path.append(masters.detach().clone())
    return path


def gradient(model: nn.Module, master: Tensor, rank: int, step: int, dtype: str) -> Tensor:
    """The gradient that one worker finds at its rounded master, through a scaled loss in fp16."""
    scale = 128.0 if dtype == "fp16" else 1.0
    pieces = master.to(DTYPES[dtype]).split([p.numel() for p in model.parameters()])
    weights = {
        name: piece.view(p.shape).requires_grad_()
        for (name, p), piece in zip(model.named_parameters(), pieces, strict=True)
    }
    x, y = batch(rank, step)
    output = functional_call(model, weights, (x.to(DTYPES[dtype]),))
    loss = nn.functional.cross_entropy(output.float(), y) * scale
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return torch.cat([g.flatten().float() / scale for g in gradients])


def torch_distributed(rank: int) -> Tensor:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    optimizer = ConsensusOptimizer(inner, gossip_sgd("ring"), timeout=30)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rows(reports: Reports, *keys: Any) -> Tensor:
    """What each rank reported under these keys, one row a rank."""
    found = []
    for value in reports:
        for key in keys:
            value = value[key]
        found.append(torch.tensor(value))
    return torch.stack(found)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------- trajectories


@engine
def test_stage_0_takes_the_path_of_torch_distributed(four: Reports) -> None:
    expected = torch.stack(run_ranks(4, torch_distributed))
    assert torch.equal(rows(four, "trajectories", "0-fp32", "path", -1), expected)


@engine
@pytest.mark.parametrize("name", ENGINES)
def test_each_stage_and_dtype_takes_the_path_of_stacked_workers(four: Reports, name: str) -> None:
    for step, expected in enumerate(stacked(4, gossip_sgd("ring"), name.split("-")[1])):
        assert torch.equal(rows(four, "trajectories", name, "path", step), expected)
    assert all(all(report["trajectories"][name]["agree"]) for report in four)


@engine
@pytest.mark.parametrize("name", ENGINES)
def test_averaged_is_the_mean_model_for_the_engine_and_restores_every_bit(
    four: Reports, name: str
) -> None:
    own = rows(four, "trajectories", name, "path", -1)
    mean = own.double().mean(0).float().expand(4, -1)
    close(rows(four, "trajectories", name, "averaged"), mean)
    distance = (own - mean).square().sum(1).mean().sqrt()
    for report in four:
        found = report["trajectories"][name]
        assert found["averaged_agree"]
        assert found["averaged_changes_outputs"]
        assert found["restored"]
        assert found["same_outputs"]
        assert found["distance"] == pytest.approx(distance.item(), rel=1e-4)


@engine
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["0-fp32", "2-bf16", "3-bf16"])
def test_the_block_names_any_recipe(four: Reports, name: str, kind: str) -> None:
    _, method, same_bits = METHODS[name]
    expected, found = stacked(4, method, kind[2:])[-1], rows(four, "methods", f"{name} {kind}")
    if same_bits:
        assert torch.equal(found, expected)
    close(found, expected)


@engine
def test_periods_follow_the_schedulers_learning_rate_and_rounds_are_recorded(
    four: Reports,
) -> None:
    steps: list[int] = []
    method = quadratic_sync(0.1, min_period=1)

    def schedule(optimizer: Any) -> Any:
        optimizer._rounds._sinks = (lambda record: steps.append(record.step),)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    expected = stacked(4, method, steps=12, total=None, schedule=schedule)[-1]
    assert four[0]["quadratic_sync"]["steps"] == steps
    close(rows(four, "quadratic_sync", "weights"), expected)


@engine
@pytest.mark.parametrize("kind", [*RESUMED, "0-fp16"])
def test_the_gradient_target_follows_the_norms_before_clipping(four: Reports, kind: str) -> None:
    records: list[RoundRecord] = []
    stacked(4, consensus_control("ring", during=(0.0, 1.0)), kind[2:], telemetry=records.append)
    expected = [record.target for record in records]
    tolerance = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.005}[kind[2:]]
    for report in four:
        found = report["gradient_targets"]
        assert found[kind] == pytest.approx(expected, rel=tolerance)
        if kind == "0-fp32":
            assert found["clipped"] == pytest.approx([expected[0]] * 2, rel=tolerance)


@engine
def test_a_gradient_target_without_the_norm_is_refused(four: Reports) -> None:
    for report in four:
        assert "compute_grad_norm' is false" in report["no_norm"]
        assert "write true, or a number as the target" in report["no_norm"]


@engine
@pytest.mark.parametrize("n", [2, 4])
def test_each_worker_clips_by_its_own_gradients(four: Reports, two: Reports, n: int) -> None:
    expected = stacked(n, gossip_sgd("ring"), clip=0.1)[-1]
    for stage in range(3):
        close(rows(four if n == 4 else two, "clips", stage), expected)


@engine
def test_two_engines_and_one_of_deepspeeds_own_live_in_one_process(four: Reports) -> None:
    alone = rows(four, "two_engines", "alone", 0), rows(four, "two_engines", "alone", 1)
    assert torch.equal(rows(four, "two_engines", "one"), alone[0])
    assert torch.equal(rows(four, "two_engines", "two"), alone[1])
    third = rows(four, "two_engines", "third")
    assert torch.equal(third, third[:1].expand_as(third))
    assert not torch.equal(third, alone[0])
    for report in four:
        assert report["two_engines"]["untouched"]
        kind, text = report["two_engines"]["no consensus"]
        assert kind == "TypeError"
        assert "initialize" in text


@engine
def test_a_world_of_one_is_the_engine_alone(one: Reports) -> None:
    for found in one[0]["alone"].values():
        assert found["ours"] == found["plain"]
        assert (found["clock"], found["kind"]) == (STEPS, True)


@engine
def test_frozen_weights_buffers_and_groups_start_as_rank_0_has_them(four: Reports) -> None:
    for name in four[0]["partly_trained"]:
        start = rows(four, "partly_trained", name, "start")
        assert torch.equal(start, start[:1].expand_as(start))
        after = rows(four, "partly_trained", name, "after")
        assert torch.equal(after, after[:1].expand_as(after))
        assert not torch.equal(after, start)
        frozen = rows(four, "partly_trained", name, "frozen")
        assert torch.equal(rows(four, "partly_trained", name, "frozen after"), frozen)
        for report in four:
            assert report["partly_trained"][name]["deepspeed sees"]
            assert report["partly_trained"][name]["buffer"] == [1.0] * 6


@engine
def test_training_data_are_shared_out(four: Reports) -> None:
    seen = [report["shares_data"]["seen"] for report in four]
    assert sorted(i for part in seen for i in part) == list(range(32))
    assert [report["shares_data"]["evaluated"][:2] for report in four] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert all(report["shares_data"]["batch"] == [4, 4] for report in four)


@engine
def test_optimizer_scheduler_and_configuration_may_come_in_any_of_deepspeeds_ways(
    four: Reports,
) -> None:
    by_name, by_callable, by_file = (
        rows(four, "ways_to_an_optimizer", "weights", i) for i in range(3)
    )
    assert torch.equal(by_name, by_callable)
    assert torch.equal(by_name, by_file)
    assert all(report["ways_to_an_optimizer"]["kept"] for report in four)
    assert all(report["ways_to_an_optimizer"]["returned"] for report in four)


@engine
def test_a_step_inside_averaged_is_refused(four: Reports) -> None:
    assert [report["inside_averaged"]["refused"][0] for report in four] == ["RuntimeError"] * 4


@engine
def test_ranks_with_other_models_all_hear_of_it(four: Reports) -> None:
    for report in four:
        kind, text = report["other_models"]["refused"]
        assert kind == "RankMismatchError"
        assert "[1]" in text


# -------------------------------------------------------------------------- case table


@engine
def test_R143_stage_3_moves_its_own_pieces_and_needs_no_gathered_weights(four: Reports) -> None:
    own = stacked(4, gossip_sgd("ring"), "bf16", 2)[-1]
    close(rows(four, "r143", "masters"), own.mean(0).expand(4, -1))
    for report in four:
        assert report["r143"]["outside"] == [0, 0, 0, 0]
        assert report["r143"]["agree"]


@engine
def test_R144_zero_takes_torchs_optimizers_and_asks_about_others(four: Reports) -> None:
    expected = stacked(4, gossip_sgd("ring"), steps=2)[-1]
    assert torch.equal(rows(four, "r144", "torch's own"), expected)
    for report in four:
        for case in ("told not to", "unknown"):
            assert "zero_allow_untested_optimizer" in report["r144"][case][1]


@engine
def test_R146_a_scheduler_of_another_optimizer_is_refused_with_advice(four: Reports) -> None:
    for report in four:
        kind, text = report["r146"]["refused"]
        assert kind == "ValueError"
        assert "lr_scheduler=lambda optimizer" in text
        assert report["r146"]["lr"] == pytest.approx([0.025])
        assert report["r146"]["same"]


@engine
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(four: Reports, name: str) -> None:
    for rank, report in enumerate(four):
        found = report["saves"][name]
        assert found["loaded"] == found["saved"]
        assert found["resumed"] == found["went on"]
        assert found["agree"]
        assert found["clock"] == 3
        assert found["exchanges"][0] == found["exchanges"][1] == 3
        assert found["path"].startswith(f"{name}/replica_{rank}/global_step3/")


@engine
@pytest.mark.parametrize("name", RESUMED)
def test_R147_saved_at_4_loads_at_2_and_at_1(
    four: Reports, two: Reports, one: Reports, name: str
) -> None:
    for reports in (two, one):
        for rank, report in enumerate(reports):
            found = report["loads"][name]
            assert found["loaded"] == four[rank]["saves"][name]["saved"]
            assert (found["clock"], found["later"], found["finite"]) == (3, 5, True)


@engine
def test_R148_client_state_and_the_state_of_consensus_do_not_meet(four: Reports) -> None:
    for report in four:
        for name in RESUMED:
            assert report["saves"][name]["client"] == {"epoch": 7, "best": [0.5]}
            assert not report["saves"][name]["other keys"]
        kind, text = report["r148"]["refused"]
        assert kind == "ValueError"
        assert "'consensus'" in text


@engine
def test_a_checkpoint_without_consensus_starts_all_workers_alike(four: Reports) -> None:
    for report in four:
        found = report["plain_checkpoint"]
        assert found["module only"] == found["all"] == found["plain"]
        assert (found["clock"], found["dp"]) == (0, 4)


@engine
def test_R150_only_the_end_of_an_accumulation_counts(four: Reports) -> None:
    boundaries = [[0, False]] * 3 + [[1, True]] + [[1, False]] * 3 + [[2, True]]
    own = rows(four, "r150", "weights")
    assert torch.equal(own, own[:1].expand_as(own))
    for report in four:
        assert report["r150"]["seen"] == boundaries
        assert report["r150"]["mixed"] == boundaries
        assert report["r150"]["own clock"] == [2, 2]
        assert report["r150"]["own"] == report["r150"]["weights"]


@engine
def test_R151_the_launcher_without_a_gpu_gives_gloo(four: Reports) -> None:
    for report in four:
        assert report["r151"] == {
            "backend": "gloo",
            "device": "cpu",
            "world": 4,
            "transport": "TorchTransport",
            "workers": 4,
        }


@engine
def test_R152_bf16_at_stage_1_with_a_client_optimizer(four: Reports) -> None:
    expected = stacked(4, gossip_sgd("ring"), "bf16")[-1]
    assert torch.equal(rows(four, "trajectories", "1-bf16", "path", -1), expected)
    assert torch.equal(rows(four, "accumulates_bf16_in_fp32", "path", -1), expected)
    for report in four:
        found = report["accumulates_bf16_in_fp32"]
        assert found["optimizer"] == "BF16_Optimizer"
        assert all(found["agree"])
        assert found["averaged_agree"]
        assert found["restored"]


@engine
@pytest.mark.parametrize("stage", range(4))
def test_R154_an_overflow_on_one_rank_skips_its_step_and_not_the_round(
    four: Reports, stage: int
) -> None:
    model = mlp().half()
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).float()
    masters = [nn.Parameter(start.clone()) for _ in range(4)]
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True) for p in masters]
    for step in range(5):
        for rank, (master, optimizer) in enumerate(zip(masters, optimizers, strict=True)):
            master.grad = gradient(model, master.detach(), rank, step, "fp16")
            if (rank, step) != (1, 2):
                optimizer.step()
        mean = torch.stack([p.detach() for p in masters]).mean(0)
        for master in masters:
            master.data.copy_(mean)
    torch.testing.assert_close(
        rows(four, "r154", str(stage), "masters"), mean.expand(4, -1), rtol=1e-3, atol=1e-4
    )
    for rank, report in enumerate(four):
        found = report["r154"][str(stage)]
        assert found["applied"] == [(rank, step) != (1, 2) for step in range(5)]
        assert found["skipped"] == (rank == 1)
        assert (found["clock"], found["rounds"], found["agree"]) == (5, 5, True)


@engine
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_R155_the_masters_are_averaged_and_the_next_step_keeps_it(
    four: Reports, dtype: str
) -> None:
    path = stacked(4, local_sgd(2), dtype)
    for step in range(4):
        close(rows(four, "r155", dtype, step, 0), path[step])
        assert all(report["r155"][dtype][step][1] for report in four)
    for step in (1, 3):
        own = rows(four, "r155", dtype, step, 0)
        assert torch.equal(own, own[:1].expand_as(own))


# -------------------------------------------------------------------------- configuration


@engine
def test_the_signature_is_deepspeeds() -> None:
    import deepspeed

    ours, theirs = (inspect.signature(f).parameters for f in (initialize, deepspeed.initialize))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_the_block_takes_the_arguments_of_each_recipe() -> None:
    block = {"method": "dppf", "alpha": 0.2, "lam": 0.3, "topology": "ring", "timeout": 9}
    method, options = configuration.consensus({"consensus": block})
    assert method == dppf(alpha=0.2, lam=0.3, topology="ring")
    assert options == {"timeout": 9}
    assert {"local_sgd", "gossip_sgd", "dppf", "post_local", "quadratic_sync"} <= set(
        configuration.RECIPES
    )


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (None, "deepspeed.initialize()"),
        ({}, "local_sgd"),
        ({"method": "adam"}, "gossip_sgd"),
        ({"method": "local_sgd"}, "lacks 'period'; it takes method, period"),
        ({"method": "local_sgd", "period": 4, "alpha": 1}, "unknown key 'alpha'; it takes method"),
        (
            {"method": "gossip_sgd", "topology": "ring", "state": "quasi_global"},
            '"state": "average"',
        ),
        ({"method": "local_sgd", "period": 0}, "period"),
    ],
)
def test_a_wrong_block_is_told_what_is_known(block: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        configuration.consensus({"consensus": block})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "master weights"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "master weights"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "several ranks"),
        ({"tensor_parallel": {"autotp_size": 2}}, "several ranks"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, "several ranks"),
        ({"hybrid_engine": {"enabled": True}}, "engine.step()"),
        ({"compile": {"deepcompile": True}}, "engine.step()"),
        ({"elasticity": {"enabled": True}}, "leave it out"),
        ({"curriculum_learning": {"enabled": True}}, "sampler"),
        ({"optimizer": {"type": "OneBitAdam"}}, "AdamW"),
        ({"train_batch_size": 6}, "a multiple of 4"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        configuration.engine_config(more, 4, None)
    assert next(iter(more)) in str(caught.value)


def test_the_engine_sees_a_configuration_without_the_block() -> None:
    given = {
        "consensus": {"method": "dppf"},
        "train_batch_size": 32,
        "zero_optimization": {"stage": 1, "offload_param": {"device": "none"}},
        "tensor_parallel": {"autotp_size": 1},
        "elasticity": {"enabled": False},
        "optimizer": {"type": "SGD"},
    }
    kept = dict(given)
    engine_sees = configuration.engine_config(given, 4, None)
    assert given == kept
    assert "consensus" not in engine_sees
    assert engine_sees["train_batch_size"] == 8
    assert engine_sees["zero_allow_untested_optimizer"]
    assert "zero_allow_untested_optimizer" not in configuration.engine_config(given, 4, object())


class PipelineModule(nn.Module):
    """Stands where DeepSpeed's own would, which only exists inside a process group."""


def zero_init() -> nn.Module:
    model = mlp()
    next(model.parameters()).ds_id = 0  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "mpu", "said"),
    [
        (None, None, "model=model"),
        (mlp(), object(), "mpu"),
        (PipelineModule(), None, "PipelineModule"),
        (zero_init(), None, "zero.Init()"),
    ],
)
def test_models_on_several_ranks_are_refused(model: Any, mpu: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        configuration.check_model(model, mpu, None)


def test_a_lacking_or_wrapped_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no optimizer"):
        configuration.check_optimizer(None, None, {})
    wrapped = ConsensusOptimizer(
        torch.optim.SGD([nn.Parameter(torch.zeros(1, 2))]),
        local_sgd(1),
        transport=StackedTransport(1),
    )
    with pytest.raises(ValueError, match=r"optimizer=optimizer\.inner"):
        configuration.check_optimizer(wrapped, None, {})


def test_without_deepspeed_only_its_use_fails_and_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from consensus_opt.integrations.deepspeed import initialize\n"
        "initialize(config={})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "pip install --no-build-isolation 'consensus-opt[deepspeed]'" in done.stderr
