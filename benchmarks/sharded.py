"""Replicas in pieces against whole ones: the same trajectory, a part of the bytes and memory.

    python -m benchmarks.sharded --json runs/sharded.json

Four ranks are two replicas of two ranks, under DeepSpeed's ZeRO stages 1 to 3, under `fully_shard`,
and as nodes of two ranks with DistributedDataParallel inside; each is compared to two whole
replicas on two ranks, which take the batches of two ranks each. Differences of the final
parameters are relative to the largest of them: at most 1e-5 in fp32. In bf16 engines round at other
places, and 2e-2 is allowed. BatchNorm normalizes with the batch of a rank, so that for the
ResNet-50 only bytes and memory are compared. The exit status is 1 where a setup does worse.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import launchers
from benchmarks.sharded_worker import MODELS, PIECES, SETUPS

ALLOWED = {"fp32": 1e-5, "bf16": 2e-2}
SHARDED = SETUPS[1:]
CASES = (
    *(("mlp", "fp32", setup) for setup in SHARDED),
    *(("mlp", "bf16", setup) for setup in SHARDED),
    *((model, "fp32", setup) for model in ("vit", "resnet50") for setup in ("zero3", "fsdp2")),
)

Found = dict[str, Any]


def train(
    setup: str, model: str, dtype: str, extra: Sequence[str] = (), timeout: float = 600.0
) -> Found:
    """Train under torchrun; returns what the ranks found, and the parameters of each replica.

    Raises:
        LaunchError: a rank failed, or they were not done in time.
    """
    ranks = 2 if setup == "unsharded" else 2 * PIECES
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--setup", setup, "--model", model, "--dtype", dtype, "--out", folder, *extra]
        module = "benchmarks.sharded_worker"
        ended = launchers.run("torchrun", ranks, module, arguments, timeout)
        if ended.status:
            raise launchers.LaunchError(
                f"{setup} ended with status {ended.status}:\n{ended.output[-6000:]}"
            )
        each = [json.loads(Path(folder, f"rank-{r}.json").read_text()) for r in range(ranks)]
        vectors = torch.stack([torch.load(Path(folder, f"{m}.pt")) for m in range(2)])
    return {
        "weights": vectors,
        "rounds": each[0]["rounds"],
        "distance": each[0]["distance"],
        "parameters": each[0]["parameters"],
        "bytes_a_rank": max(rank["bytes_sent"] for rank in each),
        "peak_mb_a_rank": max(rank["peak_mb"] for rank in each),
    }


def compare(found: Found, whole: Found, model: str, dtype: str) -> Found:
    """How far a setup is from whole replicas, and whether it keeps what is promised."""
    expected = whole["weights"]
    difference = (found["weights"] - expected).abs().max().item() / expected.abs().max().item()
    share = found["bytes_a_rank"] / whole["bytes_a_rank"]
    exact = model != "resnet50"
    good = share <= 1.02 / PIECES and (not exact or difference <= ALLOWED[dtype])
    return {
        **{key: value for key, value in found.items() if key != "weights"},
        "difference": difference if exact else None,
        "share_of_bytes": share,
        "peak_mb_unsharded": whole["peak_mb_a_rank"],
        "bytes_unsharded": whole["bytes_a_rank"],
        "good": good,
    }


def show(results: dict[str, Found]) -> None:
    """Print one row for each setup."""
    table = Table(title="Two replicas of two ranks, beside two whole replicas on two ranks")
    table.add_column("model, precision, setup")
    for column in ("difference", "MB sent a rank", "whole", "peak MB a rank", "whole"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        difference = "-" if row["difference"] is None else f"{row['difference']:.1e}"
        cells = [difference]
        cells += [f"{row[key] / 1e6:.2f}" for key in ("bytes_a_rank", "bytes_unsharded")]
        cells += [f"{row[key]:.0f}" for key in ("peak_mb_a_rank", "peak_mb_unsharded")]
        table.add_row(name if row["good"] else f"[bold red]{name}[/]", *cells)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, one after the other; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--setups", nargs="+", choices=SHARDED, default=list(SHARDED))
    parser.add_argument("--dtypes", nargs="+", choices=ALLOWED, default=list(ALLOWED))
    parser.add_argument("--layers", type=int, default=12, help="of the ViT")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    whole: dict[tuple[str, str], Found] = {}
    results = {}
    for model, dtype, setup in CASES:
        if model not in options.models or setup not in options.setups:
            continue
        if dtype not in options.dtypes:
            continue
        extra = ["--layers", str(options.layers)]
        extra += ["--steps", "6"] if model == "mlp" else ["--steps", "4", "--batch", "2"]
        with Console().status(f"{model} {dtype} {setup}"):
            if (model, dtype) not in whole:
                whole[model, dtype] = train("unsharded", model, dtype, extra)
            found = train(setup, model, dtype, extra)
        results[f"{model} {dtype} {setup}"] = compare(found, whole[model, dtype], model, dtype)
    show(results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(row["good"] for row in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
