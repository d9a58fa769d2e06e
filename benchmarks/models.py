"""Models small enough to train in several processes on a laptop.

Two of them (`mlp`, `cnn`) have no normalisation layers and so no buffers. `resnet20` can have
BatchNorm, whose running statistics each worker gathers alone and which therefore shows what happens
to buffers, or GroupNorm, which has none.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from benchmarks.data import Split

MODELS = ("mlp", "cnn", "resnet20")
NORMS = ("batch", "group")


def build(name: str, split: Split, norm: str = "batch") -> nn.Module:
    """A fresh model for the images of `split`: (N, channels, height, width) to (N, classes).

    Args:
        name: one of `MODELS`.
        split: gives the shape of an image and the number of classes.
        norm: "batch" or "group", used by resnet20.

    Raises:
        ValueError: an unknown name or norm.
    """
    if norm not in NORMS:
        raise ValueError(f"norm {norm!r} is unknown; write one of {', '.join(NORMS)}")
    channels, height, width = split.train_x.shape[1:]
    if name == "mlp":
        return mlp(channels * height * width, split.classes)
    if name == "cnn":
        return cnn(channels, height, width, split.classes)
    if name == "resnet20":
        return ResNet20(channels, split.classes, norm)
    raise ValueError(f"model {name!r} is unknown; write one of {', '.join(MODELS)}")


def mlp(inputs: int, classes: int, hidden: int = 64) -> nn.Module:
    """Two hidden layers: 8,970 parameters on 8x8 digits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Three 3x3 convolutions (16, 32, 32 channels; strides 1, 2, 2) and a linear layer."""
    layers: list[nn.Module] = []
    for outputs, stride in ((16, 1), (32, 2), (32, 2)):
        layers += [nn.Conv2d(channels, outputs, 3, stride, padding=1), nn.ReLU()]
        channels, height, width = outputs, -(-height // stride), -(-width // stride)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))


class ResNet20(nn.Module):
    """The CIFAR residual network with 20 layers (He et al., arXiv 1512.03385, section 4.2).

    Where a block halves the image, its shortcut takes every second pixel and adds empty channels,
    as in the paper, so that shortcuts have no parameters.
    """

    def __init__(self, channels: int, classes: int, norm: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(channels, 16, 1), _norm(16, norm), nn.ReLU())
        widths = [16] * 3 + [32] * 3 + [64] * 3
        self.blocks = nn.Sequential(
            *(_Block(a, b, norm) for a, b in zip([16, *widths], widths, strict=False))
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes) of images (N, channels, height, width)."""
        outputs: Tensor = self.head(self.blocks(self.stem(images)))
        return outputs


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.added = outputs - inputs
        self.residual = nn.Sequential(
            _conv(inputs, outputs, self.stride),
            _norm(outputs, norm),
            nn.ReLU(),
            _conv(outputs, outputs, 1),
            _norm(outputs, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = pad(shortcut, (0, 0, 0, 0, 0, self.added))
        return relu(shortcut + self.residual(x))


def _conv(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _norm(channels: int, kind: str) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)
