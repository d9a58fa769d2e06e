"""What launchers leave in the environment, and what becomes of it without an engine."""

from __future__ import annotations

import pytest

from consensus_opt.integrations import find_transport
from consensus_opt.integrations.environment import init_process_group, place

VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "PMIx": ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""Of each launcher the variables with rank and size, by a word of its name."""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (*VARIABLES.values(), ("MASTER_ADDR", "MASTER_PORT")):
        for name in names:
            monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, launcher: str, rank: int, size: int) -> None:
    for name, value in zip(VARIABLES[launcher], (rank, size), strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("launcher", VARIABLES)
def test_R047_rank_and_size_are_read_from_each_launchers_variables(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    start(monkeypatch, launcher, 3, 8)
    found = place()
    assert found is not None
    assert launcher in found.launcher
    assert (found.rank, found.size) == (3, 8)
    assert found.variable == VARIABLES[launcher][1]
    assert found.mpi == (launcher in ("Open MPI", "MVAPICH", "MPICH", "PMIx"))


def test_a_process_that_no_launcher_started_has_no_place_and_is_alone() -> None:
    assert place() is None
    assert find_transport(1.0).size == 1


@pytest.mark.parametrize("outer", ["Open MPI", "PMIx", "srun"])
def test_torchrun_started_by_another_launcher_counts(
    monkeypatch: pytest.MonkeyPatch, outer: str
) -> None:
    start(monkeypatch, outer, 1, 2)
    start(monkeypatch, "torchrun", 9, 16)
    found = place()
    assert found is not None
    assert (found.rank, found.size) == (9, 16)


@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        ("torchrun", r"torch.distributed.init_process_group\('gloo'\)"),
        ("horovodrun", r"horovod.torch.init\(\)"),
        ("srun", r"environment.init_process_group\('gloo'\)"),
    ],
)
def test_several_processes_without_an_engine_are_told_how_to_connect(
    monkeypatch: pytest.MonkeyPatch, launcher: str, way: str
) -> None:
    start(monkeypatch, launcher, 0, 4)
    with pytest.raises(RuntimeError, match=rf"started 4 processes \({VARIABLES[launcher][1]}\)"):
        find_transport(1.0)
    with pytest.raises(RuntimeError, match=way):
        find_transport(1.0)


@pytest.mark.parametrize("launcher", VARIABLES)
def test_one_process_of_any_launcher_is_alone(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    start(monkeypatch, launcher, 0, 1)
    assert find_transport(1.0).size == 1


def test_R047_what_torch_distributed_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no launcher started this process: none of WORLD_SIZE"):
        init_process_group()
    start(monkeypatch, "srun", 0, 4)
    monkeypatch.setenv("MASTER_ADDR", "host1")
    with pytest.raises(RuntimeError, match="MASTER_PORT is not set"):
        init_process_group()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(RuntimeError, match="MASTER_ADDR and MASTER_PORT are not set"):
        init_process_group()
