"""What a method would cost on a network, and how far apart it would keep the workers.

Two models, both simple enough to check by hand.

**Time** (alpha-beta: a message of b bytes takes ``latency + b / bandwidth``). The links are full
duplex, and the messages that a worker sends in one exchange share its link, as do those that it
receives; an exchange lasts as long as its busiest worker needs, and a round follows the local steps
without overlap:

    exchange    latency + max_m max(in_m, out_m) * b / bandwidth
    all-reduce  2 (n - 1) latency + 2 (n - 1)/n * b / bandwidth          (ring algorithm)

**Distance.** How far apart the workers are where they take gradients, in the steady state that
``steady`` derives, as a fraction of Xi_max: the distance of the uncontrolled ring, with one
exchange after each step, among as many workers.

Sources: Hockney, "The communication challenge for MPP", 1994 (alpha-beta); Patarasuk & Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring); Kong et al.,
"Consensus Control for Decentralized Deep Learning", ICML 2021 (Xi_max).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from consensus_opt.checks import positive, whole, whole_field
from consensus_opt.graphs import Ring, Topology
from consensus_opt.mixing import MixingMatrix
from consensus_opt.steady import between_rounds, distance, is_fixed_and_symmetric
from consensus_opt.topology import topology

ALL_REDUCE = "all_reduce"
TOPOLOGIES = ("ring", "torus", "exponential", "one_peer_exponential", "base2")
PERIODS = (1, 4, 16)
ITEMSIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

_SAMPLED = 64
_TIES = 1.01


@dataclass(frozen=True)
class Network:
    """What joins the workers.

    Attributes:
        bandwidth: Of a worker's link, each way, in bytes a second.
        latency: Of a message, in seconds.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        positive(self.bandwidth, "the bandwidth", "Network(bandwidth=1.25e9, ...), in bytes/s")
        if not 0 <= self.latency < math.inf:
            raise ValueError(
                f"the latency is {self.latency!r}; it must be finite and at least 0 seconds; "
                "write Network(..., latency=50e-6)"
            )

    def exchange_seconds(self, mixing: MixingMatrix, size: float) -> float:
        """Return the seconds of one exchange of ``size`` bytes a message; 0 without messages."""
        links = max(
            max(len(mixing.receives(rank)), len(mixing.sends(rank))) for rank in range(mixing.n)
        )
        return self.latency + links * size / self.bandwidth if links else 0.0

    def all_reduce_seconds(self, n: int, size: float) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes over n workers."""
        return 2 * (n - 1) * (self.latency + size / n / self.bandwidth)


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Attributes:
        params: Number of parameters.
        workers: Number of workers n, at least 2.
        network: What joins them.
        step_seconds: Seconds of a local step, without communication.
        dtype: A key of ``ITEMSIZES``. Half precision is summed, and so sent, as fp32 in an
            all-reduce; gossip sends it as it is.
    """

    params: int
    workers: int
    network: Network
    step_seconds: float
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        whole_field(self, "params", name="the number of parameters")
        whole_field(self, "workers", least=2, name="the number of workers")
        positive(self.step_seconds, "the time of a step", "0.25, in seconds")
        if self.dtype not in ITEMSIZES:
            raise ValueError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(ITEMSIZES)}; write fp32"
            )

    def message_bytes(self, average: str) -> int:
        """Return the size of the model as it travels."""
        itemsize = ITEMSIZES[self.dtype]
        return self.params * (max(itemsize, 4) if average == ALL_REDUCE else itemsize)


@dataclass(frozen=True)
class Candidate:
    """A way to communicate, and what the models predict for it.

    Attributes:
        average: "all_reduce", or the name of a topology.
        period: Steps between rounds, tau.
        exchanges: Exchanges in a round.
        accelerated: Whether those are weighted to mix best together (``acceleration``).
        seconds: Seconds a step, with its share of a round.
        share: Fraction of them that is communication.
        bytes: What a worker sends a step, mean over the workers.
        distance: Root mean square distance at the gradients, in units of s.
        relative: The same in units of Xi_max; None where Xi_max is 0 (2 or 3 workers).
        meets: Whether the distance is within the target.
    """

    average: str
    period: int
    exchanges: int
    accelerated: bool
    seconds: float
    share: float
    bytes: float
    distance: float
    relative: float | None
    meets: bool

    @property
    def recipe(self) -> str:
        """The line of Python that makes the method."""
        if self.average == ALL_REDUCE:
            return f"local_sgd(period={self.period})"
        extra = f", period={self.period}" * (self.period > 1)
        extra += f", exchanges={self.exchanges}" * (self.exchanges > 1)
        return f'gossip_sgd("{self.average}"{extra}{", accelerated=True" * self.accelerated})'


@dataclass(frozen=True)
class Plan:
    """Candidates in the order in which they were asked for, and the one to take.

    Attributes:
        xi_max: Distance of the uncontrolled ring, in units of s.
        target: Largest distance that is accepted, as a fraction of Xi_max.
        candidates: For each period: all-reduce, then each topology with one exchange and, where
            that misses the target and more exchanges meet it, with the fewest that do.
        recommended: See :func:`recommend`.
    """

    xi_max: float
    target: float
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None


def plan(
    job: Job,
    topologies: Sequence[str | Topology] = TOPOLOGIES,
    periods: Sequence[int] = PERIODS,
    target: float = 0.25,
    most: int = 16,
) -> Plan:
    """Compare all-reduce and gossip for each period.

    Args:
        job: What is trained, and on what.
        topologies: Or their names, see ``topology.topology``.
        periods: Steps between rounds.
        target: Fraction of Xi_max, above 0.
        most: Most exchanges in a round.

    Raises:
        ValueError: If a topology is unknown or does not fit, or a number is out of range.
    """
    positive(target, "the target", "0.25, a fraction of Xi_max")
    whole(most, "the most exchanges of a round")
    known = [topology(name) for name in dict.fromkeys(topologies)]
    xi_max = distance(Ring(), job.workers)
    predict = _Predictor(job, xi_max, target, most)
    found: list[Candidate] = []
    for period in dict.fromkeys(whole(period, "the period") for period in periods):
        found.append(predict.all_reduce(period))
        for each in known:
            found += predict.gossip(each, period)
    return Plan(xi_max, target, tuple(found), recommend(found))


def recommend(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate that meets the target; None if none does.

    Of those within 1% of the fastest, the one with the smallest distance, then the fewest bytes.
    """
    fit = [each for each in candidates if each.meets]
    if not fit:
        return None
    limit = _TIES * min(each.seconds for each in fit)
    near = [each for each in fit if each.seconds <= limit]
    return min(near, key=lambda each: (round(each.distance, 9), each.bytes))


@dataclass(frozen=True)
class _Predictor:
    job: Job
    xi_max: float
    target: float
    most: int

    def all_reduce(self, period: int) -> Candidate:
        n, size = self.job.workers, self.job.message_bytes(ALL_REDUCE)
        seconds = self.job.network.all_reduce_seconds(n, size)
        away = math.sqrt(between_rounds(n, period))
        return self._candidate(ALL_REDUCE, period, 1, False, seconds, 2 * (n - 1) / n * size, away)

    def gossip(self, graph: Topology, period: int) -> Iterator[Candidate]:
        once = self._with_exchanges(graph, period, 1)
        yield once
        if once.meets or not self._reachable(period):
            return
        for exchanges in range(2, self.most + 1):
            more = self._with_exchanges(graph, period, exchanges)
            if more.meets:
                yield more
                return

    def _reachable(self, period: int) -> bool:
        """Whether any average at all would meet the target with this period."""
        return self._meets(math.sqrt(between_rounds(self.job.workers, period)))

    def _meets(self, away: float) -> bool:
        return away <= self.target * self.xi_max + 1e-9

    def _with_exchanges(self, graph: Topology, period: int, exchanges: int) -> Candidate:
        n, size = self.job.workers, self.job.message_bytes(graph.name)
        accelerated = exchanges > 1 and is_fixed_and_symmetric(graph)
        phases = [graph.mixing(n, phase) for phase in range(graph.cycle(n) or _SAMPLED)]
        each = sum(self.job.network.exchange_seconds(w, size) for w in phases) / len(phases)
        sent = sum(w.messages for w in phases) / len(phases) / n * size
        away = distance(graph, n, period, exchanges, accelerated)
        return self._candidate(
            graph.name, period, exchanges, accelerated, exchanges * each, exchanges * sent, away
        )

    def _candidate(
        self,
        average: str,
        period: int,
        exchanges: int,
        accelerated: bool,
        round_seconds: float,
        round_bytes: float,
        away: float,
    ) -> Candidate:
        seconds = self.job.step_seconds + round_seconds / period
        return Candidate(
            average,
            period,
            exchanges,
            accelerated,
            seconds,
            1 - self.job.step_seconds / seconds,
            round_bytes / period,
            away,
            away / self.xi_max if self.xi_max > 1e-9 else None,
            self._meets(away),
        )
