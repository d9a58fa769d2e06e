"""Uses that a wrapper of an optimizer meets: any size, schedulers, loading, packaging, Ctrl-C."""

from __future__ import annotations

import ast
import copy
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from consensus_opt import (
    ConsensusOptimizer,
    GradientNorm,
    KeepBelow,
    Method,
    StackedTransport,
    consensus_control,
    dppf,
    gossip_sgd,
    local_sgd,
)
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import flat, loss_of, mlp, random_rows, same, stacked, train

ROOT = Path(__file__).parent.parent
TOPOLOGIES = ("ring", "star", "torus", "grid", "hypercube", "exponential", "one_peer_exponential")
TOPOLOGIES += ("base2", "base3", "random_matching", "complete")


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_R034_R072_on_one_worker_every_topology_is_the_inner_optimizer(name: str) -> None:
    bare_model, model = mlp(), mlp()
    bare = Adam(bare_model.parameters())
    wrapped = ConsensusOptimizer(Adam(model.parameters()), dppf(period=1, topology=name))
    train(bare_model, bare, range(3))
    train(model, wrapped, range(3))
    with wrapped.averaged():
        assert same(flat(model), flat(bare_model))
    wrapped.synchronize()
    assert wrapped.consensus_distance() == 0.0
    assert same(flat(model), flat(bare_model))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "hypercube"])
def test_R082_R083_any_number_of_workers_mixes_and_keeps_the_mean(name: str, n: int) -> None:
    rows = random_rows(n, 9, dtype=torch.float64)
    parameter, optimizer = stacked(rows, gossip_sgd(name))
    for exchange in range(4):
        rows = torch.tensor(topology(name).mixing(n, exchange).weights) @ rows
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), rows)


def train_three_or_five(rank: int) -> list[Tensor]:
    models = []
    for name in ("ring", "one_peer_exponential", "base2"):
        model = mlp(seed=rank)
        inner = SGD(model.parameters(), lr=0.1)
        train(model, ConsensusOptimizer(inner, gossip_sgd(name), timeout=60), range(4), rank)
        models.append(flat(model))
    return models


@pytest.mark.parametrize("n", [3, 5])
def test_R083_odd_numbers_of_real_ranks_train(n: int) -> None:
    outcomes = run_ranks(n, train_three_or_five)
    for models in zip(*outcomes, strict=True):
        rows = torch.stack(list(models))
        assert (rows - rows.mean(0)).norm() < 0.5 * rows.mean(0).norm()


# ---------------------------------------------------------------------------- schedulers


def rates_with_overflow(wrap: bool) -> list[float]:
    """Learning rates of a scheduler that is stepped each time, the first step overflows."""
    model = mlp()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    if wrap:
        optimizer = ConsensusOptimizer(optimizer, local_sgd(2))
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    scaler, rates = GradScaler("cpu"), []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, 0, step)
        scaler.scale(loss * torch.inf if step == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_R008_after_an_overflow_the_learning_rates_are_those_of_the_bare_optimizer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the bare optimizer, which was not stepped
        bare = rates_with_overflow(wrap=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates_with_overflow(wrap=True) == bare


def test_R110_a_scheduler_on_the_wrapper_reaches_an_inner_optimizer_stepped_by_an_engine() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    inner = SGD([parameter], lr=1.0)
    wrapped = ConsensusOptimizer(inner, local_sgd(1))
    scheduler = lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.1)
    parameter.grad = torch.ones(1)
    inner.step()
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()  # rightly: the wrapper's step, which makes the rounds, was not called
    inner.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-1.1]))
    assert wrapped.clock == 0


# ---------------------------------------------------------------------------- saving and loading


def save_on_rank_0(rank: int) -> tuple[bytes, Tensor]:
    model = mlp(seed=rank)
    optimizer = ConsensusOptimizer(Adam(model.parameters()), local_sgd(4), timeout=60)
    train(model, optimizer, range(6), rank)
    with optimizer.averaged():
        mean = flat(model)
    if rank != 0:
        return b"", mean
    file = io.BytesIO()
    with torch.no_grad():
        torch.save(optimizer.state_dict(), file)
    return file.getvalue(), mean


def load_everywhere(rank: int, saved: bytes, mean: Tensor) -> tuple[dict[str, Any], Tensor]:
    model = mlp(seed=rank)
    nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    optimizer = ConsensusOptimizer(Adam(model.parameters()), local_sgd(4), timeout=60)
    optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    loaded = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [6, 7], rank)
    return loaded, flat(model)


def test_R068_the_state_of_rank_0_loads_on_every_rank_and_the_period_goes_on() -> None:
    saved, mean = run_ranks(2, save_on_rank_0)[0]
    expected = torch.load(io.BytesIO(saved), weights_only=True)
    outcomes = run_ranks(2, load_everywhere, saved, mean)
    for loaded, end in outcomes:
        assert same(loaded["state"], expected["state"])
        assert loaded["consensus"]["clock"] == 6
        assert same(end, outcomes[0][1])  # step 8 was a round


def test_R111_numbers_that_bf16_cannot_hold_come_back_in_their_own_dtype() -> None:
    method: Method = consensus_control("ring", target=GradientNorm())
    parameter = nn.Parameter(random_rows(4, 8, dtype=torch.bfloat16))
    inner = SGD([parameter], lr=0.1)
    optimizer = ConsensusOptimizer(
        inner, method, transport=StackedTransport(4), broadcast=False, total_steps=100
    )
    for _ in range(3):
        optimizer.zero_grad()
        (parameter.float().square().sum() * (1 + 2**-12)).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(optimizer)
    twin.load_state_dict(torch.load(file, weights_only=True))
    own, loaded = (o.state_dict()["consensus"] for o in (optimizer, twin))
    assert same(own, loaded)
    assert own["gradients"]["sum"].dtype == loaded["gradients"]["sum"].dtype == torch.float64
    assert isinstance(optimizer.method.control, KeepBelow)


def test_R112_a_fused_optimizer_loads_by_its_own_rules_and_takes_the_next_step() -> None:
    """``step`` is a tensor of a fused optimizer, and its place is what the inner one says."""
    model, bare_model = mlp(), mlp()
    bare = AdamW(bare_model.parameters(), fused=True)
    wrapped = ConsensusOptimizer(AdamW(model.parameters(), fused=True), local_sgd(2))
    for trained, optimizer in ((bare_model, bare), (model, wrapped)):
        train(trained, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(trained, optimizer, [2])
    assert same(flat(model), flat(bare_model))
    (state, *_), (bare_state, *_) = wrapped.state.values(), bare.state.values()
    assert same(state["step"], bare_state["step"])
    assert state["step"].device == bare_state["step"].device


# ---------------------------------------------------------------------------- package and process


def test_R079_the_wheel_is_pure_python_and_holds_the_integrations(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("consensus_opt", "integrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b; print(b.build_wheel('..'))"
    run = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert "consensus_opt/integrations/torch_distributed.py" in files
    assert "consensus_opt/integrations/launch/torchrun.sh" in files
    assert not [name for name in files if name.endswith((".so", ".pyd", ".cu", ".cpp"))]


def test_R078_of_mpi_only_two_sided_and_collective_calls_are_used() -> None:
    one_sided = {"Win", "Put", "Get", "Accumulate", "Rput", "Rget", "Lock", "Fence"}
    for path in (ROOT / "integrations").glob("mpi*.py"):
        names = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert not names & one_sided, path.name


PROGRAM = """
import sys, time, torch, torch.distributed as dist
from consensus_opt import ConsensusOptimizer, local_sgd
rank, how, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = torch.nn.Linear(3, 1)
optimizer = ConsensusOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local_sgd(1))
optimizer.step()
print("trained", flush=True)
if how == "interrupted" and rank == 1:
    time.sleep(60)
if how == "interrupted":
    optimizer.step()
"""


@pytest.mark.parametrize("how", ["normal", "interrupted"])
def test_R095_a_job_ends_soon_after_its_last_line_and_after_ctrl_c(
    how: str, tmp_path: Path
) -> None:
    """On Ctrl-C rank 1 sleeps, and rank 0 waits for it inside of a round."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), how, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "trained\n"
        if how == "interrupted":
            time.sleep(0.5)
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
        codes = [rank.wait(30) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(code == 0 for code in codes) == (how == "normal")
