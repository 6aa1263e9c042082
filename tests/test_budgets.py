"""Size and reach of the code against the budgets of its structure.

`python tests/test_budgets.py` prints every figure with its ceiling and the one that is wanted.
Lines are those of files that git tracks, with docstrings and blank lines. A closure follows every
import of the package that runs, also inside functions, but not under `if TYPE_CHECKING`. A lonely
file has fewer than 80 lines and one importer. The reader's path is the list in README.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Figure: (ceiling today, wanted). Raising a ceiling takes a sentence in the commit that says what
# the reader gets for it.
BUDGETS = {
    "package lines": (48_020, 32_000),
    "package files": (280, 230),
    "tests lines": (43_025, 26_000),
    "benchmarks lines": (6_387, 5_000),
    "largest folder": (15, 15),
    "longest file": (350, 350),
    "loop closure lines": (7_000, 7_000),
    "train closure lines": (28_881, 20_000),
    "reader's path files": (20, 20),
    "reader's path lines": (4_500, 4_500),
    "lonely files": (15, 15),
    "function median": (12, 12),
    "function p90": (30, 30),
    "function max": (80, 80),
}


@pytest.mark.parametrize("figure", BUDGETS)
def test_the_code_stays_within_its_budget(figure: str) -> None:
    assert figures()[figure] <= BUDGETS[figure][0]


@functools.cache
def figures() -> dict[str, int]:
    """Every figure of the tree."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    texts = {Path(name): (ROOT / name).read_text() for name in listed if (ROOT / name).exists()}
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    areas = collections.Counter[str]()
    for file, number in lines.items():
        areas[file.parts[0]] += number
    package = {file: ast.parse(texts[file]) for file in texts if file.parts[0] == "refocused"}
    arrows = _arrows(package)
    importers = collections.Counter(target for targets in arrows.values() for target in targets)
    folders = collections.Counter(file.parent for file in package)
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for tree in package.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )

    readme = (ROOT / "README.md").read_text()
    listed_path = re.findall(r"^   - `(refocused/\S+\.py)`", readme, re.MULTILINE)
    path = [Path(name) for name in listed_path]

    def closure(name: str, marked: str) -> int:
        (start,) = (file for file in package if file.name == name and marked in texts[file])
        return sum(lines[file] for file in _reached(start, arrows))

    return {
        "package lines": areas["refocused"],
        "package files": len(package),
        "tests lines": areas["tests"],
        "benchmarks lines": areas["benchmarks"],
        "largest folder": max(folders.values()),
        "longest file": max(lines[file] for file in package),
        "loop closure lines": closure("loop.py", "def train("),
        "train closure lines": closure("train.py", "def main("),
        "reader's path files": len(path),
        "reader's path lines": sum(lines[file] for file in path),
        "lonely files": sum(
            lines[file] < 80 and importers[file] == 1 and file.name != "__init__.py"
            for file in package
        ),
        "function median": int(statistics.median(lengths)),
        "function p90": lengths[int(len(lengths) * 0.9)],
        "function max": lengths[-1],
    }


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
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
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
    print(f"{'figure':22}{'today':>9}{'ceiling':>9}{'wanted':>9}")
    for name, value in figures().items():
        ceiling, wanted = BUDGETS[name]
        print(f"{name:22}{value:9,}{ceiling:9,}{wanted:9,}{'  above' if value > wanted else ''}")
