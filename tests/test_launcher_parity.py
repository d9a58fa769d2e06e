"""Every launcher trains the same model: a few steps of what ``benchmarks.parity`` measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import parity

STEPS = 8  # local_sgd(4) ends with a round
LAUNCHERS = [
    "torchrun",
    pytest.param("mpirun", marks=pytest.mark.mpi),
    pytest.param("horovodrun-gloo", marks=pytest.mark.horovod),
    pytest.param("horovodrun-mpi", marks=[pytest.mark.horovod, pytest.mark.mpi]),
    pytest.param("deepspeed", marks=pytest.mark.deepspeed),
]


@pytest.fixture(scope="module")
def stacked() -> dict[str, Tensor]:
    return parity.reference(4, STEPS)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_four_workers_train_as_stacked_workers_do(kind: str, stacked: dict[str, Tensor]) -> None:
    trained = parity.run(kind, 4, STEPS)
    differences = parity.compare(trained, stacked)
    for name, rows in trained.items():
        assert (len(torch.unique(rows, dim=0)) == 1) == (name == "local_sgd")
    for name in ("ring gossip", "one-peer gossip"):
        assert torch.equal(trained[name], stacked[name])
    for name in ("local_sgd", "dppf"):
        assert differences[name].relative <= 1e-6


def test_the_benchmark_fails_where_gossip_differs_in_one_bit(stacked: dict[str, Tensor]) -> None:
    nudged = {name: rows.clone() for name, rows in stacked.items()}
    for rows in nudged.values():
        rows[2, 7] = torch.nextafter(rows[2, 7], torch.tensor(9.0))
    differences = parity.compare(nudged, stacked)
    assert [each.allowed for each in differences.values()] == [True, False, False, True]
    for rows in nudged.values():
        rows *= 1 + 2e-6
    assert not any(each.allowed for each in parity.compare(nudged, stacked).values())


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
