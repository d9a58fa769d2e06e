"""Saved states are whole or not there; they load with the same bits, or by rule elsewhere."""

from __future__ import annotations

import copy
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consensus_opt import ConsensusOptimizer, StackedTransport, checkpoint, dppf, gossip_sgd
from tests.harness import RankFailed, run_ranks, run_ranks_loosely
from tests.problems import batch, flat, mlp, random_rows, same, stacked, train

STEPS, STOP = 7, 4


def with_batch_norm(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make(seed: int = 0) -> tuple[nn.Sequential, ConsensusOptimizer]:
    model = with_batch_norm(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = gossip_sgd("one_peer_exponential", period=3)
    return model, ConsensusOptimizer(inner, method, model=model, timeout=30)


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = make()
    train(model, optimizer, range(STOP), rank)
    path = checkpoint.save(folder, model, optimizer, extra={"rank": rank})
    at_stop = everything(model), optimizer.state_dict()["consensus"]
    seen = sorted(file.name for file in path.iterdir())  # all ranks are done: all files are there
    with optimizer.averaged():
        mean = everything(model)
    train(model, optimizer, range(STOP, STEPS), rank)
    return {"stop": at_stop, "seen": seen, "mean": mean, "end": everything(model)}


def load_and_train(rank: int, folder: str, stop: int = STEPS) -> dict[str, Any]:
    model, optimizer = make(seed=9)
    extra = checkpoint.load(folder, model, optimizer)
    at_stop = everything(model), optimizer.state_dict()["consensus"]
    inner = copy.deepcopy(optimizer.inner.state_dict()["state"])
    train(model, optimizer, range(STOP, stop), rank)
    return {"stop": at_stop, "extra": extra, "state": inner, "end": everything(model)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("states")
    return folder, run_ranks(3, train_and_save, str(folder))


def test_a_state_is_one_file_a_worker_and_one_mean_and_no_other_file(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = saved
    names = ["complete.json", "mean.pt", *(f"worker-{m}-of-3.pt" for m in range(3))]
    assert [rank["seen"] for rank in ranks] == [names] * 3
    assert checkpoint.latest(folder) == STOP
    mean = torch.load(folder / "step-00000004" / "mean.pt", weights_only=True)
    assert same(dict(mean), ranks[0]["mean"])


def test_the_same_workers_continue_with_the_same_bits(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = saved
    for rank, outcome in enumerate(run_ranks(3, load_and_train, str(folder))):
        assert outcome["extra"] == {"rank": rank}
        assert same(outcome["stop"], ranks[rank]["stop"])
        assert same(outcome["end"], ranks[rank]["end"])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_other_workers_start_from_the_mean_with_the_state_of_worker_m_mod_n(
    saved: tuple[Path, list[dict[str, Any]]], n: int
) -> None:
    folder, ranks = saved
    for rank, outcome in enumerate(run_ranks(n, load_and_train, str(folder), STOP + 2)):
        parameters, own = outcome["stop"]
        assert same(parameters, ranks[0]["mean"])
        file = folder / "step-00000004" / f"worker-{rank % 3}-of-3.pt"
        inner = torch.load(file, weights_only=True)["optimizer"]["state"]
        assert same(outcome["state"], inner)
        assert outcome["extra"] == {"rank": rank % 3}
        assert (own["clock"], own["next_round"], own["exchanges"]) == (STOP, 6, 0)


def test_a_state_that_was_not_completed_is_not_there(
    saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "step-00000004", tmp_path / "step-00000007")
    (tmp_path / "step-00000007" / "complete.json").unlink()
    (tmp_path / "step-of-mine").mkdir()
    (tmp_path / "step-of-mine" / "complete.json").touch()
    assert checkpoint.latest(tmp_path) == STOP
    (tmp_path / "step-00000004" / "complete.json").unlink()
    assert checkpoint.latest(tmp_path) is None
    failed = run_ranks_loosely(2, load_and_train, str(tmp_path))
    assert all("rank 0 finds no complete state in" in str(outcome) for outcome in failed)


def write_where_rank_1_cannot(rank: int, folder: str) -> None:
    model, optimizer = make()
    if rank == 1:
        Path(folder, "file").touch()
        folder = f"{folder}/file"
    checkpoint.save(folder, model, optimizer)


def test_a_rank_that_cannot_write_fails_all_ranks_and_is_named(tmp_path: Path) -> None:
    outcomes = run_ranks_loosely(2, write_where_rank_1_cannot, str(tmp_path))
    assert all(isinstance(outcome, RankFailed) for outcome in outcomes)
    assert all("ranks [1] could not prepare" in str(outcome) for outcome in outcomes)
    assert "NotADirectoryError" in str(outcomes[1])


def save_mean_twice(rank: int, path: str) -> tuple[bool, Tensor]:
    model, optimizer = make()
    train(model, optimizer, range(2), rank)
    checkpoint.save_mean(path, model, optimizer)
    there = Path(path).exists()
    checkpoint.save_mean(path, model, optimizer)
    with optimizer.averaged():
        return there, flat(model)


def test_R136_the_mean_model_is_one_file_that_is_there_when_any_rank_returns(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "mean.pt"
    outcomes = run_ranks(2, save_mean_twice, str(path))
    model = with_batch_norm(seed=5)
    model.load_state_dict(torch.load(path, weights_only=True))
    for there, mean in outcomes:
        assert there
        assert same(flat(model), mean)
    assert [file.name for file in path.parent.iterdir()] == ["mean.pt"]


def size_of(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def test_a_part_of_a_flattened_model_is_saved_alone() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    optimizer = ConsensusOptimizer(torch.optim.SGD(model.parameters()), dppf())
    with optimizer.averaged():
        pass
    head = model[1].state_dict()
    assert size_of(head) < 300 * 2 * 4 + 4000


def test_an_extra_that_could_not_be_loaded_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"extra is dict and holds objects .* give tensors"):
        checkpoint.save(tmp_path, model, optimizer, extra={"model": model})
    assert list(tmp_path.iterdir()) == []


def test_stacked_workers_are_one_file(tmp_path: Path) -> None:
    rows = random_rows(4, 5)
    results = []
    for _ in range(2):
        parameter, optimizer = stacked(rows, gossip_sgd("one_peer_exponential"), lr=0.1)
        model = nn.ParameterList([parameter])
        if results:
            checkpoint.load(tmp_path, model, optimizer)
        for _ in range(3 - optimizer.clock):
            optimizer.step()
            if optimizer.clock == 1:
                checkpoint.save(tmp_path, model, optimizer)
        results.append(parameter.detach().clone())
    assert isinstance(optimizer.transport, StackedTransport)
    assert same(*results)
    assert len(list(tmp_path.glob("step-00000001/worker-*"))) == 1


def test_a_process_that_dies_while_it_writes_leaves_the_older_file(tmp_path: Path) -> None:
    class Dies:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    path = tmp_path / "file.pt"
    checkpoint.write(path, mlp().state_dict())
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(path, {"tensor": batch(0, 0)[0], "dies": Dies()})
    assert [file.name for file in tmp_path.iterdir()] == ["file.pt"]
    assert same(dict(torch.load(path, weights_only=True)), dict(mlp().state_dict()))


def test_where_workers_without_data_or_an_engine_come_in_the_error_says_what_to_write(
    tmp_path: Path,
) -> None:
    class Engine(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {}

    model, optimizer = make()
    with optimizer.join(), pytest.raises(RuntimeError, match=r"save\(\) was .* leave the block"):
        checkpoint.save(tmp_path, model, optimizer)
    with optimizer.join(), pytest.raises(RuntimeError, match=r"save_mean\(\) was called inside"):
        checkpoint.save_mean(tmp_path / "mean.pt", model, optimizer)
    engine = ConsensusOptimizer(Engine(model.parameters()), dppf())
    with pytest.raises(ValueError, match=r"saves itself; write engine\.save_checkpoint"):
        checkpoint.save(tmp_path, model, engine)
