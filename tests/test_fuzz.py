"""Random trainings of stacked workers, call by call against matrices in float64.

200 of them in CI; 2,000 fresh ones with CONSENSUS_OPT_LONG=1.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given

from tests.fuzz_cases import CASES, Case
from tests.fuzz_run import Run
from tests.thoroughness import examples


@examples(200)
@given(CASES)
def test_each_call_of_a_random_training_does_what_matrices_say(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = Path(folder, "rounds.jsonl")
        run = Run(case, log)
        for name, argument in case.calls:
            run.call(name, argument)
        lines = log.read_text().splitlines() if log.exists() else []
        assert [json.loads(line) for line in lines] == [
            pytest.approx(asdict(record), nan_ok=True) for record in run.records
        ]
