"""MPI: real jobs under mpirun, most checks together in one (see mpi_worker.py).

The oracle is StackedTransport, or what is computed here. Names that begin with R are those of
cases in the list of what goes wrong with launchers.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from consensus_opt.transport import all_reduce_bytes
from tests import test_parity as parity
from tests import test_uneven as uneven
from tests.launchers import launch, launch_loosely
from tests.problems import same

pytestmark = pytest.mark.mpi

EVERYWHERE = ("operations", "trajectories", "two_optimizers", "hook")
ON_FOUR = (
    *EVERYWHERE,
    "small_count",
    "staged",
    "four_megabytes_both_ways",
    "communicators",
    "handles",
    "bytes_sent",
    "other_model_on_rank_1",
    "unusual_strides",
    "world_in_another_thread",
    "forked_data_loader",
    "uneven_data",
)

Results = dict[str, list[Any]]
"""What each rank saw, by check."""


def results(n: int, *checks: str, **options: Any) -> Results:
    reports = launch("mpirun", n, "tests.mpi_worker", checks, timeout=240, **options)
    for name in checks:
        failed = [f"rank {m}: {r[name][1]}" for m, r in enumerate(reports) if not r[name][0]]
        assert not failed, "\n".join([name, *failed])
    return {name: [r[name][1] for r in reports] for name in checks}


@pytest.fixture(scope="module")
def four() -> Results:
    return results(4, *ON_FOUR)


@pytest.fixture(scope="module")
def two() -> Results:
    return results(2, *EVERYWHERE, "found", "wrong_address")


@pytest.fixture(scope="module")
def one() -> Results:
    return results(1, *EVERYWHERE)


def jobs(request: pytest.FixtureRequest, n: int) -> Results:
    job: Results = request.getfixturevalue({1: "one", 2: "two", 4: "four"}[n])
    return job


# ---------------------------------------------------------------------------- the transport


@pytest.mark.parametrize("n", [1, 2, 4])
def test_operations_give_what_stacked_workers_have_in_every_dtype(
    request: pytest.FixtureRequest, n: int
) -> None:
    assert jobs(request, n)["operations"] == [[]] * n


@pytest.mark.parametrize("name", parity.METHODS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_follow_the_trajectory_of_stacked_workers(
    request: pytest.FixtureRequest, n: int, name: str
) -> None:
    ranks = torch.stack([seen[name] for seen in jobs(request, n)["trajectories"]])
    stacked = parity.train_stacked(name, n)
    if name in parity.SAME_BITS or n == 1:
        assert torch.equal(ranks, stacked)
    else:
        torch.testing.assert_close(ranks, stacked, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_two_optimizers_in_turns_do_what_each_does_alone(
    request: pytest.FixtureRequest, n: int
) -> None:
    for pairs in jobs(request, n)["two_optimizers"]:
        assert all(same(in_turns, alone) for in_turns, alone in pairs)


def test_bytes_are_counted_by_formula(four: Results) -> None:
    for seen in four["bytes_sent"]:
        count = seen["elements"]
        fp32, bf16 = torch.empty(count), torch.empty(count, dtype=torch.bfloat16)
        assert seen["ring float32"] == 2 * 4 * count
        assert seen["ring bfloat16"] == 2 * 2 * count
        assert seen["mean float32"] == all_reduce_bytes(fp32, 4)
        assert seen["mean bfloat16"] == all_reduce_bytes(bf16, 4)


def test_transports_come_and_go_without_using_up_communicators(four: Results) -> None:
    assert all(len(handles) < 5 for handles in four["handles"])  # of 100 transports


def test_any_intra_communicator_serves_and_others_are_refused(four: Results) -> None:
    seen = four["communicators"]
    assert [each["members"] for each in seen] == [[2.0, 0.0], [3.0, 1.0]] * 2
    assert [each["repr"] for each in seen] == [
        "MPITransport(rank 1 of 2)",
        "MPITransport(rank 1 of 2)",
        "MPITransport(rank 0 of 2)",
        "MPITransport(rank 0 of 2)",
    ]
    assert seen[0]["null"].startswith("ValueError: rank 0 is not in the communicator")
    assert "comm.Merge()" in seen[0]["inter"]
    assert seen[0]["kind"].startswith("TypeError: comm must be an intra-communicator")
    assert "write chunk_bytes=8 << 20" in seen[0]["chunk_bytes"]
    assert "write timeout=300.0" in seen[0]["timeout"]


def test_R039_a_model_that_differs_on_one_rank_is_named_on_all_ranks(four: Results) -> None:
    for longer, reordered in four["other_model_on_rank_1"]:
        assert longer.startswith("RankMismatchError: ranks [1] differ from the other 3")
        assert "6 parameters" in longer
        assert "instead of 4 parameters" in longer
        assert reordered.startswith("RankMismatchError: ranks [1] differ from the other 3")
        assert "'parameter 0: shape (2, 4), torch.float32'" in reordered


def test_R040_no_message_exceeds_what_mpi_counts_to_and_none_is_pickled(four: Results) -> None:
    for odd, largest in four["small_count"]:  # 5003 elements, as if MPI counted to 1000
        assert odd == []
        assert set(largest) == {"Isend", "Irecv", "Iallreduce", "Iallgather", "Ibcast"}
        assert max(largest.values()) <= 1000


def test_R042_parameters_of_any_strides_travel_as_one_flat_buffer(four: Results) -> None:
    for seen in four["unusual_strides"]:
        for did, should, strides_kept in seen:
            assert torch.equal(did, should)
            assert strides_kept


def test_R043_without_a_gpu_aware_mpi_data_are_staged_on_the_host(four: Results) -> None:
    for odd, aware, said_by_open_mpi in four["staged"]:
        assert odd == []  # through the host memory that stands for a GPU's
        assert aware == (said_by_open_mpi == "true")


def test_R044_both_partners_send_four_megabytes_first(four: Results) -> None:
    assert four["four_megabytes_both_ways"] == [True] * 4


def test_R046_user_code_uses_comm_world_in_another_thread_meanwhile(four: Results) -> None:
    for busy, alone, sums in four["world_in_another_thread"]:
        assert torch.equal(busy, alone)
        assert sums == {0 + 1 + 2 + 3}


def test_forked_data_loaders_load_and_are_told_not_to_communicate(four: Results) -> None:
    for error, model, models in four["forked_data_loader"]:
        assert "was forked from rank" in error
        assert "in a data-loader worker read data" in error
        assert all(torch.equal(model, other) for other in models)


# ---------------------------------------------------------------------------- the process


def test_an_uncaught_exception_ends_only_jobs_of_several_ranks(one: Results, four: Results) -> None:
    assert one["hook"] == [(False, True)]
    assert four["hook"] == [(False, True)] * 4  # an earlier check has put it in place


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
def test_R035_no_thread_is_started_and_calls_from_other_threads_follow_the_level(
    level: str,
) -> None:
    env = {"MPI4PY_RC_THREAD_LEVEL": level}
    (seen,) = results(1, "thread_level", env=env)["thread_level"]
    assert seen["threads started"] == 0
    assert seen["mean"] == [0.0] * 8
    if level in ("single", "funneled"):
        for error in seen["errors"]:
            assert error.startswith(
                f"RuntimeError: MPI was started with MPI_THREAD_{level.upper()}"
            )
    else:
        assert seen["errors"] == ["nothing", "nothing"]


def test_R036_mpi_that_the_user_started_is_used_and_not_ended() -> None:
    for seen in launch("mpirun", 2, "tests.mpi_orders", ["by_user"]):
        assert seen["at first"] == "not started"
        assert "MPI.Init_thread" in seen["error"]
        assert seen["mean"] == [0.5]
        assert seen["after ours"] == "runs"
        assert seen["in the end"] == "ended"


@pytest.mark.horovod
@pytest.mark.parametrize("order", ["mpi4py_horovod_ours", "horovod_ours", "ours_horovod"])
def test_R036_mpi4py_horovod_and_ours_share_mpi_in_any_order(order: str) -> None:
    for rank, seen in enumerate(launch("mpirun", 2, "tests.mpi_orders", [order])):
        assert seen["mean"] == seen["theirs"] == [0.5]
        if order == "mpi4py_horovod_ours":
            assert seen["found"] == f"HorovodTransport(rank {rank} of 2)"
            assert seen["in the end"] == "runs"
            assert seen["again"] == [0.5]
        elif order == "horovod_ours":
            assert seen["after ours"] == "runs"
        else:
            assert seen["after Horovod"] == "runs"
            assert seen["again"] == [0.5]


def test_R038_an_exception_on_one_rank_ends_the_job_with_its_traceback() -> None:
    # The others would wait for an hour; the job ends because rank 1 ends it.
    job = launch_loosely("mpirun", 4, "tests.mpi_worker", ["raise_on_rank_1"], timeout=120)
    assert job.status != 0
    assert "KeyError: 'on purpose'" in job.output
    assert "in raise_on_rank_1" in job.output
    assert "the user's hook ran" in job.output
    assert job.reports[1] == 2
    assert all(step <= 2 for step in job.reports)


def test_R038_a_silent_rank_is_named_by_all_others_in_every_call() -> None:
    job = launch_loosely("mpirun", 4, "tests.mpi_worker", ["rank_1_is_silent"], timeout=120)
    for rank in (0, 2, 3):
        for call in ("exchange", "mean", "construction"):
            ranks, text = job.reports[rank][call]
            assert ranks == (1,)
            assert text.startswith(f"rank 1 does not answer rank {rank} within 1 s")


def test_a_rank_that_exits_without_a_word_is_named_by_all_others() -> None:
    job = launch_loosely("mpirun", 4, "tests.mpi_worker", ["exit_on_rank_1"], timeout=120)
    for rank in (0, 2, 3):
        ranks, text = job.reports[rank]["step"]
        assert ranks == (1,), text
        assert f"rank 1 does not answer rank {rank} within 3 s" in text


def test_R003_R132_ranks_that_part_are_named_with_what_to_do() -> None:
    job = launch_loosely("mpirun", 4, "tests.mpi_worker", ["ranks_part"], timeout=120)
    for rank, seen in enumerate(job.reports):
        assert "rank 0: step(), rank 1: synchronize()" in seen["skipped"]
        text, seconds = seen["mismatch"]
        assert "rank 1" in text
        assert "has other parameters or another method than rank" in text
        assert seconds < 30  # the timeout is 60, and rank 3 is no neighbour of rank 1
        kind, text = seen["left"]
        if rank != 1:
            assert kind == "PeerError"
            assert "rank 1 does not answer" in text
            assert "'with optimizer.join():' around the loop" in text


def test_R130_ranks_go_on_without_those_that_ended_and_stop_with_the_first(four: Results) -> None:
    batches = uneven.BATCHES["all at different steps"]
    for name in ("local_sgd_2", "ring", "one_peer"):
        uneven.assert_as_by_hand([seen[name] for seen in four["uneven_data"]], name, batches)
    assert [seen["stop"] for seen in four["uneven_data"]] == [[(3, 3), (3, 6)]] * 4


def test_R047_under_mpirun_the_transport_and_torch_distributed_are_found(two: Results) -> None:
    for rank, seen in enumerate(two["found"]):
        assert seen["mpirun"] == f"MPITransport(rank {rank} of 2)"
        assert seen["both"] == f"TorchTransport(rank {rank} of 2)"
        assert seen["sum"] == "1.0"


def test_engines_that_disagree_are_both_named(two: Results) -> None:
    for rank, seen in enumerate(two["found"]):
        assert seen["alone in torch"] == (
            "RuntimeError: torch.distributed says that this is rank 0 of 1, and MPI that it is "
            f"rank {rank} of 2; say which of them carries the messages: pass "
            "transport=TorchTransport() or transport=MPITransport()"
        )


def test_R048_a_wrong_address_is_named_with_rank_and_size(two: Results) -> None:
    assert two["wrong_address"][1].startswith(
        "PeerError: rank 1 of 2 did not meet the others at 127.0.0.1:9 within 2 s"
    )


def test_without_mpi4py_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import consensus_opt, consensus_opt.integrations as found\n"
        "print(found.find_transport(1.0).size)\n"
        "import os; os.environ.update(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='2')\n"
        "found.find_transport(1.0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "1\n"
    assert (
        "ImportError: mpirun of Open MPI started 2 processes (OMPI_COMM_WORLD_SIZE)" in ran.stderr
    )
    assert "apt install openmpi-bin libopenmpi-dev && pip install mpi4py" in ran.stderr


def test_a_launcher_of_another_mpi_than_mpi4pys_is_refused() -> None:
    # As under the other MPI's launcher: its variables are set, and this process is MPI's only one.
    script = (
        "import os; os.environ.update(PMI_RANK='0', PMI_SIZE='2')\n"
        "import consensus_opt.integrations as found\n"
        "found.find_transport(1.0)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "started 2 processes (PMI_SIZE), and mpi4py sees only this one" in ran.stderr
    assert "pip install --no-binary mpi4py mpi4py" in ran.stderr
