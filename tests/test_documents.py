"""What the documents quote and count is what the package prints and computes."""

import ast
import functools
import html.parser
import importlib
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from ranks import ROOT

from refocused.config.optimization import ZeroConfig
from refocused.estimate.memory import state_memory


@functools.cache
def printed_texts() -> str:
    """All text literals of the package, whatever lines they are wrapped over; `\\0` for values."""
    found = []
    for file in sorted((ROOT / "refocused").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]|%\.\d+f", "\0", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    one.value if isinstance(one, ast.Constant) else "\0" for one in node.values
                )
                found.append("".join(str(part) for part in parts))
    return "\n\n".join(found)


def test_every_message_of_the_troubleshooting_guide_is_printed() -> None:
    guide = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", guide, re.M)
    assert len(quoted) > 40
    fixed = [part.strip() for message in quoted for part in message.split("...")]
    missing = [part for part in fixed if len(part) > 3 and part not in printed_texts()]
    assert missing == []


def test_the_reference_explains_every_field_of_a_record() -> None:
    sys.path.append(str(ROOT / "docs"))
    page = importlib.import_module("generate_reference").metrics()
    assert len(re.findall(r"^\| `\w+` \| .* \| \S.* \|$", page, re.M)) > 150
    apart = "perplexity tasks sources finished first_step save_bytes run_id shards_ready mirrored"
    assert [key for key in apart.split() if f"| `{key}` |" not in page] == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_memory_page_counts_as_the_plan_does(stage: int) -> None:
    page = (ROOT / "docs" / "concepts" / "memory.md").read_text()
    (row,) = re.findall(rf"^\| {stage} \| (.*) \| (.*) \|$", page, re.M)
    ranks, parameters = 8, 8_000_000
    planned = state_memory(parameters, zero=ZeroConfig(stage=stage), dtype="bf16", ranks=ranks)
    for cell, bytes_ in zip(row, (planned.in_pass, planned.gpu), strict=True):
        terms = re.findall(r"(\d+) P(/N)?", cell)
        assert sum(int(n) * parameters // (ranks if part else 1) for n, part in terms) == bytes_


class Page(html.parser.HTMLParser):
    """The anchors of a page, what it loads, and where it links to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors, self.loads, self.links = set[str](), list[str](), list[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.anchors |= {known[name] for name in ("id", "name") if name in known}
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        elif tag in ("script", "link", "img", "iframe", "source"):
            self.loads += [known[name] for name in ("src", "href") if name in known]


@pytest.mark.slow
def test_the_site_is_built_strictly_and_works_without_a_network(tmp_path: Path) -> None:
    isolated = ["unshare", "--map-root-user", "--net"]  # not everywhere permitted
    if subprocess.run([*isolated, "true"], capture_output=True).returncode:
        isolated = []
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    site = tmp_path / "site"
    built = subprocess.run(
        [*isolated, sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr

    assert "SUPPRESS" not in (site / "reference" / "commands.html").read_text()
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    nav = re.findall(r"(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {site / f"{name}.html" for name in nav} == set(pages)
    style = (site / "site.css").read_text()  # lines of code wrap, names of settings do not
    assert "pre-wrap" in style and "word-break: normal" in style
    wrong = []
    for file, page in pages.items():
        assert any(target.endswith("site.css") for target in page.loads)
        for target in (*page.loads, *page.links):
            url = urllib.parse.urlsplit(target)
            if url.scheme or url.netloc:
                wrong += [f"{file.name} loads {target}"] if target in page.loads else []
                continue
            there = (file.parent / urllib.parse.unquote(url.path)).resolve() if url.path else file
            anchors = pages[there].anchors if there in pages else {url.fragment}
            if not there.exists() or (url.fragment and url.fragment not in anchors):
                wrong.append(f"{file.name} links to {target}")
    assert wrong == []
