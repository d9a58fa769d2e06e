"""DeepSpeed with replicas of two ranks: tests/deepspeed_shards_worker.py under its launcher.

The oracle is the same training with two whole replicas as stacked workers, without DeepSpeed, each
on the batches of its two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consensus_opt import (
    ConsensusOptimizer,
    Method,
    StackedTransport,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.integrations.deepspeed_config import LOCAL_SIZES, replica_size
from tests.launchers import launch_loosely
from tests.problems import mlp
from tests.test_deepspeed import DTYPES, gradient

STEPS = 5
METHODS: dict[str, Method] = {
    "dppf": dppf(alpha=0.2, lam=0.3, period=2),
    "momentum_too": gossip_sgd("ring", period=2, state="average"),
    "control": consensus_control("complete", target=0.1, during=(0.0, 1.0)),
    "mix_first": dsgd_ac("ring", lr_reference=0.2),
}
CHECKS = [
    *("pieces", "piece_methods", "pieces_clip", "pieces_overflow", "pieces_saved"),
    *("pieces_uneven", "pieces_partly_trained", "pieces_beside_others"),
]
KINDS = [f"{s}-{d}" for s in range(4) for d in ("fp32", "bf16")] + ["2-fp16", "3-fp16"]
Reports = list[dict[str, Any]]

engine = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    arguments = [str(tmp_path_factory.mktemp("deepspeed")), *CHECKS]
    job = launch_loosely("deepspeed", 4, "tests.deepspeed_shards_worker", arguments, timeout=300)
    failures = [str((report or {}).get("failed", "")) for report in job.reports]
    assert job.status == 0, "\n".join([*failures, job.output[-4000:]])
    return job.reports


def oracle(
    method: Method, dtype: str = "fp32", clip: float | None = None, parts: int = 1
) -> tuple[list[Tensor], ConsensusOptimizer]:
    """The masters of two replicas after each step; gradients are of the two ranks' batches."""
    model = mlp().to(DTYPES[dtype])
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).float()
    masters = nn.Parameter(start.repeat(2, 1))
    optimizer = ConsensusOptimizer(
        torch.optim.SGD([masters], lr=0.1, momentum=0.9, nesterov=True),
        method,
        transport=StackedTransport(2),
    )
    path = []
    for step in range(STEPS // parts):
        rows = []
        for m in range(2):
            each = [
                gradient(model, masters[m].detach(), rank, parts * step + part, dtype)
                for rank in (2 * m, 2 * m + 1)
                for part in range(parts)
            ]
            mean = torch.stack(each).mean(0)
            rows.append(mean if clip is None else mean * min(1.0, clip / (mean.norm() + 1e-6)))
        masters.grad = torch.stack(rows)
        optimizer.step()
        path += [masters.detach().clone()] * parts
    return path, optimizer


def check(found: list[dict[str, Any]], expected: list[Tensor], rtol: float = 1e-5) -> None:
    for rank, result in enumerate(found):
        for actual, rows in zip(result["path"][-len(expected) :], expected, strict=True):
            torch.testing.assert_close(torch.tensor(actual), rows[rank // 2], rtol=rtol, atol=rtol)
        mean = expected[-1].mean(0)
        torch.testing.assert_close(torch.tensor(result["averaged"]), mean, rtol=rtol, atol=rtol)
        assert result["agree"]
        assert result["restored"]
    assert found[0]["path"] == found[1]["path"]
    assert found[0]["distance"] == found[3]["distance"]


@engine
def test_a_replica_may_run_out_of_data_before_the_other(four: Reports) -> None:
    """Two steps and a mean of both, two steps of the first alone: then all have its weights."""
    found = [rank["pieces_uneven"] for rank in four]
    assert all(
        (r["clock"], r["rounds"], r["agree"]) == (4, 2, True) for f in found for r in f.values()
    )
    for stage in found[0]:
        assert all(rank[stage]["whole"] == found[0][stage]["whole"] for rank in found)
        whole = torch.tensor(found[0][stage]["whole"])
        torch.testing.assert_close(
            whole, torch.tensor(found[0]["0"]["whole"]), rtol=1e-5, atol=1e-6
        )


@engine
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_two_replicas_move_as_whole_ones_do(four: Reports, kind: str) -> None:
    """In half precision DeepSpeed also rounds the mean of a replica's gradients."""
    stage, dtype = kind.split("-")
    found = [rank["pieces"][kind] for rank in four]
    path, optimizer = oracle(local_sgd(2), dtype)
    check(found, path, 1e-5 if dtype == "fp32" else 5e-3)
    for replica in (found[:2], found[2:]):
        held, sent = (sum(rank[key] for rank in replica) for key in ("held", "bytes"))
        # Each of two rounds sends what is held; at stage 0 both ranks hold all and send half.
        assert sent == 2 * 4 * (held if stage != "0" else held // 2)
        assert 83 <= (held if stage != "0" else held // 2) < 83 + 8
    assert 2 * sum(rank["bytes"] for rank in found[:2]) >= optimizer.bytes_sent


@engine
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_methods_see_the_whole_model(four: Reports, name: str, stage: int) -> None:
    found = [rank["piece_methods"][f"{name} {stage}"] for rank in four]
    path, optimizer = oracle(METHODS[name])
    check(found, path)
    assert found[0]["distance"] == pytest.approx(optimizer.consensus_distance(), rel=1e-4, abs=1e-6)


@engine
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_gradients_are_accumulated_and_clipped_in_each_replica(four: Reports, stage: str) -> None:
    path, _ = oracle(local_sgd(2), clip=0.1, parts=2)
    found = [rank["pieces_clip"][stage] for rank in four]
    for rank, result in enumerate(found):
        for step in (1, 3):
            actual = torch.tensor(result["path"][step])
            torch.testing.assert_close(actual, path[step][rank // 2], rtol=1e-5, atol=1e-6)


@engine
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_an_overflow_in_one_replica_leaves_the_rounds_as_they_are(
    four: Reports, stage: str
) -> None:
    found = [rank["pieces_overflow"][stage] for rank in four]
    skipped = [[True, True, False, True]] * 2 + [[True] * 4] * 2
    assert [rank["applied"] for rank in found] == skipped
    assert {(rank["clock"], rank["rounds"], rank["agree"]) for rank in found} == {(4, 4, True)}
    assert all(rank["whole"] == found[0]["whole"] for rank in found)


@engine
@pytest.mark.parametrize("kind", ["0-fp32", "1-fp32", "2-bf16", "3-bf16"])
def test_every_rank_resumes_with_the_same_bits(four: Reports, kind: str) -> None:
    found = [rank["pieces_saved"][kind] for rank in four]
    for rank in found:
        assert (rank["loaded"], rank["clock"], rank["agree"], rank["went on"]) == (
            True,
            3,
            True,
            True,
        )
        assert rank["folders"] == ["replica_0", "replica_1"]
    assert found[0]["saved"] == found[1]["saved"] != found[2]["saved"] == found[3]["saved"]


@engine
def test_partly_trained_models_of_several_groups_start_and_end_equal(four: Reports) -> None:
    for kind in ("1-fp32", "2-bf16", "3-bf16", "3-fp32"):
        found = [rank["pieces_partly_trained"][kind] for rank in four]
        assert all(rank["start"] == found[0]["start"] for rank in found)
        assert all(rank["after"] == found[0]["after"] for rank in found)
        assert found[0]["after"] != found[0]["start"]
        assert found[0]["after"][:42] == found[0]["start"][:42]
        assert max(found[0]["distances"]) < 1e-6


@engine
def test_engines_of_other_replicas_do_not_meet(four: Reports) -> None:
    found = [rank["pieces_beside_others"] for rank in four]
    for m, rank in enumerate(found):
        assert rank["workers"] == [2, 4, 1]
        assert rank["untouched"]
        assert rank["two"] == four[m]["pieces"]["2-fp32"]["path"][-1]
        torch.testing.assert_close(rank["every"], rank["own"], rtol=1e-5, atol=1e-6)
        assert rank["refused"][0] == "ValueError"
        assert "'replica_size' is 3, and there are 4 ranks" in rank["refused"][1]
    assert sorted(i for rank in found for i in rank["seen"]) == list(range(32))


# -------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("stage", "given", "local", "world", "size"),
    [
        (0, None, "4", 8, 1),
        (1, None, "4", 8, 4),
        (3, None, "2", 8, 2),
        (3, None, "8", 8, 1),
        (3, None, None, 8, 1),
        (3, 8, "8", 8, 8),
        (2, 1, "4", 8, 1),
    ],
)
def test_replicas_are_machines_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    given: int | None,
    local: str | None,
    world: int,
    size: int,
) -> None:
    for name in LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_SIZE", local)
    assert replica_size({"zero_optimization": {"stage": stage}}, given, world) == size


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (3, ValueError, "divide their number"),
        (0, ValueError, "at least 1"),
        ("2", TypeError, '"replica_size": 8'),
    ],
)
def test_sizes_that_ranks_cannot_form_are_refused(
    given: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        replica_size({}, given, 8)
