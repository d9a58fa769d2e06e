"""Base-(k+1) graphs: the exact mean in a handful of exchanges, for any number of workers.

A hypercube averages exactly, but only 2^m workers. The Base-(k+1) graph (Takezawa et al., "Beyond
Exponential Graph", NeurIPS 2023, arXiv 2305.11420) does so for every n while nobody talks to more
than k peers at once. It is written here as plain combinatorics on ranks, without a matrix in sight,
so that each step can be read next to the paper; `graphs.BaseGraph` turns a phase into a matrix.

A phase is a tuple of links (i, j, w): i and j weigh each other with w, and each rank keeps what is
left of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

Link = tuple[int, int, float]
Phase = tuple[Link, ...]


@lru_cache(maxsize=64)
def base_graph(n: int, k: int) -> tuple[Phase, ...]:
    """One cycle of the Base-(k+1) graph on ranks 0..n-1; its product is the exact mean.

    With n = p q and p the largest (k+1)-smooth divisor, it averages within p groups of q ranks,
    then across the groups, unless doing all ranks at once takes no more phases.

    Args:
        n: number of workers, at least 1.
        k: most peers of a rank in a phase, at least 1.

    Returns:
        The phases in order, at least one (an empty one for n = 1).
    """
    at_once = _simple_base_graph(range(n), k)
    q = _rough_part(n, k)
    if q not in (1, n):
        grouped = _grouped_base_graph(n, q, k)
        if len(grouped) < len(at_once):
            return grouped
    return at_once or ((),)


def _grouped_base_graph(n: int, q: int, k: int) -> tuple[Phase, ...]:
    groups = [range(start, start + q) for start in range(0, n, q)]
    within = [_simple_base_graph(group, k) for group in groups]
    across = [_hyper_hypercube(range(position, n, q), k) for position in range(q)]
    return _side_by_side(within) + _side_by_side(across)


def _simple_base_graph(ranks: Sequence[int], k: int) -> tuple[Phase, ...]:
    """Averages `ranks` by writing their number in base k+1, one set of ranks V_l for each digit.

    Every V_l first averages itself. Then V_1, V_2, ... in turn give all later ranks the share of
    the mean that these lack, and spread among themselves what they received, while the next set is
    at work.
    """
    if _fewest_factors(len(ranks), k + 1) is not None:
        return _hyper_hypercube(ranks, k)
    digits = _split_by_digits(ranks, k)
    sets = [[rank for part in parts for rank in part] for parts in digits]
    opening = _side_by_side([_hyper_hypercube(members, k) for members in sets])
    schedule: list[list[Link]] = [[] for _ in range(1 + len(_hyper_hypercube(digits[0][0], k)))]
    for turn, parts in enumerate(digits[:-1]):
        later = [rank for members in sets[turn + 1 :] for rank in members]
        schedule[turn] += _share(parts, later)
        for part in parts:
            for delay, phase in enumerate(_hyper_hypercube(part, k), start=1):
                schedule[turn + delay] += phase
    return opening + tuple(tuple(links) for links in schedule)


def _share(parts: Sequence[Sequence[int]], later: Sequence[int]) -> list[Link]:
    """Links each later rank with one rank of every part (all parts have the same size).

    w = |V_l| / (a_l N_l), where V_l is the union of the a_l parts and N_l counts it and the later
    ranks.
    """
    weight = len(parts[0]) / (len(parts) * len(parts[0]) + len(later))
    return [(part[i], rank, weight) for part in parts for i, rank in enumerate(later)]


def _split_by_digits(ranks: Sequence[int], k: int) -> list[list[Sequence[int]]]:
    """For each digit a > 0 of len(ranks) in base k+1, highest first: a runs of (k+1)^p ranks."""
    size = 1
    while size * (k + 1) <= len(ranks):
        size *= k + 1
    digits, start = [], 0
    while size:
        count = (len(ranks) - start) // size
        if count:
            digits.append([ranks[start + i * size : start + (i + 1) * size] for i in range(count)])
        start += count * size
        size //= k + 1
    return digits


def _hyper_hypercube(ranks: Sequence[int], k: int) -> tuple[Phase, ...]:
    """Averages a (k+1)-smooth number of ranks: a phase for each factor, over groups of that many.

    Position i has mixed-radix digits; the groups of a phase agree in all digits but one.
    """
    factors = _fewest_factors(len(ranks), k + 1)
    assert factors is not None, "callers pass smooth numbers only"
    phases, stride = [], 1
    for factor in factors:
        firsts = [i for i in range(len(ranks)) if (i // stride) % factor == 0]
        groups = [[ranks[i + digit * stride] for digit in range(factor)] for i in firsts]
        phases.append(
            tuple((i, j, 1 / factor) for group in groups for i, j in combinations(group, 2))
        )
        stride *= factor
    return tuple(phases)


def _side_by_side(schedules: Sequence[tuple[Phase, ...]]) -> tuple[Phase, ...]:
    """Runs schedules on disjoint ranks at the same time; the shorter ones idle at the end."""
    merged: list[list[Link]] = [[] for _ in range(max(map(len, schedules)))]
    for schedule in schedules:
        for links, phase in zip(merged, schedule, strict=False):
            links += phase
    return tuple(tuple(links) for links in merged)


@lru_cache(maxsize=1024)
def _fewest_factors(n: int, largest: int) -> tuple[int, ...] | None:
    """The shortest way to write n as a product of factors <= largest; None where there is none."""
    if n == 1:
        return ()
    best: tuple[int, ...] | None = None
    for factor in range(min(n, largest), 1, -1):
        rest = _fewest_factors(n // factor, largest) if n % factor == 0 else None
        if rest is not None and (best is None or len(rest) + 1 < len(best)):
            best = (factor, *rest)
    return best


def _rough_part(n: int, k: int) -> int:
    """What is left of n without its prime factors up to k + 1."""
    for factor in range(2, min(k + 1, n) + 1):
        while n % factor == 0:
            n //= factor
    return n
