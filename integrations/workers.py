"""What each worker saves of its own, beside a checkpoint of the mean model.

Workers differ between rounds. A checkpoint that a framework writes holds the mean model, for
everybody; these files hold each worker's own, and let a run of the same size go on with the same
bits. A run of another size starts from the mean.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Protocol

from consensus_opt.checkpoint import read, worker_name, write
from consensus_opt.transport import Transport


class Stateful(Protocol):
    """A model, an optimizer, a scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def name(transport: Transport) -> str:
    """Return the name of this worker's file."""
    return worker_name(transport.rank, transport.size)


def save(folder: str | Path, transport: Transport, parts: dict[str, Stateful]) -> None:
    """Write this worker's file: complete or not at all. It sends no message."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {key: part.state_dict() for key, part in parts.items()}
    write(Path(folder, name(transport)), state)


def load(folder: str | Path, transport: Transport, parts: dict[str, Stateful]) -> bool:
    """Read this worker's file; without one, warn that it starts from the mean, and return False."""
    place = Path(folder, name(transport))
    if not place.exists():
        warn(place)
        return False
    state = read(place)
    for key, part in parts.items():
        part.load_state_dict(state[key])
    return True


def warn(place: object) -> None:
    """Say that a worker starts from the mean model."""
    warnings.warn(
        f"there is no {place}: this worker starts from the mean model and the optimizer state of "
        "worker 0; resume with as many workers as saved the checkpoint to continue bit for bit",
        stacklevel=3,
    )
