"""What each rank runs in the tests of Horovod: named checks in one job, as starting it is slow.

    horovodrun -np 4 python -m tests.horovod_worker CHECK [CHECK ...]

A check returns what happened beside what should have; test_horovod.py compares, and says why.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import horovod.torch
import torch
from torch import Tensor, nn

import consensus_opt.integrations.horovod as hvd
from consensus_opt import ConsensusOptimizer, PeerError, StackedTransport, gossip_sgd, local_sgd
from consensus_opt.topology import topology
from tests import test_disagreement as disagreement
from tests import test_parity as parity
from tests import test_uneven as uneven
from tests.launchers import attempt, report
from tests.problems import average_by_hand, flat, loss_of, mlp, random_rows, stacked, train

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Step = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]

CHECKS: dict[str, Callable[[], Any]] = {}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MEAN = local_sgd(1)
TIMEOUT = 30.0
UNEVEN = ("local_sgd_2", "ring", "one_peer")


def main(names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    report(hvd.rank(), {name: attempt(CHECKS[name]) for name in names})
    hvd.barrier()
    hvd.shutdown()


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def wrap(optimizer: Any, method: Any = MEAN, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(optimizer, method=method, timeout=TIMEOUT, **options)


@cache
def process_set(*ranks: int) -> Any:
    return hvd.add_process_set(list(ranks))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def usual() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, sgd(model)


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def both_ways(
    build: Build, step: Step = ordinary, steps: int = 6, period: int = 2, rounds: int | None = None
) -> dict[str, Any]:
    """This rank's parameters with local_sgd, and those of plain optimizers averaged by hand."""
    model, inner = build()
    optimizer = wrap(inner, local_sgd(period))
    for number in range(steps):
        step(model, optimizer, hvd.rank(), number)
    workers = [build() for _ in range(hvd.size())]
    for number in range(steps):
        for rank, (other, plain) in enumerate(workers):
            step(other, plain, rank, number)
        if (number + 1) % period == 0:
            average_by_hand([other for other, _ in workers])
    return {
        "did": flat(model),
        "should": flat(workers[hvd.rank()][0]),
        "clock": optimizer.clock,
        "rounds": optimizer.rounds,
    }


# ---------------------------------------------------------------------------- the transport


@check
def exchange() -> list[str]:
    """The exchanges whose bits differ from those of StackedTransport."""
    transport, odd = hvd.HorovodTransport(timeout=TIMEOUT), []
    rank, n = transport.rank, transport.size
    for dtype in DTYPES:
        rows = random_rows(n, 1003, dtype=dtype)
        for name in ("ring", "star", "one_peer_exponential", "random_matching"):
            transport.chunk_bytes = 2048 if name == "ring" else 8 << 20
            mixing = topology(name).mixing(n, 1)
            mine, all_rows = rows[rank].clone(), rows.clone()
            transport.exchange(mine, mixing)
            StackedTransport(n).exchange(all_rows, mixing)
            odd += [] if torch.equal(mine, all_rows[rank]) else [f"{name} {dtype}"]
    return odd


@check
def mean() -> list[tuple[Tensor, Tensor]]:
    transport, pairs = hvd.HorovodTransport(timeout=TIMEOUT), []
    transport.chunk_bytes, transport.largest_sum = 512, 400
    for dtype in DTYPES:
        rows = random_rows(transport.size, 1003, dtype=dtype)
        mine = rows[transport.rank].clone()
        transport.mean(mine)
        pairs.append((mine, rows.double().mean(0).to(dtype)))
    return pairs


@check
def broadcast_and_gather() -> bool:
    transport = hvd.HorovodTransport(timeout=TIMEOUT)
    transport.chunk_bytes = 100
    for dtype in (*DTYPES, torch.int64, torch.bool):
        rows = (random_rows(transport.size, 77) * 3).to(dtype)
        mine = rows[transport.rank].clone()
        gathered = transport.gather(mine)
        transport.broadcast(mine, transport.size - 1)
        if not torch.equal(gathered, rows) or not torch.equal(mine, rows[-1]):
            return False
    return True


@check
def trajectories() -> dict[str, Tensor]:
    """The final parameters with methods of tests/test_parity.py."""
    found = {}
    for name in ("ring", "one_peer", "matching", "local_sgd", "dppf"):
        model = parity.make_model()
        inner = parity.sgd(list(model.parameters()))
        optimizer = wrap(inner, parity.METHODS[name], total_steps=parity.STEPS)
        for step in range(parity.STEPS):
            optimizer.zero_grad()
            parity.loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        found[name] = flat(model)
    return found


@check
def half_precision_models() -> dict[str, bool]:
    same = {}
    for dtype in (torch.float16, torch.bfloat16):
        rows = random_rows(hvd.size(), 501, dtype=dtype)
        parameter = nn.Parameter(rows[hvd.rank()].clone())
        parameter.grad = torch.zeros_like(parameter)
        ours = wrap(torch.optim.SGD([parameter], lr=0.0), gossip_sgd("ring"), broadcast=False)
        expected, oracle = stacked(rows, gossip_sgd("ring"))
        for _ in range(3):
            ours.step()
            oracle.step()
        same[str(dtype)] = torch.equal(parameter, expected[hvd.rank()])
    return same


@check
def process_set_of_two() -> dict[str, Any]:
    own = [process_set(0, 2), process_set(1, 3)][hvd.rank() % 2]
    transport = hvd.HorovodTransport(own, timeout=TIMEOUT)
    values = torch.tensor([float(hvd.rank())])
    transport.broadcast(sent := values.clone(), source=1)
    transport.exchange(mixed := values.clone(), topology("ring").mixing(2, 0))
    return {
        "place": (transport.rank, transport.size),
        "gather": transport.gather(values).flatten().tolist(),
        "broadcast": sent.item(),
        "exchange": mixed.item(),
    }


@check
def gradients_inside_nodes_and_models_across() -> dict[str, Any]:
    """Nodes of two ranks train with Horovod's gradient averaging; models meet across nodes."""
    nodes = [process_set(0, 1), process_set(2, 3)]
    across = [process_set(0, 2), process_set(1, 3)]
    models = []
    for wrapper in (ConsensusOptimizer, hvd.DistributedOptimizer):
        model = mlp()
        node, meet = nodes[hvd.rank() // 2], across[hvd.rank() % 2]
        inner = horovod.torch.DistributedOptimizer(
            sgd(model), model.named_parameters(), process_set=node
        )
        if wrapper is ConsensusOptimizer:
            transport = hvd.HorovodTransport(meet, timeout=TIMEOUT)
            optimizer = ConsensusOptimizer(inner, local_sgd(2), transport=transport)
        else:
            optimizer = wrap(inner, local_sgd(2), process_set=meet)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            if wrapper is ConsensusOptimizer:
                optimizer.step()
                continue
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        models.append(flat(model))
    return {"did": models, "should": _two_nodes_by_hand()}


def _two_nodes_by_hand() -> Tensor:
    nodes = [usual() for _ in range(2)]
    for step in range(4):
        for number, (model, optimizer) in enumerate(nodes):
            optimizer.zero_grad()
            for rank in (2 * number, 2 * number + 1):
                (loss_of(model, rank, step) / 2).backward()
            optimizer.step()
        if step % 2:
            average_by_hand([model for model, _ in nodes])
    return flat(nodes[hvd.rank() // 2][0])


@check
def refusals() -> dict[str, str]:
    others = [process_set(1, 3), process_set(0, 2)][hvd.rank() % 2]
    wrong: dict[str, dict[str, Any]] = {
        "foreign": {"process_set": others},
        "unknown": {"process_set": hvd.ProcessSet([0, 1, 2])},
        "timeout": {"timeout": 0},
        "chunk": {"chunk_bytes": 1 << 30},
    }
    return {name: error_of(hvd.HorovodTransport, ValueError, **w) for name, w in wrong.items()}


def error_of(call: Callable[..., Any], kind: type[Exception], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return "none"


@check
def late_peer() -> dict[str, Any]:
    """Rank 1 does not come while the others wait; it is in the barrier after that."""
    transport = hvd.HorovodTransport(timeout=TIMEOUT)
    transport.timeout = 2.0  # from here on: a busy machine may need longer to make one
    found: dict[str, Any] = {}
    if hvd.rank() != 1:
        try:
            transport.mean(torch.ones(3))
        except PeerError as error:
            elastic = isinstance(error, hvd.HorovodInternalError)
            found = {"ranks": error.ranks, "text": str(error), "elastic": elastic}
    hvd.barrier()
    return found


@check
def uneven_data() -> dict[str, Any]:
    """What each of these methods does where ranks have different numbers of batches."""
    batches = uneven.BATCHES["all at different steps"]
    return {
        **{n: uneven.train_uneven(hvd.rank(), n, batches, timeout=TIMEOUT) for n in UNEVEN},
        "stop": uneven.stop_with_the_first(hvd.rank(), 1, batches)["stopped"],
    }


@check
def parted() -> dict[str, Any]:
    """Rank 1 skips a step; has other parameters; and leaves its loop before the others."""
    seen: dict[str, Any] = {
        "skipped": uneven.skip_a_step(hvd.rank(), "local_sgd")[-1],
        "mismatch": disagreement.add_a_group_alone(hvd.rank())[0],
        "left": (),
    }
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), gossip_sgd("ring"), timeout=TIMEOUT)
    optimizer.transport.timeout = 2.0  # type: ignore[attr-defined]
    train(model, optimizer, range(2), hvd.rank())
    if hvd.rank() != 1:
        try:
            train(model, optimizer, range(2, 4), hvd.rank())
        except PeerError as error:
            seen["left"] = error.ranks, str(error)
    hvd.barrier()
    return seen


# ---------------------------------------------------------------------------- Horovod's habits


@check
def arguments_for_gradients() -> dict[str, str]:
    wrong = {
        "compression": hvd.Compression.fp16,
        "op": hvd.Adasum,
        "gradient_predivide_factor": 2.0,
        "backward_passes_per_step": 0,
    }
    return {name: error_of(wrap, ValueError, usual()[1], **{name: w}) for name, w in wrong.items()}


@check
def accepted_arguments() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        return usual()

    model, inner = build()
    optimizer = hvd.DistributedOptimizer(
        inner,
        model.named_parameters(),
        hvd.Compression.none,
        2,
        hvd.Average,
        1.0,
        0,
        2,
        True,
        hvd.global_process_set,
        method=MEAN,
        timeout=TIMEOUT,
    )
    train(model, optimizer, range(2), hvd.rank())
    return {"did": flat(model), "should": both_ways(build, steps=2, period=1)["should"]}


@check
def synchronize_before_clipping() -> dict[str, Any]:
    def clipped(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if isinstance(optimizer, hvd.DistributedOptimizer):
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return both_ways(usual, clipped)


@check
def synchronize_models() -> dict[str, Any]:
    model, inner = usual()
    optimizer = wrap(inner, local_sgd(100))
    train(model, optimizer, range(3), hvd.rank())
    apart = optimizer.consensus_distance()
    optimizer.synchronize_models()
    return {"apart": apart, "together": optimizer.consensus_distance(), "rounds": optimizer.rounds}


@check
def state_only_on_some_ranks() -> dict[str, Any]:
    """What an elastic reset leaves: rank 0 has Adam's state, the others are new."""
    model = mlp()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = wrap(inner)
    if hvd.rank() == 0:
        train(model, inner, range(3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    steps = [float(state["step"]) for state in inner.state.values()]
    moments = torch.cat([state["exp_avg"].flatten() for state in inner.state.values()])
    return {"clock": optimizer.clock, "steps": steps, "moments": moments, "model": flat(model)}


# ---------------------------------------------------------------------------- rows of the cases


@check
def r014() -> dict[str, bool]:
    first, second = mlp(0, 6, 6), mlp(1)
    both = [wrap(sgd(net), gossip_sgd("ring")) for net in (first, second)]
    begun, before = flat(first), flat(second)
    for step in range(3):
        both[0].zero_grad()
        loss_of(nn.Sequential(first, second), hvd.rank(), step).backward()
        both[0].step()
    filled = all(p.grad is not None for p in second.parameters())
    moved, same = not torch.equal(flat(first), begun), torch.equal(flat(second), before)
    return {"B has gradients": filled, "A moved": moved, "B is untouched": same}


@check
def r015() -> dict[str, Any]:
    def take(model: nn.Module, optimizers: Any, rank: int, step: int) -> None:
        ordinary(model, optimizers[step // 2 % 2], rank, step)

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        last = list(model[2].parameters())
        return [sgd(model), torch.optim.SGD(last, lr=0.05, momentum=0.5)]

    model = mlp()
    wrapped = [wrap(inner) for inner in optimizers(model)]
    workers = [mlp() for _ in range(hvd.size())]
    plain = [optimizers(worker) for worker in workers]
    for step in range(8):
        take(model, wrapped, hvd.rank(), step)
        for rank, worker in enumerate(workers):
            take(worker, plain[rank], rank, step)
        average_by_hand([worker if step // 2 % 2 == 0 else worker[2] for worker in workers])
    return {"did": flat(model), "should": flat(workers[hvd.rank()])}


@check
def r016() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
        return model, torch.optim.SGD(groups, lr=0.1)

    return both_ways(build)


@check
def r018() -> dict[str, Any]:
    """Three epochs of 5 batches, a step after each second one; what is left goes on."""

    def accumulate(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        for number in (2 * step, 2 * step + 1):
            loss_of(model, rank, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = both_ways(usual, accumulate, steps=7)
    model, inner = usual()
    optimizer = wrap(inner, local_sgd(2), backward_passes_per_step=2)
    passes = 0
    for epoch in range(3):
        for number in range(5):
            loss_of(model, hvd.rank(), 5 * epoch + number).backward()
            passes += 1
            if passes % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {**found, "did": flat(model), "rounds": optimizer.rounds, "passes": passes}


@check
def r019() -> dict[str, Any]:
    def drop_one(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        if step == 2 and isinstance(optimizer, hvd.DistributedOptimizer):
            loss_of(model, rank, 99).backward()
        ordinary(model, optimizer, rank, step)

    return both_ways(usual, drop_one)


@check
def r020() -> dict[str, Any]:
    records: list[Any] = []
    model, inner = usual()
    optimizer = wrap(inner, gossip_sgd("ring", period=3), telemetry=records.append)
    train(model, optimizer, range(7), hvd.rank())
    sent = [record.bytes_sent for record in records]
    return {"steps": [r.step for r in records], "bytes": sent, "numel": flat(model).numel()}


class PlainState(torch.optim.Optimizer):
    """Keeps an int, a bool, a None, a float and a tensor; needs two arguments."""

    def __init__(self, params: Any, lr: float, mark: int) -> None:
        super().__init__(params, {"lr": lr, "mark": mark})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", group["mark"])
                state.setdefault("odd", bool(group["mark"] % 2))
                state.setdefault("nothing", None)
                state.setdefault("share", group["mark"] / 4)
                state.setdefault("last", torch.zeros_like(p)).copy_(p.grad)
                state["count"] += 1
                p.sub_(p.grad, alpha=group["lr"])


@check
def r022() -> dict[str, Any]:
    model = mlp()
    inner = PlainState(model.parameters(), 0.1, mark=hvd.rank())
    optimizer = wrap(inner, local_sgd(100))
    train(model, optimizer, range(2), hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = inner.state[next(model.parameters())]
    shared = hvd.HorovodTransport(timeout=TIMEOUT).gather(state["last"].flatten())
    plain = {key: value for key, value in state.items() if key != "last"}
    return {"plain": plain, "last": bool((shared == shared[0]).all())}


@check
def r023() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, sgd(model, momentum=0.0)

    model, inner = build()
    optimizer = wrap(inner)
    before = flat(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    still = optimizer.clock == optimizer.rounds == 0 and torch.equal(flat(model), before)
    return {**both_ways(build), "still": still, "state": len(inner.state)}


@check
def r024() -> dict[str, Any]:
    model = mlp()
    optimizer = wrap(sgd(model, foreach=None, maximize=False, differentiable=False))
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer, range(2), hvd.rank())
    after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {"before": before, "after": after}


@check
def r026() -> dict[str, Any]:
    model = mlp(seed=hvd.rank())
    options = {"lr": 0.1 * (hvd.rank() + 1), "momentum": 0.1 * (hvd.rank() + 1)}
    optimizer = wrap(sgd(model, **options), local_sgd(100), broadcast=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    group = optimizer.param_groups[0]
    return {
        "given": options,
        "now": {"lr": group["lr"], "momentum": group["momentum"]},
        "model": torch.equal(flat(model), flat(mlp(seed=1))),
    }


@check
def r027() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)

    model, inner = build()
    frozen, optimizer = flat(model[0]), wrap(inner)
    train(model, optimizer, range(2), hvd.rank())
    same = torch.equal(flat(model[0]), frozen) and model[0].weight.grad is None
    return {**both_ways(build), "frozen": same}


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.usual, self.other, self.use_other = nn.Linear(6, 3), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.usual(x)
        return hidden + self.other(x) if self.use_other else hidden


@check
def r028() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = TwoBranches()
        return model, sgd(model)

    def branch(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        model.use_other = rank == 0 and step == 1
        ordinary(model, optimizer, rank, step)

    return both_ways(build, branch)


@check
def r030() -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, PlainState(model.parameters(), 0.1, mark=3)

    inner = build()[1]
    return {**both_ways(build), "same": wrap(inner).inner is inner}


class Noam:
    """Owns an optimizer and sets its learning rate; not an Optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * self.steps**-0.5
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class DuckNoam(Noam):
    """The same with what an optimizer has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@check
def r031() -> dict[str, Any]:
    def build() -> tuple[nn.Module, Any]:
        model, inner = usual()
        return model, DuckNoam(inner)

    return {**both_ways(build), "text": error_of(wrap, TypeError, Noam(usual()[1]))}


class Mine(hvd.DistributedOptimizer):
    """A user's own kind: counts, and halves the gradients first."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


@check
def r032() -> dict[str, Any]:
    def halved(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
        optimizer.zero_grad()
        (loss_of(model, rank, step) / 2).backward()
        optimizer.step()

    found = both_ways(usual, halved)
    model, inner = usual()
    mine = Mine(inner, method=local_sgd(2), timeout=TIMEOUT)
    hvd.broadcast_optimizer_state(mine, 0)
    uncounted = mine.clock
    train(model, mine, range(6), hvd.rank())
    return {**found, "did": flat(model), "calls": mine.calls, "uncounted": uncounted}


@check
def r034() -> dict[str, Any]:
    """All that the wrapper offers, and the inner optimizer alone beside it."""
    model, inner = usual()
    optimizer = wrap(inner, gossip_sgd("ring"), model=model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.synchronize_models()
    with optimizer.averaged():
        inside = flat(model)
    alone, plain = usual()
    train(alone, plain, range(4))
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for twin in twins:
        twin.step()
    return {
        "twins": [(type(twin).__name__, twin.clock) for twin in twins],
        "size": (optimizer.transport.rank, optimizer.transport.size),
        "same": [torch.equal(flat(alone), found) for found in (flat(model), inside)],
        "distance": optimizer.consensus_distance(),
        "bytes": optimizer.bytes_sent,
        "loaded": optimizer.load_state_dict(optimizer.state_dict()),
    }


def end_on_rank_1(how: str) -> None:
    """Rank 1 ends the program in its third step; the others report what they see."""
    torch.set_num_threads(1)
    hvd.init()
    model = mlp()
    optimizer = ConsensusOptimizer(sgd(model), gossip_sgd("ring"), timeout=TIMEOUT)
    train(model, optimizer, range(2), hvd.rank())
    if hvd.rank() == 1:
        report(1, {})
        if how == "raise":
            raise KeyError("on purpose")
        sys.exit(1)
    try:
        train(model, optimizer, range(2, 6), hvd.rank())
    except PeerError as error:
        report(hvd.rank(), (error.ranks, str(error)))
        raise


if __name__ == "__main__":
    if sys.argv[1] in ("exit", "raise"):
        end_on_rank_1(sys.argv[1])
    else:
        main(sys.argv[1:])
