"""The table of exchanges that leave an eighth of the distance, against products of matrices."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import exchanges
from consensus_opt.acceleration import accelerate
from consensus_opt.mixing import Matrix, MixingMatrix
from consensus_opt.topology import topology


def product(name: str, mixing: MixingMatrix, q: int) -> Matrix:
    """What q exchanges do, as one matrix."""
    weights = mixing.weights
    if name == "plain":
        return np.linalg.matrix_power(weights, q)
    if name == "ours":
        result = np.eye(mixing.n)
        for each in accelerate(mixing, q):
            result = each.weights @ result
        return result
    low, high = np.linalg.eigvalsh(weights)[[0, -2]]
    mapped, at_one = (
        (2 * x - (low + high) * one) / (high - low)
        for x, one in ((weights, np.eye(mixing.n)), (1, 1))
    )
    before, now, before_one, now_one = np.eye(mixing.n), mapped, 1.0, at_one
    for _ in range(q - 1):  # T_{k+1} = 2 x T_k - T_{k-1}
        before, now = now, 2 * mapped @ now - before
        before_one, now_one = now_one, 2 * at_one * now_one - before_one
    return now / now_one


@pytest.mark.parametrize("name", exchanges.WAYS)
@pytest.mark.parametrize("n", [5, 16, 32])
def test_the_fewest_exchanges_are_those_of_matrix_products(n: int, name: str) -> None:
    mixing = topology("ring").mixing(n)
    for worst in (False, True):
        q = exchanges.fewest(exchanges.WAYS[name], mixing, 1 / 8, worst)
        left = [product(name, mixing, count) - 1 / n for count in (q, q - 1) if count]
        sizes = [
            np.linalg.norm(rest, 2) if worst else np.linalg.norm(rest) / math.sqrt(n - 1)
            for rest in left
        ]
        assert sizes[0] <= 1 / 8 * (1 + 1e-9)
        assert all(size > 1 / 8 for size in sizes[1:])


def test_the_table_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "exchanges.json"
    assert exchanges.main(["--workers", "16", "--json", str(file)]) == 0
    assert "Chebyshev" in capsys.readouterr().out
    random, worst = json.loads(file.read_text())
    assert [random[name] for name in exchanges.WAYS] == [21, 7, 6]
    assert [worst[name] for name in exchanges.WAYS] == [40, 8, 7]
