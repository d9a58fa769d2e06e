"""Horovod under its own launcher: the transport, the wrapper's habits, and what users run into.

Starting a job is slow, so each job runs many checks of tests/horovod_worker.py, and the tests below
ask it for theirs. R numbers are those of the case list.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import launchers
from tests import test_parity as parity
from tests import test_uneven as uneven
from tests.launchers import launch, launch_loosely

pytestmark = pytest.mark.horovod

GLOO, MPI = "horovodrun-gloo", "horovodrun-mpi"
ENGINE = ("exchange", "mean", "broadcast_and_gather", "trajectories", "half_precision_models")
SETS = ("process_set_of_two", "gradients_inside_nodes_and_models_across", "refusals")
HABITS = (
    "arguments_for_gradients",
    "accepted_arguments",
    "synchronize_before_clipping",
    "synchronize_models",
    "state_only_on_some_ranks",
)
PARTING = ("uneven_data", "parted", "late_peer")
NUMBERS = (14, 15, 16, 18, 19, 20, 22, 23, 24, 26, 27, 28, 30, 31, 32)
ROWS = tuple(f"r{number:03}" for number in NUMBERS)
JOBS = {
    (GLOO, 4): (*ENGINE, *SETS, *HABITS, *ROWS, *PARTING),
    (GLOO, 2): (*ENGINE, "r020", "r026"),
    (GLOO, 1): ("r034",),
    (MPI, 4): (*ENGINE, *SETS, "state_only_on_some_ranks", "r014", "r020", "r022", *PARTING),
}
EVERYWHERE = [pytest.param(*job, id=f"{job[0]}-{job[1]}") for job in JOBS if job[1] > 1]
FOUR = [pytest.param(GLOO, 4, id=GLOO), pytest.param(MPI, 4, id=MPI)]


@cache
def job(kind: str, n: int) -> list[dict[str, tuple[bool, Any]]]:
    return launch(kind, n, "tests.horovod_worker", JOBS[kind, n], timeout=180)


def found(name: str, kind: str = GLOO, n: int = 4) -> list[Any]:
    """What each rank found in this check."""
    results = [rank[name] for rank in job(kind, n)]
    assert all(returned for returned, _ in results), "\n".join(
        str(r) for ok, r in results if not ok
    )
    return [value for _, value in results]


def follows_by_hand(results: list[Any]) -> None:
    """All ranks are where plain optimizers are whose models were averaged by hand."""
    for result in results:
        torch.testing.assert_close(result["did"], result["should"], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------- the transport


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_an_exchange_gives_the_bits_of_stacked_workers(kind: str, n: int) -> None:
    assert found("exchange", kind, n) == [[]] * n


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_a_mean_in_chunks_is_the_mean_in_double_precision(kind: str, n: int) -> None:
    pairs = found("mean", kind, n)
    for did, should in (pair for rank in pairs for pair in rank):
        torch.testing.assert_close(did, should)
    for did, first in (
        (a, b) for rank in pairs for (a, _), (b, _) in zip(rank, pairs[0], strict=True)
    ):
        assert torch.equal(did, first)


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_broadcast_and_gather_carry_the_bytes_of_any_dtype(kind: str, n: int) -> None:
    assert found("broadcast_and_gather", kind, n) == [True] * n


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_training_follows_stacked_workers(kind: str, n: int) -> None:
    results = found("trajectories", kind, n)
    for name in results[0]:
        together = torch.stack([result[name] for result in results])
        expected = parity.train_stacked(name, n)
        if name in parity.SAME_BITS:
            assert torch.equal(together, expected), name
        else:
            torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_models_in_half_precision_have_the_bits_of_stacked_workers(kind: str, n: int) -> None:
    for result in found("half_precision_models", kind, n):
        assert result == {"torch.float16": True, "torch.bfloat16": True}


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_a_process_set_is_a_world_of_its_own(kind: str, n: int) -> None:
    for rank, result in enumerate(found("process_set_of_two", kind, n)):
        others = [rank % 2, rank % 2 + 2]
        assert result["place"] == (rank // 2, 2)
        assert result["gather"] == others
        assert result["broadcast"] == others[1]
        assert result["exchange"] == sum(others) / 2


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_R076_gradients_meet_inside_nodes_and_models_across(kind: str, n: int) -> None:
    for result in found("gradients_inside_nodes_and_models_across", kind, n):
        for did in result["did"]:
            torch.testing.assert_close(did, result["should"], rtol=1e-5, atol=1e-6)


def test_a_wrong_set_or_number_is_refused() -> None:
    for rank, result in enumerate(found("refusals")):
        assert f"rank {rank} is not in the process set given" in result["foreign"]
        assert "hvd.init(process_sets=[process_set])" in result["unknown"]
        assert result["timeout"].startswith("timeout is 0; it must be")
        assert "must be an integer from 1 to 536870911" in result["chunk"]


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_a_late_peer_is_named_and_elastic_would_recover(kind: str, n: int) -> None:
    for rank, result in enumerate(found("late_peer", kind, n)):
        if rank != 1:
            assert result["ranks"] == (1,)
            assert "rank 1 does not answer" in result["text"]
            assert result["elastic"]


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_R130_ranks_go_on_without_those_that_ended_and_stop_with_the_first(
    kind: str, n: int
) -> None:
    results, batches = found("uneven_data", kind, n), uneven.BATCHES["all at different steps"]
    for name in ("local_sgd_2", "ring", "one_peer"):
        uneven.assert_as_by_hand([result[name] for result in results], name, batches)
    assert [result["stop"] for result in results] == [[(3, 3), (3, 6)]] * n


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_R003_R132_ranks_that_part_are_named_with_what_to_do(kind: str, n: int) -> None:
    for rank, result in enumerate(found("parted", kind, n)):
        assert "rank 0: step(), rank 1: synchronize()" in result["skipped"]
        assert "ranks [1] differ from the other 3" in result["mismatch"]
        if rank != 1:
            assert result["left"][0] == (1,)
            assert "'with optimizer.join():' around the loop" in result["left"][1]


@pytest.mark.parametrize(("kind", "how"), [(GLOO, "exit"), (MPI, "raise")])
def test_a_rank_that_ends_ends_the_job_and_others_name_it_as_far_as_they_get(
    kind: str, how: str
) -> None:
    job = launch_loosely(kind, 4, "tests.horovod_worker", [how], timeout=150)
    assert job.status != 0
    assert re.search(r"Process name: (\[\[\d+,1\],1\]|1)\s+Exit code:\s+1", job.output)
    for rank in (0, 2, 3):  # the launcher kills them as soon as it knows
        assert job.reports[rank] is None or job.reports[rank][0] == (1,)


# ---------------------------------------------------------------------------- Horovod's habits


def test_arguments_that_need_gradients_to_travel_are_refused() -> None:
    for result in found("arguments_for_gradients"):
        for name, text in result.items():
            assert text.startswith(name)


def test_arguments_in_horovods_order_are_accepted() -> None:
    follows_by_hand(found("accepted_arguments"))


def test_R011_synchronize_before_clipping_leaves_the_gradients_local() -> None:
    follows_by_hand(found("synchronize_before_clipping"))


def test_synchronize_models_makes_all_equal() -> None:
    for result in found("synchronize_models"):
        assert result["apart"] > 1e-3
        assert result["together"] < 1e-6
        assert result["rounds"] == 0


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_broadcast_optimizer_state_steps_no_clock_on_new_ranks(kind: str, n: int) -> None:
    results = found("state_only_on_some_ranks", kind, n)
    for result in results:
        assert result["clock"] == 0
        assert result["steps"] == [3.0] * 4
        assert torch.equal(result["moments"], results[0]["moments"])


def test_the_module_is_horovods_own_but_for_the_optimizer() -> None:
    code = (
        "import horovod.torch as theirs, consensus_opt.integrations.horovod as ours;"
        "assert ours.init is theirs.init and ours.elastic is theirs.elastic;"
        "assert ours.DistributedOptimizer is not theirs.DistributedOptimizer"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_before_horovod_is_initialised_the_transport_says_what_to_call() -> None:
    code = "from consensus_opt.integrations.horovod import HorovodTransport; HorovodTransport()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "call hvd.init() first" in done.stderr


def test_without_horovod_the_import_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['horovod'] = None; import consensus_opt.integrations.horovod"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "HOROVOD_WITH_PYTORCH=1 pip install" in done.stderr


# ---------------------------------------------------------------------------- rows of the cases


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_R014_a_loss_that_fills_the_other_nets_gradients_leaves_it_untouched(
    kind: str, n: int
) -> None:
    for result in found("r014", kind, n):
        assert result == {"B has gradients": True, "A moved": True, "B is untouched": True}


def test_R015_two_optimizers_over_overlapping_parameters_take_turns() -> None:
    follows_by_hand(found("r015"))


def test_R016_two_groups_without_names_are_averaged() -> None:
    follows_by_hand(found("r016"))


def test_R018_gradients_of_an_unfinished_accumulation_go_on_in_the_next_epoch() -> None:
    results = found("r018")
    follows_by_hand(results)
    for result in results:
        assert (result["passes"], result["rounds"]) == (15, 15 // 2 // 2)


def test_R019_a_dropped_batch_leaves_no_trace() -> None:
    follows_by_hand(found("r019"))


@pytest.mark.parametrize(("kind", "n"), EVERYWHERE)
def test_R020_the_wrapper_counts_and_communicates_each_third_step(kind: str, n: int) -> None:
    peers = {2: 1, 4: 2}[n]
    for result in found("r020", kind, n):
        assert result["steps"] == [3, 6]
        assert result["bytes"] == [peers * 4 * result["numel"]] * 2


@pytest.mark.parametrize(("kind", "n"), FOUR)
def test_R022_state_of_plain_types_is_shared_as_it_is(kind: str, n: int) -> None:
    expected = {"count": 2, "odd": False, "nothing": None, "share": 0.0}
    for result in found("r022", kind, n):
        assert result["last"]
        assert result["plain"] == expected
        types = [type(value) for value in result["plain"].values()]
        assert types == [type(value) for value in expected.values()]


def test_R023_sgd_without_momentum_has_no_state_to_share_and_works() -> None:
    results = found("r023")
    follows_by_hand(results)
    for result in results:
        assert result["still"]
        assert result["state"] == 0


def test_R024_options_that_are_none_stay_none() -> None:
    for result in found("r024"):
        assert result["after"] == result["before"]
        assert result["after"]["foreach"] is None


@pytest.mark.parametrize(("kind", "n"), [(GLOO, 2), (GLOO, 4)])
def test_R026_sharing_from_rank_1_gives_all_its_values(kind: str, n: int) -> None:
    results = found("r026", kind, n)
    for result in results:
        assert result["now"] == results[1]["given"]
        assert result["model"]


def test_R027_a_frozen_backbone_is_untouched() -> None:
    results = found("r027")
    follows_by_hand(results)
    assert all(result["frozen"] for result in results)


def test_R028_a_branch_used_on_one_rank_only_is_averaged_on_all() -> None:
    follows_by_hand(found("r028"))


def test_R030_an_optimizer_with_required_arguments_is_wrapped_as_it_is() -> None:
    results = found("r030")
    follows_by_hand(results)
    assert all(result["same"] for result in results)


def test_R031_a_helper_that_owns_an_optimizer_says_what_it_lacks() -> None:
    results = found("r031")
    follows_by_hand(results)
    for result in results:
        assert "Noam and lacks param_groups, state_dict, load_state_dict" in result["text"]


def test_R032_a_subclass_may_override_step() -> None:
    results = found("r032")
    follows_by_hand(results)
    for result in results:
        assert (result["uncounted"], result["calls"]) == (0, 7)


def test_R034_one_process_has_the_same_interface_under_the_launcher() -> None:
    _is_the_inner_optimizer_alone(*found("r034", GLOO, 1))


def test_R034_one_process_has_the_same_interface_without_a_launcher(tmp_path: Path) -> None:
    code = (
        "import pickle, sys, consensus_opt.integrations.horovod as hvd;"
        "hvd.init(); from tests.horovod_worker import r034;"
        "pickle.dump(r034(), open(sys.argv[1], 'wb'))"
    )
    run = launchers.execute([sys.executable, "-c", code, str(tmp_path / "found")], 60)
    assert run.status == 0, run.output
    _is_the_inner_optimizer_alone(pickle.loads((tmp_path / "found").read_bytes()))


def _is_the_inner_optimizer_alone(result: dict[str, Any]) -> None:
    assert result["size"] == (0, 1)
    assert result["same"] == [True, True]
    assert result["distance"] == result["bytes"] == 0
    assert result["twins"] == [("DistributedOptimizer", 5)] * 2


# ---------------------------------------------------------------------------- elastic


def test_elastic_goes_on_after_a_death_and_takes_in_a_new_worker(tmp_path: Path) -> None:
    """Horovod's own driver, with two names of this machine as two machines."""
    script, hosts = tmp_path / "discover.sh", tmp_path / "hosts"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    line = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2"]
    line += ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    line += [sys.executable, "-m", "tests.horovod_elastic", str(tmp_path)]
    run = launchers.execute([sys.executable, *line], 150)
    assert run.status == 0, run.output[-6000:]

    logs = [[json.loads(n) for n in file.open()] for file in tmp_path.glob("*.jsonl")]
    (survivor,) = (log for log in logs if any(note["event"] == "error" for note in log))
    (new,) = (log for log in logs if log[0]["event"] == "begin" and log[0]["step"] == 8)
    (error,) = (note for note in survivor if note["event"] == "error")
    assert error["ranks"] == [1 - error["rank"]], "the dead rank is named"
    steps = [note for note in survivor if note["event"] == "step"]
    assert [note["clock"] for note in steps] == list(range(1, 13)), "the failed step is repeated"
    sizes = [note["transport"][1] for note in steps]
    assert sizes == [2] * 5 + [1] * 3 + [2] * 4
    joined = [note for note in new if note["event"] == "step"]
    assert [note["clock"] for note in joined] == [9, 10, 11, 12], "the new one takes the clock"
    ends = [log[-1] for log in (survivor, new)]
    assert [end["exchanges"] for end in ends] == [2, 2], "the topology's cycle began anew"
    assert ends[0]["parameters"] == ends[1]["parameters"]
