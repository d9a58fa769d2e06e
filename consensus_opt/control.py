"""How many exchanges a round makes."""

from __future__ import annotations

from dataclasses import dataclass

from consensus_opt.checks import whole_field


@dataclass(frozen=True)
class Fixed:
    """The same number of exchanges in every round."""

    exchanges: int = 1

    def __post_init__(self) -> None:
        whole_field(self, "exchanges", "gossip_sgd('ring', exchanges=2)")
