"""Methods and topologies refuse wrong numbers and kinds where they are given."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from consensus_opt import (
    ConsensusOptimizer,
    Force,
    Gossip,
    Method,
    MixingMatrix,
    StackedTransport,
    consensus_control,
    dppf,
    dsgd_ac,
    gossip_sgd,
    local_sgd,
    post_local,
    quadratic_sync,
)
from consensus_opt.control import KeepBelow
from consensus_opt.distance import Sketch
from consensus_opt.schedules import Linear
from consensus_opt.targets import GradientNorm, OfReference
from consensus_opt.topology import FromMatrix
from tests.problems import Case, assert_says


def over(method: Method, workers: int) -> ConsensusOptimizer:
    parameter = nn.Parameter(torch.zeros(workers, 2))
    return ConsensusOptimizer(
        torch.optim.SGD([parameter]), method, transport=StackedTransport(workers)
    )


METHODS: dict[str, Case] = {
    "mix_first in words": (
        lambda: Method(mix_first="no"),  # type: ignore[arg-type]
        TypeError,
        "mix_first is 'no' | True or False | mix_first=True",
    ),
    "accelerated in words": (
        lambda: gossip_sgd("ring", accelerated="no"),  # type: ignore[arg-type]
        TypeError,
        "accelerated is 'no' | True or False | accelerated=True",
    ),
    "lr_reference in words": (
        lambda: dsgd_ac("ring", lr_reference="0.1"),  # type: ignore[arg-type]
        TypeError,
        "reference is '0.1' | a finite number above 0 | LrPower(reference=0.1",
    ),
    "least below 0": (
        lambda: dsgd_ac("ring", 0.1, least=-0.5),
        ValueError,
        "least is -0.5 | at least 0 | least=0.01",
    ),
    "least above 1": (
        lambda: dsgd_ac("ring", 0.1, least=2.0),
        ValueError,
        "least is 2.0 | in [0, 1] | least=0.01",
    ),
    "period negative": (
        lambda: local_sgd(-4),
        ValueError,
        "period is -4 | at least 1 | local_sgd(period=4)",
    ),
    "period zero": (
        lambda: gossip_sgd("ring", 0),
        ValueError,
        "period is 0 | at least 1 | local_sgd(",
    ),
    "period of a half": (
        lambda: local_sgd(1.5),
        TypeError,
        "period is 1.5 | an integer | local_sgd(",
    ),
    "alpha zero": (lambda: dppf(0.0), ValueError, "from 0.0 to 0.0 | (0, 1] | dppf(alpha=0.1)"),
    "alpha above one": (lambda: dppf(1.5), ValueError, "1.5 | (0, 1] | dppf(alpha=0.1)"),
    "alpha negative": (lambda: dppf(-0.1), ValueError, "-0.1 | (0, 1] | dppf(alpha=0.1)"),
    "alpha nan": (lambda: dppf(math.nan), ValueError, "nan | (0, 1] | dppf(alpha=0.1)"),
    "alpha grows above one": (
        lambda: dppf(Linear(2.0, 0.5)),
        ValueError,
        "from 0.5 to 2.0 | (0, 1] | dppf(",
    ),
    "alpha a word": (lambda: dppf("a"), TypeError, "is 'a' | a number or a Schedule | write 0.5"),
    "lambda negative": (lambda: dppf(lam=-1), ValueError, "-1.0 | at least 0 | dppf(lam=0.5)"),
    "lambda infinite": (lambda: dppf(lam=math.inf), ValueError, "inf | finite | dppf(lam=0.5)"),
    "lambda nan": (lambda: dppf(lam=math.nan), ValueError, "nan | finite | dppf(lam=0.5)"),
    "schedule unknown": (
        lambda: dppf(schedule="cos"),
        ValueError,
        "'cos' | constant, linear | dppf(schedule=",
    ),
    "exchanges zero": (
        lambda: gossip_sgd("ring", exchanges=0),
        ValueError,
        "exchanges is 0 | at least 1 | exchanges=2",
    ),
    "until zero": (
        lambda: post_local(0),
        ValueError,
        "until is 0 | at least 1 | post_local(until=",
    ),
    "coefficient zero": (
        lambda: quadratic_sync(0.0),
        ValueError,
        "coefficient is 0.0 | above 0 | quadratic_sync(coefficient=0.0175)",
    ),
    "coefficient nan": (
        lambda: quadratic_sync(math.nan),
        ValueError,
        "coefficient is nan | above 0 | quadratic_sync(",
    ),
    "coefficient a word": (
        lambda: quadratic_sync("a"),
        TypeError,
        "coefficient is 'a' | above 0 | quadratic_sync(",
    ),
    "method's timing": (
        lambda: Method(timing=4),
        TypeError,
        "timing is 4 | 'next_round' | timing=Every(4)",
    ),
    "method's average": (
        lambda: Method(average="ring"),
        TypeError,
        "average is 'ring' | 'form' | AllReduce()",
    ),
    "method's force": (
        lambda: Method(force=0.1),
        TypeError,
        "force is 0.1 | 'pull' | force=Force()",
    ),
    "method's control": (
        lambda: Method(control=3),
        TypeError,
        "control is 3 | 'decide' | control=Fixed(1)",
    ),
    "gossip by a name": (
        lambda: Gossip("ring"),
        TypeError,
        "topology is 'ring' | a Topology | gossip_sgd('ring')",
    ),
    "force by a number": (
        lambda: Force(0.1),
        TypeError,
        "pull is 0.1 | a Schedule | dppf(alpha=0.1",
    ),
}
CONTROLS: dict[str, Case] = {
    "rho of a flag": (
        lambda: GradientNorm(True),
        TypeError,
        "rho is True | at least 0 | GradientNorm(rho=0.25",
    ),
    "rho in words": (
        lambda: GradientNorm("0.25"),  # type: ignore[arg-type]
        TypeError,
        "rho is '0.25' | at least 0 | GradientNorm(rho=0.25",
    ),
    "decay of one": (
        lambda: GradientNorm(decay=1.0),
        ValueError,
        "decay of phi is 1.0 | [0, 1) | write 0.99",
    ),
    "fraction of Xi_max in words": (
        lambda: OfReference("1/2", ()),  # type: ignore[arg-type]
        TypeError,
        "fraction of Xi_max is '1/2' | at least 0 | OfReference.load(0.5",
    ),
    "target nan": (
        lambda: consensus_control("ring", target=math.nan),
        ValueError,
        "target distance is nan | at least 0 | target=0.5",
    ),
    "target in words": (
        lambda: KeepBelow("phi"),  # type: ignore[arg-type]
        TypeError,
        "target is 'phi' | a number or a target | GradientNorm(rho=0.25)",
    ),
    "floor in words": (
        lambda: consensus_control("ring", at_least="phi"),  # type: ignore[arg-type]
        TypeError,
        "target is 'phi' | a number or a target | GradientNorm(rho=0.25)",
    ),
    "meter of a number": (
        lambda: consensus_control("ring", meter=512),  # type: ignore[arg-type]
        TypeError,
        "meter is 512 | a Sketch | meter=Sketch(512)",
    ),
    "meter of nothing": (
        lambda: consensus_control("ring", meter=0),  # type: ignore[arg-type]
        TypeError,
        "meter is 0 | a Sketch | meter=Sketch(512)",
    ),
    "fraction of a sketch in words": (
        lambda: Sketch(fraction="1/8"),  # type: ignore[arg-type]
        TypeError,
        "fraction '1/8' | 1 or a half of it | Sketch(fraction=1/8)",
    ),
    "a third of the parameters": (
        lambda: Sketch(fraction=1 / 3),
        ValueError,
        "0.333 | 1 or a half of it | Sketch(fraction=1/8)",
    ),
}
TOPOLOGIES: dict[str, Case] = {
    "unknown name": (
        lambda: gossip_sgd("rign"),
        ValueError,
        "'rign' is not known | complete, ring, star | pass a networkx graph",
    ),
    "a list": (
        lambda: gossip_sgd([(0, 1)]),
        TypeError,
        "from list | a name, a networkx graph | FromGraph(edges)",
    ),
    "torus that does not fit": (
        lambda: over(gossip_sgd("torus:3x3"), 8),
        ValueError,
        "8 workers | 1x8, 2x4, 4x2, 8x1 | Torus()",
    ),
    "grid that does not fit": (
        lambda: over(gossip_sgd("grid:4x*"), 6),
        ValueError,
        "6 workers | 2x3 | Grid()",
    ),
    "hypercube of six": (
        lambda: over(gossip_sgd("hypercube"), 6),
        ValueError,
        "6 workers | a power of two | BaseGraph()",
    ),
    "graph of another size": (
        lambda: over(gossip_sgd(nx.path_graph(3)), 4),
        ValueError,
        "3 ranks | does not fit 4 workers | start 3 workers",
    ),
    "disconnected graph": (
        lambda: gossip_sgd(nx.Graph([(0, 1), (2, 3)])),
        ValueError,
        "2 components: {0, 1}, {2, 3} | must be connected | (0, 2)",
    ),
    "directed graph": (
        lambda: gossip_sgd(nx.DiGraph([(0, 1), (1, 0)])),
        ValueError,
        "a directed graph | must be undirected | graph.to_undirected()",
    ),
    "graph of words": (
        lambda: gossip_sgd(nx.Graph([("a", "b")])),
        ValueError,
        "nodes {a, b} | ranks 0..n-1 | convert_node_labels_to_integers",
    ),
    "row that does not sum to one": (
        lambda: FromMatrix([[0.5, 0.4], [0.5, 0.6]]),
        ValueError,
        "row 1 of the mixing matrix | must sum to 1 | on the diagonal",
    ),
    "column that does not sum to one": (
        lambda: MixingMatrix(np.array([[1.0, 0.0], [0.5, 0.5]])),
        ValueError,
        "column 0 | must sum to 1 | on the diagonal",
    ),
}
CASES = {**METHODS, **CONTROLS, **TOPOLOGIES}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_fails_at_once_and_says_what_to_write(case: str) -> None:
    assert_says(CASES[case])
