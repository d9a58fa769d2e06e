"""What each round did, and where that is written.

A record is plain data; a sink is any callable that takes one. Records are made on every rank, from
numbers that the round had at hand anyway: telemetry sends no message, so ranks may choose their
sinks freely (usually rank 0 writes).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RoundRecord:
    """One round, as one process saw it. For stacked workers, root mean squares and totals.

    Attributes:
        step: The clock: calls of ``step()`` so far.
        round: Number of this round, from 1.
        exchanges: Exchanges that the round made.
        distance: Consensus distance Xi after the last exchange and before the force; 0 after hard
            all-reduce averaging. None where nothing measured it.
        distance_source: "exact" or "sketch".
        target: What the control kept the distance below; None where it was not on.
        radius: ``||x_m - x_C||`` before the force (x_C is the mean, or stands for it under gossip);
            None for hard averaging, which never holds both.
        pull: alpha of this round.
        push: lambda of this round.
        pushed: False where a push was due but a worker stood exactly on x_C, so that there was no
            direction to push in.
        bytes_sent: Payload that this process sent in this round.
        wait_seconds: Time that this process waited for others in this round.
    """

    step: int
    round: int
    exchanges: int
    distance: float | None
    distance_source: str | None
    target: float | None
    radius: float | None
    pull: float
    push: float
    pushed: bool
    bytes_sent: int
    wait_seconds: float


Sink = Callable[[RoundRecord], Any]
"""Anything that takes a record."""


class JsonLines:
    """Appends each record to a file, one JSON object a line.

    Args:
        path: The file; folders on the way are made. Each line is written at once, so that a run
            that was killed leaves whole lines. What is not a finite number becomes null.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"JsonLines({str(self._path)!r})"

    def __call__(self, record: RoundRecord) -> None:
        """Append one line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(asdict(record)), allow_nan=False) + "\n")


class TensorBoard:
    """Writes each number of a record as the scalar ``consensus/NAME`` at the record's step.

    Args:
        log_dir: Folder of the event files.

    Raises:
        ImportError: If the package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "telemetry.TensorBoard needs the package tensorboard, which is not installed; "
                "write pip install 'consensus-opt[report]', or use telemetry.JsonLines(path)"
            ) from error
        self._writer = SummaryWriter(str(log_dir))

    def __call__(self, record: RoundRecord) -> None:
        """Write one scalar for each known number."""
        values = asdict(record)
        step = values.pop("step")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"consensus/{name}", value, step)
        self._writer.flush()


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not know."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def tell(sinks: Sequence[Sink], record: RoundRecord) -> None:
    """Hand the record to each sink; one that fails (a full disk) gets a warning.

    The other ranks wait for this one, and a record that is lost is no reason to lose them.
    """
    for sink in sinks:
        _tell(sink, record)


def _tell(sink: Sink, record: RoundRecord) -> None:
    try:
        sink(record)
    except Exception as error:
        warnings.warn(
            f"telemetry {sink!r} raised {type(error).__name__}: {error}; training goes on, and the "
            "record of a round is missing there",
            RuntimeWarning,
            stacklevel=4,
        )


def as_sinks(telemetry: Sink | Sequence[Sink] | None) -> tuple[Sink, ...]:
    """Return the sinks as a tuple.

    Raises:
        TypeError: If one of them cannot be called.
    """
    if telemetry is None:
        return ()
    given: Any = telemetry  # a path or a class is a common slip, whatever the types say
    several = isinstance(given, Sequence) and not isinstance(given, str)
    sinks = tuple(given) if several else (given,)
    for sink in sinks:
        if not callable(sink) or isinstance(sink, type):
            raise TypeError(
                f"telemetry takes callables that accept a RoundRecord, and got {sink!r}; "
                "write telemetry=JsonLines('rounds.jsonl') or telemetry=records.append"
            )
    return sinks
