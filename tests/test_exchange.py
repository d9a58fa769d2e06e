"""Messages between real ranks: chunks of any size give the same bits, and no second model."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from consensus_opt import ConsensusOptimizer, Method, StackedTransport, dppf, gossip_sgd, local_sgd
from consensus_opt.integrations.torch_distributed import TorchTransport
from consensus_opt.topology import topology
from tests.harness import run_ranks
from tests.problems import random_rows, same

RANKS = 4
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOPOLOGIES = ["ring", "star", "one_peer_exponential", "exponential", "base2", "random_matching"]

Case = tuple[str, int, torch.dtype, int, int, bool]
"""Topology, its phase, dtype, elements, bytes a chunk, and whether the result goes in place."""

CASES = st.tuples(
    st.sampled_from(TOPOLOGIES),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, 2, 3, 64, 257]),
    st.sampled_from([1, 2, 3, 8, 100, 1 << 20]),
    st.booleans(),
)


def exchange_in_chunks(rank: int, cases: list[Case]) -> list[tuple[Tensor, Tensor, int]]:
    results = []
    transports: dict[int, TorchTransport] = {}
    for seed, (name, phase, dtype, width, chunk_bytes, in_place) in enumerate(cases):
        if chunk_bytes not in transports:
            transports[chunk_bytes] = TorchTransport(timeout=60, chunk_bytes=chunk_bytes)
        transport = transports[chunk_bytes]
        flat = random_rows(RANKS, width, seed, dtype)[rank].clone()
        mixed = flat if in_place else torch.empty_like(flat)
        sent = transport.bytes_sent
        transport.exchange(flat, topology(name).mixing(RANKS, phase), mixed)
        sent = transport.bytes_sent - sent
        mean = random_rows(RANKS, width, seed, dtype)[rank].clone()
        transport.mean(mean)
        results.append((mixed, mean, sent))
    return results


@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.generate],  # to shrink would start processes hundreds of times
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(CASES, min_size=25, max_size=40))
def test_chunks_of_any_size_give_the_bits_of_the_stacked_workers(cases: list[Case]) -> None:
    ranks = run_ranks(RANKS, exchange_in_chunks, cases)
    for seed, (name, phase, dtype, width, *_) in enumerate(cases):
        mixing = topology(name).mixing(RANKS, phase)
        rows = random_rows(RANKS, width, seed, dtype)
        transport, stacked = StackedTransport(RANKS), rows.clone()
        transport.exchange(stacked, mixing)
        mean = rows.double().mean(0)
        for rank, outcome in enumerate(ranks):
            mixed, average, sent = outcome[seed]
            assert same(mixed, stacked[rank])
            assert sent == len(mixing.sends(rank)) * width * dtype.itemsize
            assert same(average, ranks[0][seed][1])
            bound = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(average.double(), mean, rtol=bound, atol=bound)


METHODS: dict[str, Method] = {
    "local_sgd": local_sgd(1),
    "ring": gossip_sgd("ring"),
    "one_peer": gossip_sgd("one_peer_exponential"),
    "dppf": dppf(0.1, 0.5, period=1),
}
WIDTH, LAYERS = 512, 8
MODEL_BYTES = 4 * WIDTH * WIDTH * LAYERS


def largest_live_bytes(rank: int) -> dict[str, tuple[int, int]]:
    """Bytes beyond the model that a round holds and that stay after it, for each method."""
    results = {}
    for name, method in METHODS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        transport = TorchTransport(timeout=60, chunk_bytes=MODEL_BYTES // 64)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ConsensusOptimizer(inner, method, transport=transport)
        with optimizer.averaged():
            pass  # the parameters move into the flat buffer
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            optimizer.step()
        # The profiler keeps a log of what was taken (positive) and given back (negative).
        live = peak = 0
        for event in measured.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        results[name] = (peak, live)
    return results


def test_R060_averaging_takes_no_second_model_and_dppf_takes_one() -> None:
    for outcome in run_ranks(2, largest_live_bytes):
        for name in ("local_sgd", "ring", "one_peer"):
            assert max(outcome[name]) < MODEL_BYTES / 4, name
        assert MODEL_BYTES <= outcome["dppf"][0] < 1.5 * MODEL_BYTES
