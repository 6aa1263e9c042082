"""The documents name files and tests that exist, and the table of faults leaves out no fault."""

import re
from pathlib import Path

import pytest
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


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_file_it_names_exists(document: Path) -> None:
    text = document.read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"(?<![\w/.-])((?:refocused|tests|benchmarks|docs)/[\w/.-]*\w)", code)
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    places = [*(ROOT / name for name in named), *(document.parent / name for name in linked)]
    assert [str(place) for place in places if not place.exists()] == []


def test_every_fault_is_there_with_a_test() -> None:
    table = DOCUMENT.partition("## All at once")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| (\d+)? ?\|", line)]
    assert [row.split("|")[1].strip() for row in rows] == [str(n + 1) for n in range(len(rows))]
    assert len(rows) >= 50
    assert [row for row in rows if "::" not in row] == []
