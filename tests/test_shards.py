"""Replicas in pieces: what each rank does to its piece is what a whole worker does to all of it.

The oracle is the same training with whole replicas, as stacked workers in one process.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from consensus_opt import (
    ConsensusOptimizer,
    GradientNorm,
    Method,
    PeerError,
    RankMismatchError,
    RoundRecord,
    StackedTransport,
    Transport,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    quadratic_sync,
)
from consensus_opt.distance import Sketch
from consensus_opt.integrations.torch_distributed import TorchTransport
from tests.harness import RankFailed, run_ranks, run_ranks_loosely
from tests.problems import random_rows, same

WIDTH, STEPS = 1003, 6
TENSORS = (600, 3, 400)
CUTS = {"uneven": (0, 301, 602, 1003), "empty": (0, 0, 0, 1003)}
METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(2),
    "ring": gossip_sgd("ring"),
    "momentum_too": gossip_sgd("one_peer_exponential", state="average", exchanges=2),
    "dppf": dppf(alpha=0.2, lam=0.5, period=2),
    "dppf_gossip": dppf(alpha=0.2, lam=0.5, topology="ring", period=2),
    "mix_first": dsgd_ac("ring", lr_reference=0.2),
    "quadratic_sync": quadratic_sync(0.1, min_period=2),
}


class Workers:
    """Workers whose loss is ``sum a (x - b)^2 / 2``, with an ``a`` and ``b`` for each and step."""

    def __init__(self, workers: Sequence[int], start: int = 0, stop: int = WIDTH) -> None:
        self._workers, self._part = list(workers), slice(start, stop)
        cuts = torch.tensor([0, *TENSORS]).cumsum(0).clamp(start, stop).tolist()
        begin = random_rows(8, WIDTH)[self._workers]
        pieces = [begin[:, a:b].clone() for a, b in pairwise(cuts)]
        if len(self._workers) == 1:
            pieces = [piece[0] for piece in pieces]
        self.parameters = [nn.Parameter(piece) for piece in pieces]

    def vector(self) -> Tensor:
        return torch.cat([p.detach() for p in self.parameters], dim=-1)

    def backward(self, step: int) -> None:
        slopes = random_rows(8, WIDTH, seed=10 + step).abs()[self._workers][:, self._part]
        goals = random_rows(8, WIDTH, seed=50 + step)[self._workers][:, self._part]
        gradient = slopes * (self.vector().view_as(slopes) - goals)
        parts = gradient.split([p.shape[-1] for p in self.parameters], dim=-1)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape).clone()

    def optimizer(self, method: Method, transport: Transport, **options: Any) -> ConsensusOptimizer:
        first, *others = self.parameters
        groups = [{"params": [first]}, {"params": others, "lr": 0.05, "weight_decay": 0.1}]
        inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        options = {"total_steps": STEPS, "broadcast": False, **options}
        return ConsensusOptimizer(inner, method, transport=transport, **options)

    def train(self, optimizer: ConsensusOptimizer, steps: Sequence[int] = range(STEPS)) -> None:
        for step in steps:
            self.backward(step)
            optimizer.step()


def run(workers: Workers, method: Method, transport: Transport, **options: Any) -> dict[str, Any]:
    records: list[RoundRecord] = []
    optimizer = workers.optimizer(method, transport, telemetry=records.append, **options)
    workers.train(optimizer)
    found = {"vector": workers.vector(), "distance": optimizer.consensus_distance()}
    found["each"] = list(optimizer.consensus_distances().values())
    with optimizer.averaged():
        found["mean"] = workers.vector()
    found["restored"] = same(workers.vector(), found["vector"])
    found |= {
        "exchanges": [r.exchanges for r in records],
        "known": [r.distance for r in records if r.distance_source == "exact"],
        "radius": [r.radius for r in records if r.radius is not None],
        "steps": [r.step for r in records],
        "bytes": optimizer.bytes_sent,
    }
    optimizer.synchronize()
    return found | {"synchronized": workers.vector()}


def groups(
    across: int, inside: int, rank: int, kind: type[TorchTransport] = TorchTransport
) -> tuple[TorchTransport, TorchTransport]:
    """The same piece elsewhere, and the other pieces here; ranks of a replica follow each other."""
    replica, piece = divmod(rank, inside)
    same_piece = dist.new_group([r * inside + piece for r in range(across)], **LOCAL)
    pieces = dist.new_group([replica * inside + s for s in range(inside)], **LOCAL)
    return TorchTransport(same_piece, timeout=5), kind(pieces, timeout=5)


LOCAL = {"use_local_synchronization": True}


def real(rank: int, cuts: tuple[int, ...], methods: dict[str, Method]) -> dict[str, Any]:
    """Two replicas of two pieces: a rank holds one piece of one worker."""
    transport, shards = groups(2, 2, rank)
    cuts = (cuts[0], cuts[2], cuts[3])
    part = cuts[shards.rank], cuts[shards.rank + 1]
    return {
        name: run(Workers([transport.rank], *part), method, transport, shards=shards)
        for name, method in methods.items()
    }


def eight(rank: int, cuts: tuple[int, ...], methods: dict[str, Method]) -> dict[str, Any]:
    """Eight stacked workers of three pieces: a rank holds one piece of all of them."""
    shards = TorchTransport(timeout=5)
    part = cuts[rank], cuts[rank + 1]
    return {
        name: run(Workers(range(8), *part), method, StackedTransport(8), shards=shards)
        for name, method in methods.items()
    }


def agree(found: list[dict[str, Any]], expected: dict[str, Any], rows: list[list[int]]) -> None:
    """``rows[r]``: the workers of which rank r holds a piece; the pieces are in order of ranks."""
    for key in ("vector", "mean", "synchronized"):
        for workers in {tuple(r) for r in rows}:
            mine = [f[key] for f, r in zip(found, rows, strict=True) if tuple(r) == workers]
            whole = expected[key][list(workers)]
            actual = torch.cat([piece.view(len(workers), -1) for piece in mine], dim=-1)
            torch.testing.assert_close(actual, whole, rtol=1e-5, atol=1e-6)
    for piece in found:
        assert piece["restored"]
        assert (piece["steps"], piece["exchanges"]) == (expected["steps"], expected["exchanges"])
        for key in ("distance", "each", "known"):
            assert piece[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7)
        assert [piece[key] for key in ("distance", "known", "each")] == [
            found[0][key] for key in ("distance", "known", "each")
        ]


@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_of_two_workers_move_as_whole_workers_do(cuts: str) -> None:
    found = run_ranks(4, real, CUTS[cuts], METHODS)
    for name, method in METHODS.items():
        expected = run(Workers(range(2)), method, StackedTransport(2))
        each = [rank[name] for rank in found]
        agree(each, expected, [[0], [0], [1], [1]])
        for replica in (each[:2], each[2:]):
            assert sum(rank["bytes"] for rank in replica) == expected["bytes"] / 2
            assert replica[0]["radius"] == replica[1]["radius"]
        radii = zip(each[0]["radius"], each[2]["radius"], strict=True)
        squares = [(a**2 + b**2) / 2 for a, b in radii]
        assert [math.sqrt(s) for s in squares] == pytest.approx(expected["radius"], rel=1e-5)


@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_of_eight_workers_move_as_whole_workers_do(cuts: str) -> None:
    found = run_ranks(3, eight, CUTS[cuts], METHODS)
    for name, method in METHODS.items():
        expected = run(Workers(range(8)), method, StackedTransport(8))
        agree([rank[name] for rank in found], expected, [list(range(8))] * 3)
        assert sum(rank[name]["bytes"] for rank in found) == expected["bytes"]
        assert found[0][name]["radius"] == pytest.approx(expected["radius"], rel=1e-5)


def control(rank: int, cuts: tuple[int, ...]) -> dict[str, Any]:
    shards = TorchTransport(timeout=5)
    part = cuts[rank], cuts[rank + 1]
    found = {}
    for name, method in CONTROLS.items():
        records: list[RoundRecord] = []
        workers = Workers(range(8), *part)
        optimizer = workers.optimizer(
            method, StackedTransport(8), shards=shards, telemetry=records.append
        )
        exact = []
        for step in range(STEPS):
            workers.train(optimizer, [step])
            exact.append(optimizer.consensus_distance())
        found[name] = [(r.exchanges, r.distance, r.target) for r in records], exact
    return found


CONTROLS = {
    "constant": consensus_control("ring", target=2.0, during=(0.0, 1.0)),
    "phi": consensus_control("ring", target=GradientNorm(0.1), during=(0.0, 1.0)),
}


@pytest.mark.parametrize("cuts", CUTS)
def test_control_sees_the_distance_and_the_gradients_of_the_whole_model(cuts: str) -> None:
    found = run_ranks(3, control, CUTS[cuts])
    assert found[0] == found[1] == found[2]
    for name in CONTROLS:
        told, exact = found[0][name]
        # phi is exact: Xi is a sum of 512 signs, with a standard error below 5 %.
        assert [d for _, d, _ in told] == pytest.approx(exact, rel=0.2, abs=1e-5)
        assert max(e / t for e, (_, _, t) in zip(exact, told, strict=True)) < 1
        assert max(q for q, _, _ in told) > 1
    first = Workers(range(8))
    first.backward(0)
    gradients = torch.cat([p.grad for p in first.parameters], dim=-1)
    phi = gradients.double().square().sum(-1).mean().sqrt().item()
    assert found[0]["phi"][0][0][2] == pytest.approx(0.1 * phi, rel=1e-6)


def sketches(rank: int, cuts: tuple[int, ...]) -> list[float]:
    shards = TorchTransport(timeout=5)
    ones = torch.ones(4, WIDTH)[:, cuts[rank] : cuts[rank + 1]]
    ones *= torch.tensor([1.0, -1.0, 1.0, -1.0]).unsqueeze(-1)
    flats = [ones] if ones.numel() else []
    meters = [Sketch(512, seed) for seed in range(16)]
    return [m.measure(flats, StackedTransport(4), shards=shards).value for m in meters]


@pytest.mark.parametrize("cuts", CUTS)
def test_sketches_of_pieces_add_up_to_one_of_the_whole(cuts: str) -> None:
    """Equal pieces would seem to lie closer or wider if they had the same signs."""
    found = run_ranks(3, sketches, CUTS[cuts])
    assert found[0] == found[1] == found[2]
    mean_square = sum(value**2 for value in found[0]) / len(found[0])
    assert mean_square == pytest.approx(WIDTH, rel=0.1)


# -------------------------------------------------------------------------- agreement


def differ(rank: int, what: str) -> tuple[str, str, float]:
    """What is wrong on rank 3, the second piece of the second replica, is raised on all ranks."""
    transport, shards = groups(2, 2, rank)
    workers = Workers([transport.rank], *((0, 500) if rank % 2 == 0 else (500, WIDTH)))
    odd = rank == 3
    method = local_sgd(4 if what == "method" and odd else 2)
    begun = time.monotonic()
    try:
        if what == "layout" and odd:
            workers = Workers([transport.rank], 400, WIDTH)
        optimizer = workers.optimizer(method, transport, shards=shards)
        workers.train(optimizer, range(2))
        if what == "call":
            optimizer.synchronize() if odd else optimizer.consensus_distance()
        if what == "piece's call":
            optimizer.synchronize() if rank in (1, 3) else optimizer.consensus_distance()
    except (RankMismatchError, PeerError) as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


DIFFERENCES = {
    "layout": "parameter 1: shape (3,)|parameter 0: shape (200,)",
    "method": "period=4",
    "call": "synchronize()",
    "piece's call": "among the 2 ranks of one replica",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_differs_on_one_piece_is_raised_on_all(what: str) -> None:
    outcomes = run_ranks(4, differ, what)
    assert [kind for kind, _, _ in outcomes] == ["RankMismatchError"] * 4
    for _, text, _ in outcomes:
        assert any(part in text for part in DIFFERENCES[what].split("|"))


def resume(rank: int) -> tuple[list[int], list[Tensor]]:
    """Rank 3 alone loads an older state: all ranks go on from the furthest clock."""
    transport, shards = groups(2, 2, rank)
    workers = Workers([transport.rank], *((0, 500) if rank % 2 == 0 else (500, WIDTH)))
    optimizer = workers.optimizer(gossip_sgd("ring", period=2), transport, shards=shards)
    older = copy.deepcopy(optimizer.state_dict())
    workers.train(optimizer, range(4))
    if rank == 3:
        optimizer.load_state_dict(older)
    optimizer.synchronize()
    return [optimizer.clock], [workers.vector()]


def test_a_piece_that_fell_back_joins_the_others() -> None:
    outcomes = run_ranks(4, resume)
    assert [clock for clock, _ in outcomes] == [[4]] * 4


def uneven(rank: int, cuts: tuple[int, ...]) -> dict[str, tuple[Tensor, int]]:
    """Two workers, the second of which has half of the batches, each in as many pieces as cuts."""
    found = {}
    for name in ("local_sgd", "ring", "momentum_too"):
        for mode in ("continue", "stop"):
            transport, shards = groups(2, len(cuts) - 1, rank)
            worker, piece = divmod(rank, len(cuts) - 1)
            workers = Workers([worker], *cuts[piece : piece + 2])
            optimizer = workers.optimizer(METHODS[name], transport, shards=shards)
            with optimizer.join(mode):
                workers.train(optimizer, range(STEPS - 3 * worker))
            found[f"{name} {mode}"] = workers.vector(), optimizer.clock
    return found


def test_workers_in_pieces_may_have_different_numbers_of_batches() -> None:
    pieces, whole = run_ranks(4, uneven, (0, 301, WIDTH)), run_ranks(2, uneven, (0, WIDTH))
    for worker in range(2):
        for name, (vector, clock) in whole[worker].items():
            parts = [found[name] for found in pieces[2 * worker : 2 * worker + 2]]
            torch.testing.assert_close(torch.cat([part for part, _ in parts]), vector)
            assert [c for _, c in parts] == [clock] * 2


def die(rank: int, method: Method) -> tuple[str, float]:
    transport, shards = groups(2, 2, rank)
    workers = Workers([transport.rank], *((0, 500) if rank % 2 == 0 else (500, WIDTH)))
    optimizer = workers.optimizer(method, transport, shards=shards)
    workers.train(optimizer, range(2))
    if rank == 3:
        os._exit(1)
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 40:
            workers.train(optimizer, [2])
            shards.gather(torch.zeros(1))  # what ZeRO and FSDP do in each step
    except PeerError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


@pytest.mark.parametrize("method", [dppf(period=1), gossip_sgd("ring")])
def test_a_dead_piece_is_noticed_by_every_rank(method: Method) -> None:
    outcomes = run_ranks_loosely(4, die, method, lost=[3])
    assert not any(isinstance(outcome, RankFailed) for outcome in outcomes[:3]), outcomes
    assert all("does not answer" in text or "do not answer" in text for text, _ in outcomes[:3])


class Interrupted(TorchTransport):
    """Ctrl-C at the first word to the other pieces after ``armed``."""

    armed = False

    def gather(self, values: Tensor) -> Tensor:
        if self.armed:
            raise KeyboardInterrupt
        return super().gather(values)


def interrupt(rank: int) -> list[str]:
    transport, shards = groups(2, 2, rank, Interrupted if rank == 3 else TorchTransport)
    workers = Workers([transport.rank], *((0, 500) if rank % 2 == 0 else (500, WIDTH)))
    optimizer = workers.optimizer(dppf(period=1), transport, shards=shards)
    workers.train(optimizer, range(2))
    if isinstance(shards, Interrupted):
        shards.armed = True
    said = []
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, PeerError)) as raised:
            workers.train(optimizer, [2])
        said.append(f"{raised.type.__name__} {raised.value}")
    return said


def test_after_ctrl_c_between_pieces_no_rank_hangs_and_the_next_call_is_refused() -> None:
    outcomes = run_ranks(4, interrupt)
    assert outcomes[3][0] == "KeyboardInterrupt "
    assert all("not answer" in first for first, _ in outcomes[:3]), outcomes
    assert all("write optimizer.connect(" in second for _, second in outcomes), outcomes


def vector(optimizer: ConsensusOptimizer) -> Tensor:
    return torch.cat([p.detach() for group in optimizer.param_groups for p in group["params"]])


def copies(rank: int) -> tuple[bool, str]:
    transport, shards = groups(2, 2, rank)
    workers = Workers([transport.rank], *((0, 500) if rank % 2 == 0 else (500, WIDTH)))
    optimizer = workers.optimizer(dppf(period=1), transport, shards=shards)
    workers.train(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    pickled: ConsensusOptimizer = pickle.loads(pickle.dumps(optimizer))
    with pytest.raises(RuntimeError, match="connect") as raised:
        pickled.step()
    pickled.connect(transport, shards)
    for each in (optimizer, twin, pickled):
        for group in each.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.1)
        each.step()
    vectors = [vector(each) for each in (optimizer, twin, pickled)]
    return same(vectors[0], vectors[1]) and same(vectors[0], vectors[2]), str(raised.value)


def test_copies_know_their_pieces_or_ask_for_them() -> None:
    for equal, text in run_ranks(4, copies):
        assert equal
        assert "2 pieces" in text


def test_shards_without_a_transport_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"transport=TorchTransport\(group\)"):
        ConsensusOptimizer(
            torch.optim.SGD([parameter], lr=0.1), local_sgd(1), shards=StackedTransport(2)
        )
