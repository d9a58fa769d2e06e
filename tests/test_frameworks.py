"""Hugging Face Trainer, Accelerate and Lightning: a tiny ViT trained with each on two real ranks.

All checks run in one job (frameworks_worker.py), because the frameworks take seconds to import.
The oracle is what the workers held after each step: checkpoints and evaluations are of their mean,
and a resumed run holds the same bits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import launchers
from consensus_opt import StackedTransport, local_sgd
from consensus_opt.integrations import workers
from tests.launchers import launch
from tests.problems import mlp, same

CHECKS = (
    "trainer",
    "accelerate",
    "scaler_under_accelerate",
    "wrappers_around_wrappers",
    "lightning",
)
STEPS, HALF, PERIOD = 8, 4, 3

Results = dict[str, list[Any]]
"""What each rank saw, by check."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = str(tmp_path_factory.mktemp("frameworks"))
    reports = launch("torchrun", 2, "tests.frameworks_worker", [folder, *CHECKS], timeout=280)
    return {name: [r[name] for r in reports] for name in CHECKS}


def results(two: Results, name: str) -> list[Any]:
    failed = [f"rank {m}: {text}" for m, (passed, text) in enumerate(two[name]) if not passed]
    assert not failed, "\n".join(failed)
    return [value for _, value in two[name]]


def mean_after(ranks: list[Any], step: int) -> Tensor:
    return torch.stack([rank["whole"]["steps"][step] for rank in ranks]).mean(0)


def distance_after(ranks: list[Any], step: int) -> float:
    first, second = (rank["whole"]["steps"][step] for rank in ranks)
    return float((first - second).norm())


FRAMEWORKS = ["trainer", "accelerate", "lightning"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_workers_take_local_steps_and_are_equal_at_the_end(two: Results, name: str) -> None:
    ranks = results(two, name)
    assert all(distance_after(ranks, step) > 0.01 for step in (2, 4, 5, 7, 8))
    assert same(ranks[0]["whole"]["end"], ranks[1]["whole"]["end"])
    torch.testing.assert_close(ranks[0]["whole"]["end"], mean_after(ranks, STEPS))
    assert [rank["whole"]["wrapped"] for rank in ranks] == [
        "Module" if name == "lightning" else "ViTForImageClassification"
    ] * 2


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_run_resumed_from_a_checkpoint_between_rounds_has_the_same_bits(
    two: Results, name: str
) -> None:
    for rank in results(two, name):
        for step in range(HALF + 1, STEPS + 1):
            assert same(rank["again"]["steps"][step], rank["whole"]["steps"][step])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_checkpoint_loads_into_a_plain_model_and_is_the_mean(two: Results, name: str) -> None:
    ranks = results(two, name)
    torch.testing.assert_close(ranks[0]["half"], mean_after(ranks, HALF))


def test_trainer_counts_optimizer_steps_and_evaluates_the_mean_model(two: Results) -> None:
    for rank in results(two, "trainer"):
        whole = rank["whole"]
        assert (whole["rounds"], whole["total_steps"]) == ([3, 6], STEPS)
        evaluated = [line["eval_loss"] for line in whole["logs"] if "eval_loss" in line]
        assert evaluated[0] == pytest.approx(rank["half loss"], rel=1e-5)
        assert whole["eval"] == pytest.approx(rank["end loss"], rel=1e-5)
        for logs in (whole["logs"], rank["bf16"]):
            losses = [line["loss"] for line in logs if "loss" in line]
            assert losses[-1] < 0.9 * losses[0]


def test_trainer_starts_from_the_mean_where_another_number_of_workers_saved(two: Results) -> None:
    for rank in results(two, "trainer"):
        assert same(rank["from others"], rank["half"])


def test_accelerate_saves_the_mean_once_and_each_workers_own(two: Results) -> None:
    ranks = results(two, "accelerate")
    names = ranks[0]["whole"]["names"]
    assert {"model.safetensors", "optimizer.bin"} <= set(names)
    assert [n for n in names if n.startswith("worker")] == ["worker-0-of-2.pt", "worker-1-of-2.pt"]
    for rank in ranks:
        assert rank["whole"]["rounds"] == rank["again"]["rounds"] == STEPS // PERIOD
        assert rank["whole"]["apart"] == pytest.approx(distance_after(ranks, HALF) / 2, rel=1e-4)
        assert same(rank["mean"], rank["whole"]["end"])
        assert sum(rank["whole"]["losses"][-4:]) < sum(rank["whole"]["losses"][:4])


def test_under_accelerate_an_overflow_holds_the_scheduler_back_and_no_round(two: Results) -> None:
    first, second = results(two, "scaler_under_accelerate")
    assert first["skipped"] == [False] * 4
    assert second["skipped"] == [False, True, False, False]
    # Two processes step an Accelerate scheduler twice in each step.
    assert first["rates"] == pytest.approx([0.1 * 0.25**k for k in (1, 2, 3, 4)])
    assert second["rates"] == pytest.approx([0.1 * 0.25**k for k in (1, 1, 2, 3)])
    assert first["rounds"] == second["rounds"] == 2
    assert same(first["end"], second["end"])


SCRIPT = """
import torch
from consensus_opt import local_sgd
from consensus_opt.integrations.accelerate import Accelerator

accelerator = Accelerator(method=local_sgd(2))
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    accelerator.backward(model(torch.full((3, 2), 1.0 + accelerator.process_index)).sum())
    optimizer.step()
weights = tuple(model.weight.flatten().tolist())
print("worker", accelerator.process_index, optimizer.optimizer.rounds, *weights)
"""


def test_accelerate_launch_starts_workers_on_cpus(tmp_path: Path) -> None:
    """Several processes on CPUs are started through mpirun, with a file of hosts."""
    hosts, script = tmp_path / "hosts", tmp_path / "script.py"
    hosts.write_text("localhost slots=2\n")
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"]
    line += ["--num_machines=1", f"--mpirun_hostfile={hosts}", "--main_process_ip=127.0.0.1"]
    line += [f"--main_process_port={launchers.free_port()}", str(script)]
    run = launchers.execute(line, 120, {"PYTHONPATH": str(launchers.ROOT)})
    assert run.status == 0, run.output
    told = sorted(line.split() for line in run.output.splitlines() if line.startswith("worker"))
    assert [words[1:3] for words in told] == [["0", "2"], ["1", "2"]]
    assert told[0][3:] == told[1][3:]


def test_R098_R103_accelerate_around_the_wrapper_around_another_reaches_the_innermost(
    two: Results,
) -> None:
    for rank in results(two, "wrappers_around_wrappers"):
        torch.testing.assert_close(rank["moved"], torch.full((4,), 0.5 * 0.01))
        assert rank["lr"] == pytest.approx(0.05)
        assert rank["state"] == 2
        assert rank["same state"]
        assert rank["rounds"] == 1
        assert rank["twin"] == (2, local_sgd(2), pytest.approx(0.05))


def test_lightning_validates_the_mean_and_keeps_each_workers_own(two: Results) -> None:
    first, second = results(two, "lightning")
    for mine, other in zip(first["whole"]["validated"], second["whole"]["validated"], strict=True):
        assert same(mine[0], other[0])
    # Each rank has half of the images.
    halves = [rank["whole"]["validated"][1][1] for rank in (first, second)]
    assert sum(halves) / 2 == pytest.approx(first["half loss"], rel=1e-5)
    for rank in (first, second):
        whole = rank["whole"]
        assert (whole["clock"], whole["rounds"], whole["total_steps"]) == (STEPS, 2, STEPS)
        assert sum(whole["losses"][-4:]) < sum(whole["losses"][:4])
        assert sum(rank["bf16"]["losses"][-4:]) < sum(rank["bf16"]["losses"][:4])
    assert [place for place in first["files"] if "step=4" in place] == [
        "whole/step=4.ckpt",
        "whole/step=4.ckpt.workers/worker-0-of-2.pt",
        "whole/step=4.ckpt.workers/worker-1-of-2.pt",
    ]


def test_lightning_in_fp16_clips_and_an_overflow_skips_no_round(two: Results) -> None:
    first, second = (rank["fp16"] for rank in results(two, "lightning"))
    for rank in (first, second):
        assert (rank["clock"], rank["rounds"]) == (STEPS, 2)
        assert rank["losses"][-1] < rank["losses"][0]
    # Rank 1 overflowed in its third step, at whose end the workers met all the same.
    assert same(first["end"], second["end"])


def test_a_run_of_another_size_starts_from_the_mean_and_says_so(tmp_path: Path) -> None:
    workers.save(tmp_path, StackedTransport(4), {"model": mlp(1)})
    model = mlp(0)
    with pytest.warns(UserWarning, match="worker-0-of-2.pt.*starts from the mean model"):
        workers.load(tmp_path, StackedTransport(2), {"model": model})
    assert same(dict(model.state_dict()), dict(mlp(0).state_dict()))
    workers.load(tmp_path, StackedTransport(4), {"model": model})
    assert same(dict(model.state_dict()), dict(mlp(1).state_dict()))


@pytest.mark.parametrize(
    ("framework", "adapter"),
    [
        ("accelerate", "accelerate"),
        ("transformers", "huggingface"),
        ("lightning", "lightning"),
    ],
)
def test_without_the_framework_the_import_says_what_to_install(
    framework: str, adapter: str
) -> None:
    extra = "lightning" if framework == "lightning" else "huggingface"
    program = (
        f"import sys; sys.modules[{framework!r}] = None\n"
        f"try:\n    import consensus_opt.integrations.{adapter}\n"
        "except ImportError as error:\n    print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert f"pip install 'consensus-opt[{extra}]'" in run.stdout.replace("\n", " ")
