"""The table of faults names tests that exist, and leaves out no fault."""

from __future__ import annotations

import re

from ranks import ROOT

DOCUMENT = (ROOT / "docs" / "faults.md").read_text()


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", DOCUMENT)
    assert len(named) > 37
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert missing == []


def test_every_fault_is_there_with_a_test() -> None:
    table = DOCUMENT.partition("## All at once")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| (\d+)? ?\|", line)]
    assert [int(row.split("|")[1]) for row in rows if row.split("|")[1].strip()] == [*range(1, 38)]
    assert [row for row in rows if "::" not in row] == []
