"""What of the inner optimizer's state belongs to a worker's vector beside its parameters.

Averaging parameters alone lets momentum and Adam's moments drift apart; that ruined generalization
of decentralized Adam in Kong et al., ICML 2021. With the policy ``"average"`` they travel in the
same exchanges as the parameters; with ``"quasi_global"`` momentum follows the parameters, and
nothing travels (see :mod:`consensus_opt.momentum`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

POLICIES = ("local", "average", "quasi_global")


def check_policy(policy: str) -> None:
    """Raise ``ValueError`` for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(
            f"the policy for optimizer state is {policy!r}; it must be one of {POLICIES}; write "
            "gossip_sgd('ring', state='average') to average momentum and moments too"
        )


def travelling_state(
    policy: str, state: Mapping[Any, Any], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return the state tensors that are averaged, in an order that is the same on all ranks.

    These are the real-valued tensors of a parameter's own shape (momentum buffers, moments), not
    step counters.
    """
    if policy != "average":
        return []
    return [
        value
        for parameter in parameters
        for _, value in sorted(state.get(parameter, {}).items())
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and (value.is_floating_point() or value.is_complex())
    ]
