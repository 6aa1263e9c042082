"""Size, reach and holders of the code against the budgets of its structure.

`.venv/bin/python tests/test_budgets.py` prints every figure, its ceiling and its goal;
`--names` lists doubled class names, `--callers` the private functions with one caller.

Statements are lines that hold code: not blank, no comment, docstring or import; so comments that
give a reason cost nothing. A closure follows every import of the package that runs, also inside
functions, but not under `if TYPE_CHECKING`. A private function has one caller if its name occurs
once in the package beside its definition. Records are dataclasses, NamedTuples, TypedDicts and
pydantic models. The reader's path is the list in README. Functions and files may have any length.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Figure: (ceiling today, wanted). Raising a ceiling takes a sentence in the commit that says what
# the reader gets for it.
BUDGETS = {
    "statements": (32_624, 25_500),
    "package files": (235, 220),
    "tests lines": (47_575, 34_000),
    "benchmarks lines": (5_500, 5_500),
    "train closure statements": (19_163, 15_000),
    "loop closure lines": (5_500, 5_500),
    "private functions with one caller": (132, 150),
    "record types": (205, 170),
    "doubled class names": (0, 0),
    "largest folder": (15, 15),
    "reader's path files": (15, 15),
    "reader's path lines": (4_500, 4_500),
}
RECORDS = ("dataclass", "NamedTuple", "TypedDict", "BaseModel", "Section")


@pytest.mark.parametrize("figure", BUDGETS)
def test_the_code_stays_within_its_budget(figure: str) -> None:
    assert figures()[figure] <= BUDGETS[figure][0]


def test_only_lines_of_code_are_statements() -> None:
    text = (
        '"""A file."""\n\nimport os\n\n# why\ndef f():\n    """Do."""\n    return os.sep  # here\n'
    )
    assert _statements(text, ast.parse(text)) == 2


@functools.cache
def figures() -> dict[str, int]:
    """Every figure of the tree."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    texts = {Path(name): (ROOT / name).read_text() for name in listed if (ROOT / name).exists()}
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    areas = collections.Counter[str]()
    for file, number in lines.items():
        areas[file.parts[0]] += number
    package = _package()
    statements = {file: _statements(texts[file], tree) for file, tree in package.items()}
    arrows = _arrows(package)

    def reached(name: str, marked: str) -> set[Path]:
        (start,) = (file for file in package if file.name == name and marked in texts[file])
        return _reached(start, arrows)

    readme = (ROOT / "README.md").read_text()
    path = [Path(name) for name in re.findall(r"^   - `(refocused/\S+\.py)`", readme, re.M)]
    return {
        "statements": sum(statements.values()),
        "package files": len(package),
        "tests lines": areas["tests"],
        "benchmarks lines": areas["benchmarks"],
        "train closure statements": sum(statements[f] for f in reached("train.py", "def main(")),
        "loop closure lines": sum(lines[file] for file in reached("loop.py", "def train(")),
        "private functions with one caller": len(single_callers()),
        "record types": sum(
            any(record in mark for record in RECORDS for mark in marks)
            for _, marks in _classes(package)
        ),
        "doubled class names": len(doubled_names()),
        "largest folder": max(collections.Counter(file.parent for file in package).values()),
        "reader's path files": len(path),
        "reader's path lines": sum(lines[file] for file in path),
    }


@functools.cache
def _package() -> dict[Path, ast.Module]:
    listed = subprocess.check_output(["git", "ls-files", "refocused"], cwd=ROOT, text=True).split()
    files = [Path(name) for name in listed if name.endswith(".py") and (ROOT / name).exists()]
    return {file: ast.parse((ROOT / file).read_text()) for file in files}


def single_callers() -> list[str]:
    """Private functions whose name occurs once beside their definition."""
    used = collections.Counter[str]()
    private: dict[str, str] = {}
    for file, tree in _package().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(
                "_[^_]", node.name
            ):
                private[f"{file}:{node.lineno} {node.name}"] = node.name
    return [place for place, name in private.items() if used[name] == 1]


def doubled_names() -> list[str]:
    """Names that two classes have."""
    names = collections.Counter(name for name, _ in _classes(_package()))
    return [name for name, number in names.items() if number > 1]


def _classes(package: dict[Path, ast.Module]) -> list[tuple[str, list[str]]]:
    """The name of every class, with its decorators and bases as text."""
    return [
        (node.name, [ast.dump(mark) for mark in (*node.decorator_list, *node.bases)])
        for tree in package.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def _statements(text: str, tree: ast.Module) -> int:
    other: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            other.update(range(node.lineno, (node.end_lineno or 0) + 1))
        scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, scope) and ast.get_docstring(node) is not None:
            other.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(
        bool(line) and not line.startswith("#") and number not in other for number, line in code
    )


def _arrows(package: dict[Path, ast.Module]) -> dict[Path, set[Path]]:
    """Return which files of the package each of them imports when it runs."""
    modules = {".".join(f.with_suffix("").parts).removesuffix(".__init__"): f for f in package}
    arrows = {}
    for file, tree in package.items():
        names = [name for node in _running(tree) for name in _imported(node)]
        arrows[file] = {modules[name] for name in names if name in modules} - {file}
    return arrows


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING`."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def _reached(start: Path, arrows: dict[Path, set[Path]]) -> set[Path]:
    seen: set[Path] = set()
    todo = [start]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += arrows[file]
    return seen


if __name__ == "__main__":
    if "--names" in sys.argv or "--callers" in sys.argv:
        print(*(doubled_names() if "--names" in sys.argv else single_callers()), sep="\n")
        sys.exit()
    print(f"{'figure':34}{'today':>9}{'ceiling':>9}{'wanted':>9}")
    for name, value in figures().items():
        ceiling, wanted = BUDGETS[name]
        print(f"{name:34}{value:9,}{ceiling:9,}{wanted:9,}{'  above' if value > wanted else ''}")
