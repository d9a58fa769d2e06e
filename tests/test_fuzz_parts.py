"""Random arguments for the pure parts: timings by brute force, and a command that never breaks."""

from __future__ import annotations

import contextlib
import io
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from consensus_opt import Every, PostLocal, QuadraticSync, schedules
from consensus_opt.cli import main
from tests.fuzz_oracle import next_due, strength
from tests.thoroughness import examples

ANY = st.one_of(st.integers(1, 50), st.integers(1, 10**12))


@examples(200)
@given(
    st.one_of(st.builds(Every, st.integers(1, 40)), st.builds(PostLocal, ANY, st.integers(1, 40))),
    st.integers(0, 200),
)
def test_the_next_round_is_the_first_step_that_is_due(timing: Every | PostLocal, step: int) -> None:
    assert timing.next_round(step, 0.1, None) == next_due(timing, step, 0.1, None)


POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@examples(200)
@given(POSITIVE, ANY, st.floats(), st.integers(0, 10**6), st.one_of(st.none(), ANY))
def test_a_period_set_by_any_learning_rate_ends_later(
    coefficient: float, least: int, lr: float, step: int, total: int | None
) -> None:
    end = QuadraticSync(coefficient, least).next_round(step, lr, total)
    assert isinstance(end, int)
    assert end > step
    assert end - step >= least or end == total


@examples(100)
@given(
    st.sampled_from([schedules.Linear, schedules.CosineUp, schedules.CosineDown]),
    st.floats(-1e6, 1e6),
    st.integers(0, 10**6),
    st.one_of(st.none(), ANY),
)
def test_a_schedule_follows_its_formula_and_keeps_its_bounds(
    kind: type, value: float, step: int, total: int | None
) -> None:
    schedule = kind(value)
    found = schedule.at(step, total)
    assert found == pytest.approx(strength(schedule, step, total, 0.1), rel=1e-6, abs=1e-6)
    low, high = schedule.bounds
    assert low - 1e-9 * abs(value) <= found <= high + 1e-9 * abs(value)


WORDS = st.one_of(
    st.sampled_from(["ring", "torus:4x2", "torus:0x*", "base1", "base99", "random_matching:7"]),
    st.sampled_from(["1e308", "25.6M", "10Gbit", "50us", "0.25", "nan", "-1", "inf", "1e-320s"]),
    st.integers(-3, 40).map(str),
    st.text(max_size=6).filter(lambda text: not text.startswith("-")),
)


@examples(60)
@given(st.sampled_from(["plan", "topology"]), st.lists(WORDS, min_size=6, max_size=6))
def test_no_command_line_ends_in_a_traceback(command: str, words: list[str]) -> None:
    options = {
        "topology": ["--name", "-n", "--params"],
        "plan": ["-n", "--params", "--bandwidth", "--latency", "--step-time", "--target"],
    }[command]
    line = [
        command,
        "--json",
        *(f"{o}={w}" if o[1] == "-" else o + w for o, w in zip(options, words, strict=False)),
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(line)
        except SystemExit as stop:
            status = int(stop.code or 0)
    assert status in (0, 2)


def test_the_longest_period_is_finite() -> None:
    assert math.isfinite(QuadraticSync(1.0, 1).next_round(0, 1e-200, None))
