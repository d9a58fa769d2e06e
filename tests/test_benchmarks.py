"""The training loop, its data and its files, up to real runs of two processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import compare, data, evaluate, models, options, record, report
from benchmarks.processes import torchrun
from benchmarks.train import lr_factor


@pytest.fixture(scope="module")
def digits() -> data.Split:
    return data.load("digits")


def test_digits_are_split_evenly_over_the_classes_and_normalised(digits: data.Split) -> None:
    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert digits.test_x.shape == (360, 1, 8, 8)
    assert digits.classes == len(digits.train_y.unique()) == 10
    assert digits.test_y.bincount().tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    assert abs(digits.train_x.mean().item()) < 1e-5
    assert abs(digits.train_x.std().item() - 1) < 1e-5


def test_no_test_image_is_a_training_image_and_the_split_is_fixed(digits: data.Split) -> None:
    train = {image.numpy().tobytes() for image in digits.train_x}
    assert not train & {image.numpy().tobytes() for image in digits.test_x}
    again = data.load("digits")
    assert torch.equal(again.train_x, digits.train_x)
    assert torch.equal(again.test_y, digits.test_y)


def _write_idx(path: Path, values: np.ndarray) -> None:
    header = np.array([0x0800 + values.ndim, *values.shape], dtype=">i4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Files of Fashion-MNIST's form: 12 and 5 images whose 2x2 blocks are constant."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("t10k", 5)):
        small = rng.integers(0, 256, (count, 14, 14))
        _write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", small.repeat(2, 1).repeat(2, 2))
        _write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return tmp_path


def test_idx_files_are_read_limited_and_averaged_down(fashion: Path) -> None:
    whole = data.load("fashion_mnist", fashion)
    small = data.load("fashion_mnist", fashion, limit=8, downsample=2)
    assert whole.train_x.shape == (12, 1, 28, 28)
    assert small.train_x.shape == (8, 1, 14, 14)
    assert small.test_x.shape == (5, 1, 14, 14)
    assert small.train_y.tolist() == list(range(8))
    # Averages of constant blocks are the pixels themselves, whatever the normalisation.
    pixels = whole.test_x[:, :, ::2, ::2]
    scale = np.polyfit(pixels.flatten(), small.test_x.flatten(), 1)
    torch.testing.assert_close(small.test_x, float(scale[0]) * pixels + float(scale[1]))


def test_missing_files_name_the_package_that_brings_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist"):
        data.load("fashion_mnist", tmp_path)


def test_a_file_cut_short_is_refused(fashion: Path) -> None:
    path = fashion / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(ValueError, match="cut short"):
        data.load("fashion_mnist", fashion)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mnist", {}, "write one of digits, fashion_mnist"),
        ("digits", {"limit": 1438}, "1437 training images"),
        ("digits", {"downsample": 3}, "write a divisor of 8"),
    ],
)
def test_bad_arguments_say_what_to_write(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load(name, **arguments)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1437, 1000, 96])
def test_workers_see_each_sample_once_an_epoch_in_equally_many_steps(
    samples: int, size: int
) -> None:
    shards = [
        data.batches(samples, 32, rank=rank, size=size, seed=3, epoch=5) for rank in range(size)
    ]
    steps = data.steps_per_epoch(samples, 32, size)
    assert [len(shard) for shard in shards] == [steps] * size
    lengths = {len(batch) for shard in shards for batch in shard}
    assert max(lengths) <= 32
    assert max(lengths) - min(lengths) <= 1
    seen = torch.cat([batch for shard in shards for batch in shard])
    assert seen.sort().values.tolist() == list(range(samples))


def test_epochs_and_seeds_shuffle_anew_and_repeat_exactly() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(data.batches(96, 8, rank=0, size=1, seed=seed, epoch=epoch)).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(*each)) for each in ((0, 1), (0, 2), (1, 1), (1, 2))}) == 4


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 workers"):
        data.batches(3, 1, rank=0, size=4, seed=0, epoch=0)


# Parameters counted by hand: weights and biases, layer by layer.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", 65 * 64 + 65 * 64 + 65 * 10),
        ("cnn", 10 * 16 + (9 * 16 + 1) * 32 + (9 * 32 + 1) * 32 + (32 * 4 + 1) * 10),
        ("resnet20", 269_722 - 9 * 2 * 16),  # the paper's network with 1 instead of 3 channels
    ],
)
def test_models_have_the_layers_they_claim(name: str, parameters: int, digits: data.Split) -> None:
    model = models.build(name, digits)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(digits.train_x[:3]).shape == (3, 10)


def test_models_fit_other_image_sizes_and_channels() -> None:
    x, y = torch.randn(2, 3, 14, 14), torch.zeros(2, dtype=torch.long)
    split = data.Split(x, y, x, y, classes=7)
    for name in models.MODELS:
        for norm in models.NORMS:
            assert models.build(name, split, norm)(x).shape == (2, 7)


def test_only_batch_norm_brings_buffers(digits: data.Split) -> None:
    assert list(models.build("resnet20", digits, "batch").buffers())
    assert not list(models.build("resnet20", digits, "group").buffers())


def test_learning_rate_warms_up_then_falls() -> None:
    step = lr_factor("step", 0.1, 100)
    assert [step(k) for k in (0, 4, 9, 49)] == pytest.approx([0.1, 0.5, 1, 1])
    assert [step(k) for k in (50, 74, 75, 99)] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    cosine = lr_factor("cosine", 0, 100)
    assert [cosine(k) for k in (0, 50, 100)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epochs", "0"],
        ["--lr", "-1"],
        ["--period", "2.5"],
        ["--method", "hogwild"],
        ["--alpha", "1.5"],
        ["--topology", "moebius"],
    ],
)
def test_bad_options_end_the_program(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_score_counts_right_answers_over_batches() -> None:
    count = evaluate.BATCH + 3
    images, labels = torch.eye(4).repeat(count, 1)[:count], torch.arange(count) % 4
    labels[-1] = (labels[-1] + 1) % 4
    loss, correct = evaluate.score(torch.nn.Identity(), images, labels)
    right, wrong = math.log(math.e + 3) - 1, math.log(math.e + 3)
    assert correct == count - 1
    assert loss == pytest.approx((count - 1) * right + wrong, rel=1e-5)


def _epoch(**changes: float) -> record.Epoch:
    one = record.Epoch(
        epoch=1,
        step=12,
        lr=0.1,
        train_loss=0.5,
        test_loss=0.4,
        test_accuracy=0.9,
        worker_accuracy=(0.8, 0.9),
        consensus_distance=0.25,
        rounds=3,
        bytes_per_worker=60.0,
        train_seconds=1.5,
    )
    return dataclasses.replace(one, **changes)


def _result(last: record.Epoch, method: str) -> dict:
    asked = options.parse(["--method", method])
    rest = {"size": 2, "engine": "gloo", "parameters": 10, "test_images": 10, "seconds": 2.0}
    return record.result(last, asked, **rest)


def test_a_run_that_diverged_still_leaves_valid_json(tmp_path: Path) -> None:
    last = _epoch(train_loss=math.nan, consensus_distance=math.inf)
    record.append(tmp_path, last)
    record.write(tmp_path, _result(last, "dppf"))
    text = (tmp_path / record.RESULT).read_text() + (tmp_path / record.METRICS).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert record.read_metrics(tmp_path)[0]["consensus_distance"] is None
    assert record.read_result(tmp_path)["diverged"] is True
    assert "DIVERGED" in report.summary(record.read_result(tmp_path))
    assert report.draw({"dppf": record.read_metrics(tmp_path)}, tmp_path / record.REPORT)
    assert (tmp_path / record.REPORT).read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_row_for_each_method_and_means_over_seeds() -> None:
    def run(method: str, accuracy: float) -> dict:
        return _result(_epoch(test_accuracy=accuracy), method)

    view = compare.table({"sync": [run("sync", 0.9)], "dppf": [run("dppf", 0.8), run("dppf", 1)]})
    assert view.row_count == 2
    cells = [list(column.cells) for column in view.columns]
    assert cells[0] == ["sync", "dppf"]
    assert cells[1] == ["90.0 %", "90.0 ± 14.1 %"]
    assert cells[2] == ["80.0 - 90.0 %"] * 2
    assert cells[5] == ["12.5%", "12.5%"]  # 60 bytes of 12 steps x 40 bytes


@pytest.mark.timeout(150)
@pytest.mark.parametrize("method", ["sync", "dppf"])
def test_two_processes_train_measure_and_report(method: str, tmp_path: Path) -> None:
    arguments = ["--epochs=2", "--batch-size=16", "--model=mlp", f"--method={method}"]
    done = torchrun([*arguments, f"--out={tmp_path}"], workers=2, timeout=90, quiet=True)
    result = json.loads((tmp_path / "result.json").read_text())
    epochs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    steps = 2 * math.ceil(1437 / 32)
    rounds = steps if method == "sync" else steps // 4
    assert (result["workers"], result["step"], result["rounds"]) == (2, steps, rounds)
    # A ring all-reduce over two workers sends 2 (2 - 1)/2 times the model from each of them.
    assert result["bytes_per_worker"] == rounds * 4 * 8970
    assert result["sync_bytes_per_worker"] == steps * 4 * 8970
    assert result["test_accuracy"] > 0.7
    assert len(result["worker_accuracy"]) == 2
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]
    assert (epochs[1]["consensus_distance"] > 0) == (method == "dppf")
    assert (tmp_path / "report.png").stat().st_size > 0
    assert "of the 3.2 MB of sync" in done.stdout


@pytest.mark.timeout(150)
def test_a_worker_that_fails_ends_the_run_with_its_message(tmp_path: Path) -> None:
    arguments = ["--data=fashion_mnist", f"--data-dir={tmp_path}", f"--out={tmp_path}"]
    with pytest.raises(subprocess.CalledProcessError) as failure:
        torchrun(arguments, workers=2, timeout=90, quiet=True)
    assert "apt install dataset-fashion-mnist" in failure.value.stderr


def _running(argument: str) -> list[str]:
    """Command lines of the processes of this machine in which `argument` occurs."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it may end while we look
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    assert any("pytest" in line for line in lines), "this test needs /proc"
    return [line for line in lines if argument in line]


@pytest.mark.timeout(150)
def test_a_run_out_of_time_leaves_no_process_behind(tmp_path: Path) -> None:
    arguments = ["--method=sync", "--epochs=100000", f"--out={tmp_path}"]
    with pytest.raises(subprocess.TimeoutExpired):
        torchrun(arguments, workers=2, timeout=8, quiet=True)
    assert not _running(str(tmp_path))
