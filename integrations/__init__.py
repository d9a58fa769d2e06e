"""Adapters: one file an engine, each turning it into a Transport, with no algorithm in it."""

from __future__ import annotations

import os

import torch.distributed as dist

from consensus_opt.transport import SoloTransport, Transport


def find_transport(timeout: float) -> Transport:
    """Return a transport over whatever is initialised in this process.

    In this order: torch.distributed's default group, else a single worker.

    Args:
        timeout: Seconds to wait for a peer.

    Raises:
        RuntimeError: If a launcher started several processes and no engine is initialised.
    """
    if dist.is_available() and dist.is_initialized():
        from consensus_opt.integrations.torch_distributed import TorchTransport

        return TorchTransport(timeout=timeout)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RuntimeError(
            f"a launcher started {world} processes (WORLD_SIZE), and torch.distributed is not "
            "initialised in this one; call torch.distributed.init_process_group('gloo') or "
            "('nccl') before ConsensusOptimizer, or pass transport=..."
        )
    return SoloTransport()
