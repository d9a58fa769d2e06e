"""Exchanges that leave an eighth of the consensus distance: plain gossip, Chebyshev's, and ours.

    python -m benchmarks.exchanges --json runs/exchanges.json

All are polynomials of one mixing matrix and cost the same messages. Chebyshev's is best for the
slowest mode (the worst case); ours for what training feeds, all modes alike (random differences).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from numpy.polynomial import chebyshev
from rich.console import Console
from rich.table import Table

from consensus_opt.acceleration import Vector, mode_factors, modes
from consensus_opt.mixing import MixingMatrix
from consensus_opt.topology import topology

Left = Callable[[MixingMatrix, int], Vector]
"""What q exchanges leave of each mode of difference."""


def plain(mixing: MixingMatrix, exchanges: int) -> Vector:
    """Powers of the eigenvalues."""
    factors: Vector = modes(mixing)[0][:-1] ** exchanges
    return factors


def of_chebyshev(mixing: MixingMatrix, exchanges: int) -> Vector:
    """``T_q(l) / T_q(1)``, with the range of the other eigenvalues mapped to [-1, 1]."""
    others = modes(mixing)[0][:-1]
    low, high = others[0], others[-1]
    at = (2 * np.append(others, 1.0) - low - high) / (high - low)
    values = chebyshev.chebval(at, np.eye(exchanges + 1)[exchanges])
    factors: Vector = values[:-1] / values[-1]
    return factors


def ours(mixing: MixingMatrix, exchanges: int) -> Vector:
    """The polynomial with the smallest steady distance."""
    return mode_factors(mixing, exchanges)[:-1]


WAYS: dict[str, Left] = {"plain": plain, "Chebyshev": of_chebyshev, "ours": ours}


def fewest(left: Left, mixing: MixingMatrix, fraction: float, worst: bool) -> int:
    """Return the fewest exchanges that leave at most ``fraction`` of the distance.

    Args:
        left: One of `WAYS`.
        mixing: A symmetric, connected W.
        fraction: Of the distance before.
        worst: For any differences, instead of random ones.
    """
    for exchanges in count(1):
        factors = np.abs(left(mixing, exchanges))
        if (factors.max() if worst else np.sqrt(np.mean(factors**2))) <= fraction:
            return exchanges
    raise AssertionError("unreachable: a connected W brings workers together")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 32, 64], help="on a ring")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    rows = [
        {"workers": n, "differences": "any" if worst else "random"}
        | {
            name: fewest(way, topology("ring").mixing(n), 1 / 8, worst)
            for name, way in WAYS.items()
        }
        for n in options.workers
        for worst in (False, True)
    ]
    table = Table(title="Exchanges on a ring that leave an eighth of the consensus distance")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "differences" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
