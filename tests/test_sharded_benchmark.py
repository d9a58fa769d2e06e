"""benchmarks.sharded on a small model: what its table promises holds, and is judged."""

from __future__ import annotations

import pytest
import torch

from benchmarks.options import DEEPSPEED_CONFIG, parse
from benchmarks.sharded import Found, compare, train


@pytest.fixture(scope="module")
def whole() -> Found:
    return train("unsharded", "mlp", "fp32", timeout=120)


@pytest.mark.parametrize(
    "setup", ["fsdp2", "node", pytest.param("zero3", marks=pytest.mark.deepspeed)]
)
def test_pieces_follow_whole_replicas_with_half_of_the_bytes_a_rank(
    whole: Found, setup: str
) -> None:
    row = compare(train(setup, "mlp", "fp32", timeout=120), whole, "mlp", "fp32")
    assert row["good"], row
    assert row["difference"] <= 1e-5
    assert row["share_of_bytes"] == pytest.approx(0.5, abs=0.01)


def test_a_setup_that_strays_or_sends_all_is_bad(whole: Found) -> None:
    half = {**whole, "bytes_a_rank": whole["bytes_a_rank"] / 2}
    assert compare(half, whole, "mlp", "fp32")["good"]
    assert not compare(whole, whole, "mlp", "fp32")["good"]
    strayed = {**half, "weights": whole["weights"] + torch.tensor(1e-3)}
    assert not compare(strayed, whole, "mlp", "fp32")["good"]


def test_sharding_on_the_command_line_brings_its_engine() -> None:
    zero = parse(["--sharding", "zero3"])
    assert (zero.engine, zero.deepspeed_config) == ("deepspeed", DEEPSPEED_CONFIG)
    assert parse(["--sharding", "fsdp2", "--replica-size", "4"]).replica_size == 4
    with pytest.raises(SystemExit):
        parse(["--sharding", "fsdp2", "--method", "sync"])
