"""Methods: values made of four orthogonal parts, and the named recipes.

*When* a round is due (timing), *what* the workers form together (average), *how* they move with
regard to it (force), and *how much* they exchange (control). A method has no code of its own: a new
recipe is a new combination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from consensus_opt.averaging import AllReduce, Average, Gossip
from consensus_opt.checks import flag
from consensus_opt.control import Control, Fixed, KeepBelow
from consensus_opt.distance import Sketch
from consensus_opt.forces import Force
from consensus_opt.graphs import Undirected
from consensus_opt.schedules import LrPower, Schedule, schedule
from consensus_opt.state import check_policy
from consensus_opt.targets import GradientNorm, Target, as_target
from consensus_opt.timing import Every, PostLocal, QuadraticSync, Timing
from consensus_opt.topology import Topology, topology

AnyTopology: TypeAlias = str | nx.Graph | Topology
"""A topology, its name, or a networkx graph over the ranks."""


@dataclass(frozen=True)
class Method:
    """One point in the space of methods.

    Attributes:
        timing: When a round is due.
        average: How the consensus variable x_C is formed.
        force: Pull toward x_C and push away from it.
        control: How many exchanges a round makes.
        state: Whether optimizer state (momentum, moments) stays "local", is taken to its own
            "average" in the same exchanges as the parameters, or, for momentum, is "quasi_global":
            it follows the way that the parameters went in step and round.
        mix_first: Make a due round before the local step, so that gradients are applied where the
            workers have mixed: ``x <- mix(x) - update(x)``.
    """

    timing: Timing = Every(1)
    average: Average = AllReduce()
    force: Force = Force()
    control: Control = Fixed(1)
    state: str = "local"
    mix_first: bool = False

    def __post_init__(self) -> None:
        check_policy(self.state)
        object.__setattr__(self, "mix_first", flag(self.mix_first, "mix_first", "mix_first=True"))
        if self.state == "quasi_global" and self.mix_first:
            raise ValueError(
                "state is 'quasi_global', where momentum follows a step and the round after it, "
                "and mix_first=True makes the round before; write state='local' or 'average'"
            )
        parts = (
            ("timing", "next_round", "Every(4)"),
            ("average", "form", "AllReduce() or Gossip(topology('ring'))"),
            ("force", "pull", "Force()"),
            ("control", "decide", "Fixed(1)"),
        )
        for name, verb, example in parts:
            if not hasattr(part := getattr(self, name), verb):
                raise TypeError(
                    f"{name} is {part!r}; it must have {verb!r}; write {name}={example}, or take a "
                    "recipe such as local_sgd(period=4)"
                )


def local_sgd(period: int, state: str = "local") -> Method:
    """Local SGD: every ``period`` steps all workers take their mean, ``x_m <- x_A``.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Args:
        period: Steps between rounds (tau), at least 1.
        state: "average" takes momentum and moments to their mean too; "quasi_global" lets momentum
            follow the parameters.
    """
    return Method(timing=Every(period), state=state)


def post_local(until: int, period: int = 16) -> Method:
    """Post-local SGD: average after each step up to step ``until``, then every ``period`` steps.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.

    Args:
        until: The step of the switch; half of training in the paper.
        period: Steps between rounds after the switch.
    """
    return Method(timing=PostLocal(until, period))


def quadratic_sync(coefficient: float, min_period: int = 4) -> Method:
    """Local SGD whose period grows as the learning rate falls (QSR).

    ``H = max(min_period, floor((coefficient / lr)^2))``.

    Source: Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024.

    Args:
        coefficient: In units of the learning rate; 0.0175 for the paper's ViT.
        min_period: Smallest period, in steps.
    """
    return Method(timing=QuadraticSync(coefficient, min_period))


def gossip_sgd(
    topology: AnyTopology,
    period: int = 1,
    exchanges: int = 1,
    accelerated: bool = False,
    state: str = "local",
) -> Method:
    """Decentralized SGD: average with the neighbours in a graph, ``x_i <- sum_j w_ij x_j``.

    Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
    NeurIPS 2017.

    Args:
        topology: The graph, its name ("ring", "one_peer_exponential", "base2", "torus:4x2", ...)
            or a networkx graph over the ranks.
        period: Steps between rounds.
        exchanges: Exchanges in a round.
        accelerated: Weigh the exchanges of a round so that together they mix best; for a topology
            that is fixed and symmetric.
        state: "average" exchanges momentum and moments too; "quasi_global" lets momentum follow the
            parameters, for data that differ from worker to worker.
    """
    average = Gossip(_resolve(topology), accelerated)
    return Method(Every(period), average, control=Fixed(exchanges), state=state)


def consensus_control(
    topology: AnyTopology,
    target: float | Target | None = None,
    during: tuple[float, float] = (0.0, 0.5),
    most: int = 16,
    period: int = 1,
    accelerated: bool | None = None,
    meter: Sketch | None = None,
    at_least: float | Target | None = None,
    state: str = "local",
) -> Method:
    """Gossip that exchanges until the consensus distance is below its target.

    Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021.

    Args:
        topology: The graph, its name, or a networkx graph over the ranks.
        target: What Xi must not exceed: a number, or a target of :mod:`consensus_opt.targets`;
            ``0.25 phi`` (``GradientNorm(0.25)``) by default. ``math.inf`` only measures.
        during: Part of training that is controlled: floats are fractions of ``total_steps``,
            integers are steps.
        most: Most exchanges in a round.
        period: Steps between rounds.
        accelerated: Weigh exchanges that are made together so that they mix best; by default
            wherever the topology is fixed and undirected.
        meter: How Xi is measured.
        at_least: After ``during``, skip the exchanges of a round while Xi is below this.
        state: "average" exchanges momentum and moments too; "quasi_global" lets momentum follow the
            parameters, for data that differ from worker to worker.
    """
    graph = _resolve(topology)
    if accelerated is None:
        accelerated = isinstance(graph, Undirected)
    limit = GradientNorm() if target is None else as_target(target)
    floor = None if at_least is None else as_target(at_least)
    control = KeepBelow(limit, during, most, Sketch() if meter is None else meter, floor)
    return Method(Every(period), Gossip(graph, accelerated), control=control, state=state)


def dsgd_ac(
    topology: AnyTopology,
    lr_reference: float,
    power: float = 3.0,
    start: int = 0,
    least: float = 0.0,
) -> Method:
    """D-SGD whose mixing fades with the learning rate (adaptive consensus).

    ``x <- (1 - g) x + g W x`` before each local step, with
    ``g = least + (1 - least) (lr / lr_reference)^power`` after step ``start`` and g = 1 up to it.
    In the noise-dominated regime the distance then follows ``lr / sqrt(g)``.

    Source: Wang & Johansson, arXiv 2602.02899 (power 3, start after 10 epochs).

    Args:
        topology: The graph, its name, or a networkx graph over the ranks.
        lr_reference: Learning rate at which workers mix fully: the peak.
        power: How fast the mixing fades.
        start: Step from which it fades.
        least: Smallest g.
    """
    force = Force(pull=LrPower(lr_reference, power, least, start))
    return Method(Every(1), Gossip(_resolve(topology)), force, mix_first=True)


def dppf(
    alpha: float | Schedule = 0.1,
    lam: float | Schedule = 0.5,
    period: int = 4,
    schedule: str = "cosine_up",
    topology: AnyTopology | None = None,
    exchanges: int = 1,
) -> Method:
    """DPPF: pull the workers together and push them apart, around a wide valley.

    Every ``period`` steps ``x_m <- x_m + (x_A - x_m)(alpha - lambda / ||x_m - x_A||)``. The radius
    settles at ``lambda / alpha``. With a topology, the gossip average stands for x_A. The model to
    evaluate is the mean, ``with optimizer.averaged():``.

    Source: Dimlioglu & Choromanska, arXiv 2507.20424. The shape of lambda over training is decided
    here: ``lambda_t = lam (1 - cos(pi t / T)) / 2`` where ``total_steps`` is given, else constant.

    Args:
        alpha: Pull strength in (0, 1].
        lam: Final push strength, at least 0, in units of the parameters' norm.
        period: Steps between rounds (tau).
        schedule: Shape of lambda: "constant", "linear", "cosine_up" or "cosine_down".
        topology: Average over neighbours in this graph instead of over all workers.
        exchanges: Exchanges in a round, where there is a topology.
    """
    average = AllReduce() if topology is None else Gossip(_resolve(topology))
    force = Force(_constant(alpha), _shaped(lam, schedule))
    return Method(Every(period), average, force, Fixed(exchanges))


_resolve, _shaped = topology, schedule
"""The recipes name their arguments after the field's terms, which hides these two functions."""


def _constant(value: float | Schedule) -> Schedule:
    return schedule(value)
