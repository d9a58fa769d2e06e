"""Real images as plain tensors, and the share of them that each worker sees.

The data sets fit in memory, so a "loader" here is an index: every rank computes the same
permutation of an epoch from (seed, epoch) and takes its own batches of it. Nothing is sent, no
worker sees another's samples within an epoch, and every rank makes the same number of steps, which
methods that communicate after a given number of steps rely on.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
DATA_SETS = ("digits", "fashion_mnist")


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, channels, height, width) in float32, labels (N,) in int64."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int

    def to(self, device: torch.device) -> Split:
        """The same images and labels on a device."""
        return Split(
            self.train_x.to(device),
            self.train_y.to(device),
            self.test_x.to(device),
            self.test_y.to(device),
            self.classes,
        )


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    downsample: int = 1,
) -> Split:
    """Load a data set, normalised by the mean and deviation of its training pixels.

    Args:
        name: "digits" (1,797 images of 8x8, a fixed stratified fifth of them for testing) or
            "fashion_mnist" (60,000 and 10,000 images of 28x28).
        data_dir: folder of the Fashion-MNIST files; by default where Debian's package puts them.
        limit: keep only this many training images, the first ones.
        downsample: average square blocks of this side into one pixel.

    Raises:
        ValueError: an unknown name, or a limit or a block that the images do not allow.
        FileNotFoundError: the files of Fashion-MNIST are not there.
    """
    if name not in DATA_SETS:
        raise ValueError(f"data set {name!r} is unknown; write one of {', '.join(DATA_SETS)}")
    images = _digits() if name == "digits" else _fashion_mnist(Path(data_dir or FASHION_MNIST))
    train_x, train_y, test_x, test_y = images
    if limit is not None and not 1 <= limit <= len(train_x):
        raise ValueError(
            f"limit={limit} does not fit {name}, which has {len(train_x)} training images; "
            f"write a number from 1 to {len(train_x)}, or leave it out to use all"
        )
    train_x, test_x = _shrink(train_x[:limit], downsample), _shrink(test_x, downsample)
    mean, deviation = train_x.mean(), train_x.std()
    return Split(
        (train_x - mean) / deviation,
        train_y[:limit],
        (test_x - mean) / deviation,
        test_y,
        classes=10,
    )


def batches(
    samples: int, batch_size: int, *, rank: int, size: int, seed: int, epoch: int
) -> list[Tensor]:
    """The index batches of one worker for one epoch; over all workers each sample occurs once.

    One permutation of all samples is cut into `steps * size` nearly equal batches, so no batch is
    larger than `batch_size`, none differs from another by more than one sample, and every worker
    gets `steps` of them.

    Args:
        samples: size of the training set.
        batch_size: the most samples a worker takes in one step.
        rank, size: this worker, and the number of workers.
        seed, epoch: the same on all workers; together they decide the permutation.
    """
    steps = steps_per_epoch(samples, batch_size, size)
    if samples < steps * size:
        raise ValueError(
            f"{samples} samples cannot give each of {size} workers a batch; "
            f"use at most {samples} workers or more data"
        )
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    return [torch.from_numpy(part) for part in np.array_split(order, steps * size)[rank::size]]


def steps_per_epoch(samples: int, batch_size: int, size: int) -> int:
    """Steps each of `size` workers needs for all of them to see every sample once."""
    return math.ceil(samples / (batch_size * size))


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels
    )
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    return x[train], y[train], x[test], y[test]


def _fashion_mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def images(part: str) -> Tensor:
        return _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3).float().unsqueeze(1)

    def labels(part: str) -> Tensor:
        return _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1).long()

    return images("train"), labels("train"), images("t10k"), labels("t10k")


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """Read one gzipped idx file of unsigned bytes: a magic number, the shape, then the values."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Fashion-MNIST comes with `apt install dataset-fashion-mnist`, or "
            f"give the folder of its four .gz files with --data-dir"
        )
    content = gzip.decompress(path.read_bytes())
    header = 4 * (1 + dimensions)
    magic, *shape = np.frombuffer(content[:header], dtype=">i4").tolist() or [0]
    if magic != 0x0800 + dimensions or len(content) != header + math.prod(shape):
        raise ValueError(
            f"{path} is no idx file of bytes in {dimensions} dimensions, or it was cut short; "
            f"fetch it again, unchanged"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


def _shrink(images: Tensor, block: int) -> Tensor:
    side = images.shape[-1]
    if block < 1 or side % block:
        raise ValueError(
            f"downsample={block} does not divide images of {side}x{side}; "
            f"write a divisor of {side}, or 1 to leave them as they are"
        )
    return images if block == 1 else F.avg_pool2d(images, block)
