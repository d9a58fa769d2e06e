"""One random training, each call of it held to the oracle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from consensus_opt import (
    AllReduce,
    ConsensusOptimizer,
    Fixed,
    GradientNorm,
    JsonLines,
    KeepBelow,
    RoundRecord,
    StackedTransport,
)
from tests.fuzz_cases import Case, Spec
from tests.fuzz_oracle import (
    LOCAL,
    Value,
    Workers,
    matrices,
    moved,
    next_due,
    real_rows,
    strength,
    value,
)
from tests.problems import same

Values = dict[Any, Value]
"""By a parameter's number, or by that and a name of its state."""


class Odd(nn.Module):
    """The parameters of a case, and buffers of floats and integers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        made: list[nn.Parameter] = []
        for seed, spec in enumerate(case.specs):
            made.append(spec.make(case.n, seed, made))
        self.weights = nn.ParameterList(made)
        self.register_buffer("mean", torch.arange(3.0 * case.n).view(case.n, 3))
        self.register_buffer("count", torch.arange(case.n))


class Run:
    """A training, and beside it the workers of the oracle."""

    def __init__(self, case: Case, log: Path) -> None:
        self.case, self.n, self.method = case, case.n, case.method
        self.model = Odd(case)
        self.records: list[RoundRecord] = []
        self.sinks = [self.records.append, JsonLines(log)]
        self.optimizer = self._wrap(case.make(list(self.model.weights)), case.broadcast)
        self.workers = Workers(self.n, case.make, self.optimizer.param_groups)
        if case.broadcast:
            self._check_broadcast()
        self.schedulers = self._schedulers() if case.scheduled else []
        self.clock = self.exchanges = self.bytes = self.steps = 0
        self.due = self._after(0)
        self.phi, self.weight, self.squares = 0.0, 0.0, 0.0
        self.held: list[int] = []

    def call(self, name: str, argument: Any) -> None:
        """Make one call, and compare what it did."""
        calls: dict[str, Callable[[Any], None]] = {
            "step": self._step,
            "amp": self._amp,
            "zero_grad": self._zero_grad,
            "averaged": self._averaged,
            "synchronize": self._synchronize,
            "distance": self._distance,
            "save and load": self._save_and_load,
            "add": self._add,
            "freeze": self._freeze,
            "lr": self._set_lr,
            "edit": self._edit,
            "new memory": self._new_memory,
            "transport": self._new_transport,
        }
        calls[name](argument)
        assert self.optimizer.clock == self.clock
        assert self.optimizer.rounds == len(self.records)
        assert self.optimizer.bytes_sent == self.bytes
        assert self.model.get_buffer("count").tolist() == list(range(self.n))

    def _wrap(self, inner: torch.optim.Optimizer, broadcast: bool) -> ConsensusOptimizer:
        return ConsensusOptimizer(
            inner,
            self.method,
            model=self.model,
            transport=StackedTransport(self.n),
            total_steps=self.case.total,
            broadcast=broadcast,
            telemetry=self.sinks,
        )

    def _schedulers(self) -> list[Any]:
        return [ExponentialLR(o, 0.8) for o in (self.optimizer, *self.workers.optimizers)]

    def _check_broadcast(self) -> None:
        for p in [*self.parameters, self.model.get_buffer("mean")]:
            assert same(p, p[:1].expand_as(p))
        with torch.no_grad():
            self.model.get_buffer("count").copy_(torch.arange(self.n))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.workers.stacked

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _after(self, step: int, lr: float | None = None) -> int:
        return next_due(self.method.timing, step, lr or self.lr, self.case.total)

    def _trainable(self) -> list[int]:
        return [i for i, p in enumerate(self.parameters) if p.requires_grad]

    # ------------------------------------------------------------------ a step

    def _backward(self, wanted: str, scale: float = 1.0) -> None:
        for i in self._trainable():
            if wanted == "some" and i % 2:
                continue
            p = self.parameters[i]
            generator = torch.Generator().manual_seed(1000 * self.clock + i)
            kind = torch.complex128 if p.is_complex() else torch.float64
            g = (torch.randn(p.shape, generator=generator, dtype=kind) * scale).to(p.dtype)
            (p * g.conj()).sum().real.backward()

    def _step(self, wanted: str) -> None:
        if wanted != "stale":
            self.optimizer.zero_grad()
        for _ in range({"none": 0, "stale": 0, "twice": 2}.get(wanted, 1)):
            self._backward(wanted)
        self._take_step()

    def _amp(self, overflow: bool) -> None:
        """As GradScaler does it, with a factor of 4."""
        self.optimizer.zero_grad()
        self._backward("all", torch.inf if overflow else 4.0)
        self.optimizer.grad_scale = torch.tensor(4.0)
        self.optimizer.found_inf = torch.tensor(float(overflow))
        self._take_step(4.0, overflow)
        del self.optimizer.grad_scale, self.optimizer.found_inf
        if overflow:
            self.optimizer.zero_grad()

    def _take_step(self, scale: float = 1.0, skip: bool = False) -> None:
        self._measure(scale)
        self.workers.take_gradients(scale)
        count, sent, lr = len(self.records), self.optimizer.bytes_sent, self.lr
        self.optimizer.step()
        assert self.optimizer.step_applied is not skip
        self.clock += 1
        due = self.n > 1 and self.clock >= self.due
        assert len(self.records) - count == int(due)
        record = self.records[-1] if due else None
        expected: Values | None
        if self.method.mix_first:
            expected = self._start() if record is None else self._round(record, lr)
            expected = self._local_after(expected, skip)
        else:
            if not skip:
                self.workers.step()
            expected = self._start(LOCAL)
            if record is not None:
                expected = self._round(record, lr, LOCAL)
        if record is not None:
            self.bytes += self.optimizer.bytes_sent - sent
        self._compare(expected)
        self.workers.follow(self.optimizer)
        for scheduler in self.schedulers:
            scheduler.step()
        for bare in self.workers.optimizers:
            lrs = [group["lr"] for group in self.optimizer.param_groups]
            assert [group["lr"] for group in bare.param_groups] == lrs

    def _measure(self, scale: float) -> None:
        """phi is made of gradients as they are at backward."""
        grads = [p.grad for p in self.parameters if p.requires_grad and p.grad is not None]
        squared = sum(float(real_rows(g).square().sum()) for g in grads) / self.n / scale**2
        if squared < torch.inf:
            self.squares += squared
            self.steps += 1

    def _start(self, roundings: float = 0.0) -> Values:
        """What the oracle's workers hold now."""
        values: Values = {}
        for i in range(len(self.parameters)):
            values[i] = value(self.workers.rows(i), roundings)
            for name, rows in self.workers.state_rows(i).items():
                values[i, name] = value(rows, roundings)
        return values

    def _local_after(self, mixed: Values | None, skip: bool) -> Values | None:
        """A local step from where a round, which came first, has led."""
        for key, each in (mixed or {}).items():
            i, name = (key, None) if isinstance(key, int) else key
            like = self.workers.rows(i) if name is None else self.workers.state_rows(i)[name]
            self.workers.put(i, each.as_tensor(like), name)
        if not skip:
            self.workers.step()
        if mixed is None:
            return None
        worst = [float(e.error.max()) for e in mixed.values() if e.error.numel()]
        values = self._start(LOCAL)
        # Through Adam's quotient an error of the moments grows by lr / eps.
        return {
            key: each.widened(1.0, 40 * max(worst, default=0.0)) for key, each in values.items()
        }

    def _round(self, record: RoundRecord, lr: float, roundings: float = 0.0) -> Values | None:
        """What a round makes of what the oracle's workers hold; None where rounding decides."""
        values, trainable = self._start(roundings), self._trainable()
        self.held = trainable
        exchanges = matrices(self.method, self.n, self.exchanges, record.exchanges)
        self._check_record(record, lr, exchanges, values)
        travelling = {k for k in values if not isinstance(k, int) and k[0] in trainable}
        if self.method.state == "local":
            travelling = set()
        mixed = dict(values)
        if record.exchanges:
            for key in [*trainable, *travelling]:
                for weights in exchanges:
                    mixed[key] = mixed[key].times(weights)
        centres = [mixed[i] for i in trainable]
        self._check_distances(record, centres, [values[i] for i in trainable])
        self.exchanges += record.exchanges
        self.due = self._after(self.clock, lr)
        if record.exchanges and (record.pull, record.push) != (1.0, 0.0):
            after = moved([values[i] for i in trainable], centres, record.pull, record.push)
            if after is None:
                return None
            mixed |= dict(zip(trainable, after, strict=True))
        return mixed

    def _is_controlled(self) -> bool:
        control = self.method.control
        if not isinstance(control, KeepBelow):
            return False
        start, end = control.during
        if isinstance(start, float):
            start *= self.case.total
        if isinstance(end, float):  # 1.0 is the end, whenever it comes
            end = end * self.case.total if end < 1 else torch.inf
        return start < self.clock <= end

    def _check_record(
        self, record: RoundRecord, lr: float, exchanges: list[Any], values: Values
    ) -> None:
        assert (record.step, record.round) == (self.clock, len(self.records))
        force, total, control = self.method.force, self.case.total, self.method.control
        assert record.pull == pytest.approx(strength(force.pull, self.clock, total, lr), abs=1e-12)
        assert record.push == pytest.approx(strength(force.push, self.clock, total, lr), abs=1e-12)
        if isinstance(control, Fixed):
            assert record.exchanges == control.exchanges
            # Each worker's share of an all-reduce is rounded down, once a buffer.
            lost = isinstance(self.method.average, AllReduce) * self.n * len(values)
            assert 0 <= self._bytes(exchanges, values) - record.bytes_sent <= lost
        elif self._is_controlled():
            self._check_control(record, control)
        else:
            assert record.exchanges in (0, 1)
        if record.distance_source == "sketch":
            self.squares, self.steps = 0.0, 0

    def _check_control(self, record: RoundRecord, control: KeepBelow) -> None:
        assert 1 <= record.exchanges <= control.most
        assert record.distance is not None
        if record.target is not None and record.exchanges < control.most:
            assert record.distance <= record.target
        if isinstance(control.target, GradientNorm):
            keep = control.target.decay**self.steps
            mean = self.squares / self.steps if self.steps else 0.0
            self.phi = keep * self.phi + (1 - keep) * mean
            self.weight = keep * self.weight + (1 - keep)
            if self.weight > 0:
                target = control.target.rho * (self.phi / self.weight) ** 0.5
                assert record.target == pytest.approx(target, rel=1e-2, abs=1e-6)

    def _bytes(self, exchanges: list[Any], values: Values) -> int:
        """What the exchanges of a round send, over all workers."""
        travelling = [k for k in values if self.method.state == "average" or isinstance(k, int)]
        total = 0
        for key in travelling:
            if (key if isinstance(key, int) else key[0]) not in self._trainable():
                continue
            each = values[key]
            width, size = each.rows.shape[1], _real_size(each.dtype)
            for weights in exchanges:
                if isinstance(self.method.average, AllReduce):
                    total += 2 * (self.n - 1) * width * max(size, 4)
                else:
                    links = int((weights != 0).sum() - (weights.diagonal() != 0).sum())
                    total += links * width * size
        return total

    def _check_distances(
        self, record: RoundRecord, centres: list[Value], starts: list[Value]
    ) -> None:
        """The radius is that of float64; so is a distance, up to the sketch's error."""
        rows = torch.cat([c.rows for c in centres], 1) if centres else torch.zeros(self.n, 0)
        error = torch.cat([c.error for c in centres], 1) if centres else rows
        noise = float(error.square().sum(1).mean().sqrt())
        if record.radius is not None:
            before = torch.cat([s.rows for s in starts], 1) if starts else rows
            radius = float((before - rows).square().sum(1).mean().sqrt())
            assert record.radius == pytest.approx(radius, rel=1e-4, abs=2 * noise)
            if record.distance_source == "exact":
                assert record.distance == pytest.approx(radius, rel=1e-4, abs=2 * noise)
        elif isinstance(self.method.average, AllReduce) and record.distance_source == "exact":
            assert record.distance == 0.0
        if record.distance_source == "sketch":
            exact = float((rows - rows.mean(0)).square().sum(1).mean().sqrt())
            self._check_sketch(record, exact, noise)

    def _check_sketch(self, record: RoundRecord, exact: float, noise: float) -> None:
        """Each of K sums of a few values is at most as many times as large (Cauchy-Schwarz)."""
        control = self.method.control
        assert isinstance(control, KeepBelow)
        assert record.distance is not None
        widths: dict[torch.dtype, int] = {}
        for i in self._trainable():
            p = self.parameters[i]
            widths[p.dtype] = widths.get(p.dtype, 0) + real_rows(p).shape[1]
        folds = sum(-(-width // control.meter.values) for width in widths.values())
        assert record.distance <= folds**0.5 * exact * (1 + 1e-4) + 10 * noise
        if folds == 1:
            assert record.distance == pytest.approx(exact, rel=1e-4, abs=10 * noise)

    def _compare(self, expected: Values | None) -> None:
        for i, p in enumerate(self.parameters):
            if expected is None:
                assert not real_rows(p).isnan().any()
                continue
            expected[i].assert_equals(p, f"parameter {i}")
            for name in self.workers.state_rows(i):
                held = self.optimizer.state[p][name]
                expected[i, name].assert_equals(held, f"{name} of parameter {i}")

    # ------------------------------------------------------------------ collective calls

    def _averaged_now(self) -> list[int]:
        taking_part = {*self._trainable(), *self.held}
        self.held = [i for i in range(len(self.parameters)) if i in taking_part]
        return self.held

    def _check_mean(self, before: list[Tensor], indices: list[int]) -> None:
        for i, (p, old) in enumerate(zip(self.parameters, before, strict=True)):
            if i in indices:
                value(old).times(_all(self.n)).assert_equals(p, f"mean of parameter {i}")
            else:
                assert same(p, old)
        rows = torch.arange(3.0 * self.n).view(self.n, 3)
        if not self.case.broadcast:
            assert torch.allclose(self.model.get_buffer("mean"), rows.mean(0).expand_as(rows))

    def _averaged(self, _: None) -> None:
        before, indices = self._bits(), self._averaged_now()
        buffer = self.model.get_buffer("mean").clone()
        with self.optimizer.averaged():
            self._check_mean(before, indices)
            with torch.no_grad():
                for tensor in [self.parameters[i] for i in indices]:
                    tensor.zero_()
                for tensor in self.model.buffers():
                    tensor.add_(1)
        assert same(self._bits(), before)
        assert same(self.model.get_buffer("mean"), buffer)

    def _synchronize(self, _: None) -> None:
        before, indices = self._bits(), self._averaged_now()
        buffer = self.model.get_buffer("mean").clone()
        self.optimizer.synchronize()
        self._check_mean(before, indices)
        self.model.get_buffer("mean").copy_(buffer)
        self.workers.follow(self.optimizer)

    def _distance(self, _: None) -> None:
        indices = self._averaged_now()
        each = self.optimizer.consensus_distances()
        assert set(each) == {f"weights.{i}" for i in indices}
        rows = [(self.parameters[i], real_rows(self.parameters[i])) for i in indices]
        for (p, x), found in zip(rows, each.values(), strict=True):
            exact = float((x - x.mean(0)).square().sum(1).mean().sqrt())
            noise = 4 * torch.finfo(p.dtype).eps * float(x.norm())
            assert found == pytest.approx(exact, rel=1e-4, abs=noise)
        whole = sum(found**2 for found in each.values()) ** 0.5
        assert self.optimizer.consensus_distance() == pytest.approx(whole, rel=1e-12)

    # ------------------------------------------------------------------ between steps

    def _bits(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def _zero_grad(self, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            assert all(p.grad is None for p in self.parameters)

    def _save_and_load(self, how: str) -> None:
        before, state = self._bits(), self.optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        if how == "same":
            self.optimizer.load_state_dict(saved)
        elif how == "new":
            groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
            self.optimizer = self._wrap(self.case.make(groups), broadcast=False)
            self.optimizer.load_state_dict(saved)
        elif how == "pickle":
            self._go_on_with(*pickle.loads(pickle.dumps((self.model, self.optimizer))))
            self.optimizer.transport = StackedTransport(self.n)
        else:
            self._go_on_with(*copy.deepcopy((self.model, self.optimizer)))
        if how != "same":
            self.held, self.schedulers, self.bytes = [], [], 0  # bytes are a process's own
        if how in ("same", "new"):
            self.workers.reload()  # torch casts some of the state
        assert same(self.optimizer.state_dict()["consensus"], saved["consensus"])
        assert same(self._bits(), before)

    def _go_on_with(self, model: Odd, optimizer: ConsensusOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.workers.replace(list(model.weights))
        self.optimizer._rounds._sinks = tuple(self.sinks)  # telemetry is not copied

    def _add(self, spec: Spec) -> None:
        p = spec.make(self.n, 100 + len(self.parameters), [])
        self.model.weights.append(p)
        self.optimizer.add_param_group({"params": [p]})
        self.workers.add(p)

    def _freeze(self, index: int) -> None:
        p = self.parameters[index % len(self.parameters)]
        if not self.workers.is_shared(p):
            p.requires_grad_(not p.requires_grad)

    def _set_lr(self, lr: float) -> None:
        for optimizer in (self.optimizer, *self.workers.optimizers):
            for group in optimizer.param_groups:
                group["lr"] = lr

    def _edit(self, index: int) -> None:
        p = self.parameters[index % len(self.parameters)]
        with torch.no_grad():
            p.add_(torch.linspace(0, 1, self.n, dtype=p.dtype).view(-1, *[1] * (p.dim() - 1)))
        self.workers.follow(self.optimizer)

    def _new_memory(self, index: int) -> None:
        p = self.parameters[index % len(self.parameters)]
        p.data = p.data.clone()
        self.workers.part(index % len(self.parameters))

    def _new_transport(self, _: None) -> None:
        self.optimizer.transport = StackedTransport(self.n)


def _all(n: int) -> Any:
    return torch.full((n, n), 1 / n, dtype=torch.float64).numpy()


def _real_size(dtype: torch.dtype) -> int:
    """Bytes of one real number; Value counts a complex one as two."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)
