"""What of the inner optimizer's state belongs to a worker's vector beside its parameters.

Averaging parameters alone lets momentum and Adam's moments drift apart; that ruined generalization
of decentralized Adam in Kong et al., ICML 2021. With the policy ``"average"`` they travel in the
same exchanges as the parameters; with ``"quasi_global"`` momentum follows the parameters, and
nothing travels (see :mod:`consensus_opt.momentum`). What some ranks do not keep yet stays out of a
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from consensus_opt.errors import RankMismatchError
from consensus_opt.flat import layout

POLICIES = ("local", "average", "quasi_global")


def check_policy(policy: str) -> None:
    """Raise ``ValueError`` for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(
            f"the policy for optimizer state is {policy!r}; it must be one of {POLICIES}; write "
            "gossip_sgd('ring', state='average') to average momentum and moments too"
        )


def travelling_state(
    policy: str, state: Mapping[Any, Any], parameters: Sequence[Tensor], batch: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """Return the state tensors that may be averaged, each under a line that says which it is.

    These are the real-valued tensors of a parameter's own shape (momentum buffers, moments), not
    step counters.
    """
    if policy != "average":
        return {}
    return {
        f"state of parameter {i}: {key}: {layout(value, batch)}": value
        for i, parameter in enumerate(parameters)
        for key, value in sorted(state.get(parameter, {}).items())
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and (value.is_floating_point() or value.is_complex())
    }


def common_state(texts: Sequence[str], members: Sequence[int]) -> list[str]:
    """Return the lines of the state that travels in a round: what all members have begun to keep.

    A rank has no state for a parameter before its first step on it: after an overflow in the first
    step, or where the parameter had no gradient. That parameter's state then stays local.

    Args:
        texts: Each rank's lines of :func:`travelling_state`.
        members: The ranks that count.

    Raises:
        RankMismatchError: If two ranks keep different state for a parameter.
    """
    ranks = [_by_parameter(text) for text in texts]
    common: list[str] = []
    for parameter in sorted(set().union(*ranks), key=lambda name: int(name.rsplit(" ", 1)[1])):
        kept = {m: rank[parameter] for m, rank in enumerate(ranks) if parameter in rank}
        first = min(kept)
        for rank, lines in kept.items():
            if lines != kept[first]:
                raise RankMismatchError(
                    f"rank {rank} keeps {lines}, and rank {first} {kept[first]}; with "
                    "state='average' all ranks need the same optimizer with the same options"
                )
        if all(m in kept for m in members):
            common += kept[first]
    return common


def placeholder(line: str, parameters: Sequence[Tensor]) -> Tensor:
    """Return room for the state of this line, for a rank that keeps none and does not count."""
    name, _, rest = line.partition(": ")
    dtype: torch.dtype = getattr(torch, rest.split("torch.")[1].split(",")[0])
    return torch.zeros_like(parameters[int(name.rsplit(" ", 1)[1])], dtype=dtype)


def _by_parameter(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in filter(None, text.split("\n")):
        found.setdefault(line.partition(": ")[0], []).append(line)
    return found
