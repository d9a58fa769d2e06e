"""tests/CASES.md and the tests agree: every case has a test named after it, or a reason for none.

A test is of a case when its name has the case's id: ``pytest -k R039`` runs those of one case.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
EXCUSED = "does not apply: "


def verdicts() -> dict[str, str]:
    """The last column of each row of the tables, by its first."""
    rows = re.findall(r"^\| (R\d+) \|.*\| ([^|]+) \|$", (HERE / "CASES.md").read_text(), re.M)
    ids = [name for name, _ in rows]
    assert len(set(ids)) == len(ids), "a case has two rows"
    return dict(rows)


def files_of_cases() -> dict[str, set[str]]:
    """The files that have a test of each case."""
    files = defaultdict(set)
    for path in HERE.glob("test_*.py"):
        for ids in re.findall(r"^ *def test_((?:R\d+_)+)", path.read_text(), re.M):
            for name in ids.strip("_").split("_"):
                files[name].add(path.name)
    return files


def test_no_test_is_of_an_unknown_case() -> None:
    assert set(files_of_cases()) <= set(verdicts())


def test_each_case_has_a_test_where_its_verdict_says_or_a_reason_for_none() -> None:
    files = files_of_cases()
    for name, verdict in verdicts().items():
        if verdict.startswith(EXCUSED):
            assert not files[name], f"{name} has tests, and its verdict is: {verdict}"
        else:
            missing = set(verdict.split(", ")) - files[name]
            assert not missing, f"{name} has no test in {sorted(missing)}"
