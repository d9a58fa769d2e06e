"""A tiny vision transformer and images that it can learn, for the tests of training frameworks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

CLASSES = 3


def vit(seed: int = 0, dropout: float = 0.0) -> ViTForImageClassification:
    torch.manual_seed(seed)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=dropout,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=CLASSES,
        )
    )


class Images(Dataset[dict[str, Tensor]]):
    """Noise over one of three patterns, which is the label."""

    def __init__(self, count: int = 96, seed: int = 0) -> None:
        patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(7))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 1, 8, 8, generator=generator)
        self.images = patterns[self.labels] + 0.3 * noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def loss_on(model: Any, data: Images) -> float:
    """Mean loss of a plain model in evaluation mode."""
    with torch.no_grad():
        loss: Tensor = model.eval()(pixel_values=data.images, labels=data.labels).loss
    return loss.item()
