"""What a run is judged by: the mean model, the workers' own models, and what they sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

from benchmarks.data import Split
from benchmarks.launch import Worker
from benchmarks.record import sync_bytes
from consensus_opt import ConsensusOptimizer

BATCH = 500


def quality(model: nn.Module, optimizer: Optimizer, split: Split, worker: Worker) -> dict[str, Any]:
    """Test loss and accuracy of the mean model, accuracy of each worker, and their distance.

    Every worker has to call this, and every worker gets the same answer.
    """
    own = score(model, split.test_x, split.test_y)[1] / len(split.test_x)
    distance = optimizer.consensus_distance() if isinstance(optimizer, ConsensusOptimizer) else 0.0
    with mean_model(model, optimizer, split) as mean:
        share = slice(worker.rank, None, worker.size)
        mine = score(mean, split.test_x[share], split.test_y[share])
    losses, corrects, accuracies = zip(*worker.gather([*mine, own]), strict=True)
    images = len(split.test_x)
    return {
        "test_loss": sum(losses) / images,
        "test_accuracy": sum(corrects) / images,
        "worker_accuracy": accuracies,
        "consensus_distance": distance,
    }


@contextmanager
def mean_model(model: nn.Module, optimizer: Optimizer, split: Split) -> Iterator[nn.Module]:
    """The mean of the workers, ready to be evaluated; collective.

    With synchronous SGD each worker is the mean already.
    """
    with optimizer.averaged() if isinstance(optimizer, ConsensusOptimizer) else nullcontext():
        yield with_own_statistics(model, split.train_x)


def with_own_statistics(model: nn.Module, images: Tensor) -> nn.Module:
    """The model, or where it has BatchNorm a copy with statistics taken from some of the images.

    Averaged running statistics describe the activations of the workers, not those of their mean.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    update_bn(torch.split(images[: 4 * BATCH], BATCH), model)
    return model


@torch.no_grad()
def score(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, int]:
    """Sum of the cross-entropies and number of images that the model labels correctly."""
    model.eval()
    loss, correct = 0.0, 0
    for x, y in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True):
        outputs = model(x)
        loss += F.cross_entropy(outputs, y, reduction="sum").item()
        correct += int((outputs.argmax(1) == y).sum())
    return loss, correct


def traffic(optimizer: Optimizer, model: nn.Module, steps: int, worker: Worker) -> dict[str, Any]:
    """Rounds so far, and the bytes that a worker has sent in them (mean over the workers).

    Synchronous SGD is charged a ring all-reduce of its gradients for each step.
    """
    if isinstance(optimizer, ConsensusOptimizer):
        rounds, sent = optimizer.rounds, worker.mean(optimizer.bytes_sent)
    else:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rounds, sent = steps * (worker.size > 1), sync_bytes(parameters, worker.size, steps)
    return {"rounds": rounds, "bytes_per_worker": sent}
