"""Every launcher trains the same model: a few steps of what ``benchmarks.parity`` measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import parity
from tests.problems import same

STEPS = 8  # local_sgd(4) ends with a round
LAUNCHERS = [
    "torchrun",
    pytest.param("mpirun", marks=pytest.mark.mpi),
    pytest.param("horovodrun-gloo", marks=pytest.mark.horovod),
    pytest.param("horovodrun-mpi", marks=[pytest.mark.horovod, pytest.mark.mpi]),
    pytest.param("deepspeed", marks=pytest.mark.deepspeed),
]


@pytest.fixture(scope="module")
def stacked() -> dict[str, parity.Trained]:
    return parity.reference(4, STEPS)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_four_workers_train_and_decide_as_stacked_workers_do(
    kind: str, stacked: dict[str, parity.Trained]
) -> None:
    trained = parity.run(kind, 4, STEPS)
    differences = parity.compare(trained, stacked)
    for name, ended in trained.items():
        assert (len(torch.unique(ended.parameters, dim=0)) == 1) == (name == "local_sgd")
    for name in ("ring gossip", "one-peer gossip", "control"):
        assert torch.equal(trained[name].parameters, stacked[name].parameters)
    for name in ("local_sgd", "dppf"):
        assert differences[name].relative <= 1e-6
    logs, expected = trained["control"].decisions, stacked["control"].decisions
    for log in logs:
        assert same(log, logs[0]), "all ranks, the same bits"
    assert torch.equal(logs[..., :2], expected[..., :2]), "step and exchanges"
    torch.testing.assert_close(logs, expected, rtol=1e-4, atol=1e-9, equal_nan=True)


def test_there_is_something_to_decide(stacked: dict[str, parity.Trained]) -> None:
    exchanges, targets = (
        stacked["control"].decisions[0, :, 1],
        stacked["control"].decisions[0, :, 3],
    )
    assert len(set(exchanges.tolist())) >= 3
    assert targets.isfinite().tolist() == [True] * 6 + [False] * 2


def test_the_benchmark_fails_where_gossip_differs_in_one_bit(
    stacked: dict[str, parity.Trained],
) -> None:
    def verdicts(change: Callable[[Tensor], None]) -> list[bool]:
        nudged = {n: replace(t, parameters=t.parameters.clone()) for n, t in stacked.items()}
        for ended in nudged.values():
            change(ended.parameters)
        return [each.allowed for each in parity.compare(nudged, stacked).values()]

    def one_bit(rows: Tensor) -> None:
        rows[2, 7] = torch.nextafter(rows[2, 7], torch.tensor(9.0))

    assert verdicts(one_bit) == [True, False, False, True, False]
    assert not any(verdicts(lambda rows: rows.mul_(1 + 2e-6)))


def test_the_benchmark_fails_where_a_rank_decides_otherwise(
    stacked: dict[str, parity.Trained],
) -> None:
    for column, change in ((1, 1.0), (2, 1e-3), (3, 1e-3)):
        other = stacked["control"].decisions.clone()
        other[3, 2, column] += change
        assert not parity.decided_alike(
            replace(stacked["control"], decisions=other), stacked["control"]
        )


def test_the_benchmark_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "parity.json"
    arguments = ["--launchers", "torchrun", "--workers", "2", "--steps", "2", "--json", str(file)]
    assert parity.main(arguments) == 0
    found = json.loads(file.read_text())["torchrun"]
    assert found["ring gossip"] == {
        "largest": 0.0,
        "relative": 0.0,
        "same_bits": True,
        "allowed": True,
    }
    assert "from 2 stacked workers" in capsys.readouterr().out
