"""How long tests with a long version run: seconds in CI, minutes with CONSENSUS_OPT_LONG=1."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("CONSENSUS_OPT_LONG") == "1"


def examples(short: int, long: int | None = None) -> settings:
    """Settings of a hypothesis test: the same examples in every short run, fresh ones in a long."""
    return settings(
        max_examples=(long or 10 * short) if LONG else short,
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
