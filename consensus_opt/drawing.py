"""A picture of a topology: who talks to whom, and how fast differences vanish.

Phases of a time-varying topology are drawn in one graph, in colours of their own. matplotlib's
pyplot is not used: it would need a display, or change the settings of the program around it.
"""

from __future__ import annotations

import math
from itertools import cycle as repeated
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from consensus_opt.graphs import Grid, Star, Torus
from consensus_opt.topology import Topology
from consensus_opt.topology_profile import FRACTIONS, accelerated_left, plain_left

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#4c4c4c")
_LOWEST = 1e-3
_MOST_PHASES = 12
_MOST_ARROWS = 64
_EXCHANGES = (12, 64)


def draw(graph: Topology, n: int, path: Path) -> None:
    """Write a PNG of the graph and of its mixing curves.

    Raises:
        ValueError: If ``path`` does not end in ".png", or the topology does not fit n workers.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"the picture is {str(path)!r}; it must end in .png; write ring.png")
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_graph(left, graph, n)
    _draw_curves(right, graph, n)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_graph(axes: Any, graph: Topology, n: int) -> None:
    cycle = graph.cycle(n)
    shown = min(cycle or 3, _MOST_PHASES)
    places = _places(graph, n)
    small = n > 40
    size = 30 if small else 260
    for phase, colour in zip(range(shown), repeated(_COLOURS), strict=False):
        weights = graph.mixing(n, phase).weights
        links = nx.DiGraph(weights.T - np.diag(weights.diagonal()))
        one_way = not np.allclose(weights, weights.T) and n <= _MOST_ARROWS
        style = {"arrows": True, "arrowsize": 6 if small else 9} if one_way else {"arrows": False}
        drawn = links if one_way else links.to_undirected()
        nx.draw_networkx_edges(
            drawn, places, ax=axes, edge_color=colour, width=0.9, node_size=size, alpha=0.8, **style
        )
        axes.plot([], [], color=colour, label=f"phase {phase}")
    nodes = nx.empty_graph(n)
    nx.draw_networkx_nodes(nodes, places, ax=axes, node_size=size, node_color="#e8e8e8")
    if not small:
        nx.draw_networkx_labels(nodes, places, ax=axes, font_size=8)
    if shown > 1:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.02)}
        axes.legend(**below, ncols=6, frameon=False, fontsize=8)
    phases = "" if cycle == 1 else f", {shown} of {cycle or 'endless'} phases"
    axes.set_title(f"{graph.name}, {n} worker{'s' * (n > 1)}{phases}", loc="left", fontsize=11)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _places(graph: Topology, n: int) -> dict[int, tuple[float, float]]:
    if isinstance(graph, Torus | Grid):
        return _on_a_sheet(*graph.sides(n), bend=0.5 * isinstance(graph, Torus))
    around = range(1, n) if isinstance(graph, Star) else range(n)
    turns = {rank: 2 * math.pi * i / max(1, len(around)) for i, rank in enumerate(around)}
    circle = {rank: (math.sin(turn), math.cos(turn)) for rank, turn in turns.items()}
    return {0: (0.0, 0.0), **circle}


def _on_a_sheet(rows: int, columns: int, bend: float) -> dict[int, tuple[float, float]]:
    """Place ranks row by row; a bent sheet shows the links between its opposite sides."""
    places = {}
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        across, down = 2 * column / max(1, columns - 1) - 1, 2 * row / max(1, rows - 1) - 1
        places[rank] = (column - bend * down**2, bend * across**2 - row)
    return places


def _draw_curves(axes: Any, graph: Topology, n: int) -> None:
    plain = plain_left(graph, n)
    curves = {"one after the other": plain, "accelerated": accelerated_left(graph, n)}
    least, most = _EXCHANGES
    last = next((t for t in range(least, most) if plain(t).random < FRACTIONS[-1]), most)
    for (label, left), colour in zip(curves.items(), _COLOURS, strict=False):
        if left is None:
            continue
        points = [left(t) for t in range(last + 1)]
        for kind, dashes in (("random", "-"), ("worst", "--")):
            y = [max(getattr(each, kind), _LOWEST / 10) for each in points]
            legend = f"{label}, {kind}"
            axes.plot(y, dashes, color=colour, label=legend, linewidth=1.3, marker=".")
    for fraction in FRACTIONS:
        axes.axhline(fraction, color="#999999", linewidth=0.6)
        where = (last, fraction)
        axes.annotate(f"1/{round(1 / fraction)}", where, fontsize=8, va="bottom", ha="right")
    axes.set_yscale("log")
    axes.set(xlim=(0, last), ylim=(_LOWEST, 1.1), ylabel="fraction")
    axes.set_title("What is left of the consensus distance", loc="left", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2}
    axes.legend(**below, frameon=False, fontsize=9, title="exchanges, and which differences")
