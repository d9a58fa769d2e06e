"""Random trainings of stacked workers, as plain values that a failing test prints.

A case is a model (odd parameters), an optimizer, a method and a list of calls in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor, nn

from consensus_opt import (
    AllReduce,
    Every,
    Fixed,
    Force,
    Gossip,
    GradientNorm,
    Method,
    OfReference,
    PostLocal,
    QuadraticSync,
    Sketch,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
    schedules,
)
from consensus_opt.topology import topology

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
]
LAYOUTS = ["plain", "plain", "permuted", "gaps", "workers last", "offset", "shared"]


@dataclass(frozen=True)
class Spec:
    """One parameter: ``shape`` of a worker's part, and how the workers' parts lie in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "plain"
    frozen: bool = False

    def make(self, n: int, seed: int, before: list[nn.Parameter]) -> nn.Parameter:
        """Return the stacked parameter, of shape ``(n, *shape)``."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        values = torch.randn(n, *self.shape, generator=generator, dtype=wide)
        place = self._place(n, before)
        return nn.Parameter(place.copy_(values.to(self.dtype)), requires_grad=not self.frozen)

    def _place(self, n: int, before: list[nn.Parameter]) -> Tensor:
        shape = (n, *self.shape)
        if self.layout == "shared" and before and self._can_share(before[-1], n):
            return before[-1].detach().view(shape)
        if self.layout == "permuted":
            inner = tuple(reversed(self.shape))
            return torch.empty(n, *inner, dtype=self.dtype).permute(
                0, *range(len(self.shape), 0, -1)
            )
        if self.layout == "gaps":
            return torch.empty(*shape, 2, dtype=self.dtype)[..., 0]
        if self.layout == "workers last":
            return torch.empty(*self.shape, n, dtype=self.dtype).movedim(-1, 0)
        if self.layout == "offset":
            return torch.empty(n + 1, *self.shape, dtype=self.dtype)[1:]
        return torch.empty(shape, dtype=self.dtype)

    def _can_share(self, other: nn.Parameter, n: int) -> bool:
        trained = other.requires_grad and not self.frozen
        fits = (
            trained
            and other.dtype == self.dtype
            and other.numel() == n * int(torch.Size(self.shape).numel())
        )
        return fits and other.is_contiguous()


SHAPES = st.one_of(
    st.just(()), st.lists(st.sampled_from([0, 1, 2, 3, 5]), min_size=1, max_size=4).map(tuple)
).filter(lambda shape: torch.Size(shape).numel() <= 60)
SPECS = st.builds(
    Spec,
    SHAPES,
    st.one_of(st.just(torch.float32), st.sampled_from(DTYPES)),
    st.sampled_from(LAYOUTS),
    st.sampled_from([False, False, False, False, True]),
)

Make = Callable[[Any], torch.optim.Optimizer]


def _optimizer(kind: str, **options: Any) -> Make:
    return functools.partial(getattr(torch.optim, kind), **options)


# eps is large because half precision has no smaller one that it can add to.
OPTIMIZERS = st.sampled_from(
    [
        _optimizer("SGD", lr=0.1),
        _optimizer("SGD", lr=0.05, momentum=0.9),
        _optimizer("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        _optimizer("SGD", lr=0.05, momentum=0.5, dampening=0.3, maximize=True, foreach=True),
        _optimizer("Adam", lr=0.03, eps=1e-3),
        _optimizer("Adam", lr=0.03, eps=1e-3, amsgrad=True, foreach=True),
        _optimizer("AdamW", lr=0.03, eps=1e-3, weight_decay=0.1),
        _optimizer("Adagrad", lr=0.1, eps=1e-3),
        _optimizer("RMSprop", lr=0.02, eps=1e-2),
        _optimizer("RMSprop", lr=0.02, eps=1e-2, momentum=0.9, centered=False),
        _optimizer("Adamax", lr=0.03, eps=1e-3),
        _optimizer("NAdam", lr=0.03, eps=1e-3),
        _optimizer("Adadelta", lr=0.5, eps=1e-3),
    ]
)

SMALL = st.integers(1, 4)
NAMES = [
    *("ring", "complete", "star", "torus", "grid", "exponential", "one_peer_exponential"),
    *("base2", "base3", "random_matching", "random_matching:3", "hypercube"),
]
FIXED = ["ring", "complete", "star", "torus", "grid"]
TIMINGS = st.one_of(
    st.builds(Every, SMALL),
    st.builds(PostLocal, st.integers(1, 6), SMALL),
    st.builds(QuadraticSync, st.floats(0.01, 0.5), SMALL),
)
STRENGTHS = st.floats(0.05, 1.0)
PULLS = st.one_of(
    STRENGTHS.map(schedules.Constant),
    st.builds(schedules.Linear, STRENGTHS, STRENGTHS),
    STRENGTHS.map(schedules.CosineDown),
    st.builds(schedules.LrPower, st.floats(0.01, 0.2), SMALL, st.floats(0, 1), st.integers(0, 5)),
)
PUSHES = st.one_of(
    st.just(schedules.Constant(0.0)),
    st.builds(schedules.Linear, STRENGTHS, STRENGTHS),
    STRENGTHS.map(schedules.CosineUp),
)
TARGETS = st.one_of(
    st.sampled_from([0.0, 0.1, 1.0, 10.0, float("inf")]),
    st.builds(GradientNorm, st.floats(0.01, 2.0), st.sampled_from([0.0, 0.5, 0.99])),
    st.just(OfReference(0.5, ((0.0, 0.5, 2.0), (0.5, 1.0, 1.0)))),
)
POLICIES = st.sampled_from(["local", "average"])


@st.composite
def averages(draw: st.DrawFn) -> AllReduce | Gossip:
    kind = draw(st.sampled_from(["all", "any", "accelerated"]))
    if kind == "all":
        return AllReduce()
    names = FIXED if kind == "accelerated" else NAMES
    return Gossip(topology(draw(st.sampled_from(names))), kind == "accelerated")


FLOORS = st.one_of(st.none(), st.floats(0.1, 5.0))
PARTS = st.one_of(
    st.tuples(st.sampled_from([(0.0, 1.0), (1, 9), (0, 1.0)]), st.none()),
    st.tuples(st.sampled_from([(0.0, 0.5), (0.25, 0.75), (0, 6), (2, 5)]), FLOORS),
)


@st.composite
def controlled(draw: st.DrawFn) -> Method:
    during, floor = draw(PARTS)
    return consensus_control(
        draw(st.sampled_from(NAMES)),
        draw(TARGETS),
        during,
        draw(st.integers(1, 5)),
        draw(SMALL),
        meter=Sketch(draw(st.sampled_from([16, 64, 512]))),
        at_least=floor,
        state=draw(POLICIES),
    )


CONTROLS = st.one_of(st.builds(Fixed, SMALL), controlled().map(lambda method: method.control))
RECIPES = st.one_of(
    st.builds(local_sgd, SMALL, POLICIES),
    st.builds(post_local, st.integers(1, 6), SMALL),
    st.builds(quadratic_sync, st.floats(0.01, 0.5), SMALL),
    st.builds(gossip_sgd, st.sampled_from(NAMES), SMALL, SMALL, state=POLICIES),
    st.builds(gossip_sgd, st.sampled_from(FIXED), SMALL, SMALL, st.just(True), POLICIES),
    controlled(),
    st.builds(dsgd_ac, st.sampled_from(NAMES), st.floats(0.01, 0.2), least=st.floats(0, 0.5)),
    st.builds(
        dppf,
        STRENGTHS,
        STRENGTHS,
        SMALL,
        st.sampled_from(sorted(schedules.SHAPES)),
        st.one_of(st.none(), st.sampled_from(NAMES)),
        SMALL,
    ),
)
METHODS: st.SearchStrategy[Method] = st.one_of(
    RECIPES,
    st.builds(
        Method,
        TIMINGS,
        averages(),
        st.builds(Force, PULLS, PUSHES),
        CONTROLS,
        POLICIES,
        st.booleans(),
    ),
)

Call = tuple[str, Any]
STEPS = st.tuples(
    st.just("step"), st.sampled_from(["all", "all", "all", "some", "none", "twice", "stale"])
)
OTHERS = st.one_of(
    st.tuples(st.just("amp"), st.booleans()),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.sampled_from(["averaged", "synchronize", "distance", "transport"]), st.none()),
    st.tuples(st.just("save and load"), st.sampled_from(["same", "new", "pickle", "deepcopy"])),
    st.tuples(st.just("add"), SPECS),
    st.tuples(st.sampled_from(["freeze", "edit", "new memory"]), st.integers(0, 3)),
    st.tuples(st.just("lr"), st.floats(0.001, 0.2)),
)
CALLS = st.integers(0, 2).flatmap(lambda kind: STEPS if kind else OTHERS)


@dataclass(frozen=True)
class Case:
    n: int
    specs: list[Spec]
    make: Make
    method: Method
    total: int
    scheduled: bool
    broadcast: bool
    calls: list[Call]


def _fits(case: Case) -> bool:
    try:
        case.method.average.validate(case.n)
        case.method.control.validate(case.total)
    except ValueError:
        return False
    return True


CASES = st.builds(
    Case,
    st.sampled_from([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9]),
    st.lists(SPECS, min_size=1, max_size=4),
    OPTIMIZERS,
    METHODS,
    st.integers(4, 20),
    st.booleans(),
    st.sampled_from([False, False, True]),
    st.lists(CALLS, min_size=6, max_size=24),
).filter(_fits)
