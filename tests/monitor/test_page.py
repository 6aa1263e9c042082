"""The page of a run: what it embeds, that nothing in it escapes, and what a browser makes of it."""

import html.parser
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitor.watched_run import GPU, NOW, WatchedRun, new_run

from refocused.commands.monitor import main
from refocused.metrics.history import StepMetrics
from refocused.monitor.screen.pictures import columns
from refocused.monitor.screen.summary import CURVES, MOST_COLUMNS, write_summary

HOSTILE = "</script><script>alert(1)</script><!--<script> \u2028 {{runs}}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HEADLESS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
HEADLESS += "--disable-background-networking --disable-component-update"
# Drag over the first panel, hide a line, choose the dark colours, and write down what is there.
DRIVER = """<script>
const use = (target, kind, x) => target.dispatchEvent(
  new MouseEvent(kind, {clientX: x, clientY: 60, movementX: 1, bubbles: true, button: 0}));
setTimeout(() => {
  const drawn = () => [...document.querySelectorAll("canvas")].map(one => one.getContext("2d")
    .getImageData(0, 0, one.width, one.height).data.reduce((sum, value) => sum + value, 0));
  const seen = {light: drawn(), page: getComputedStyle(document.body).backgroundColor};
  seen.titles = [...document.querySelectorAll("#panels h2")].map(one => one.firstChild.data.trim());
  const [{chart}] = charts, over = chart.over, left = over.getBoundingClientRect().left;
  use(over, "mouseenter", left + 50);
  use(over, "mousemove", left + 50);
  seen.hovered = chart.root.querySelector(".u-legend").innerText;
  use(over, "mousedown", left + 50);
  use(over, "mousemove", left + 150);
  use(document, "mouseup", left + 150);
  setTimeout(() => {
    seen.zoomed = charts.map(one => [one.chart.scales.x.min, one.chart.scales.x.max]);
    get("reset").click();
    chart.root.querySelectorAll(".u-series th")[1].click();
    setTimeout(() => {
      seen.whole = charts.map(one => [one.chart.scales.x.min, one.chart.scales.x.max]);
      seen.hidden = chart.series.map(one => !one.show);
      get("theme").value = "dark";
      setTheme();
      setTimeout(() => {
        seen.dark = drawn();
        seen.darkPage = getComputedStyle(document.body).backgroundColor;
        seen.errors = get("errors").textContent;
        seen.loaded = performance.getEntriesByType("resource").length;
        seen.wider = document.documentElement.scrollWidth - innerWidth;
        const result = element("pre", JSON.stringify(seen));
        result.id = "seen";
        document.body.append(result);
      }, 100);
    }, 100);
  }, 100);
}, 300);
</script>"""


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    run = new_run(tmp_path)
    run.begin(step=2000, status="finished", exit_code=0, run=f"one {HOSTILE}")
    run.line("training_metrics", NOW, {"kind": "validation", "step": 2000, "validation_loss": 3.05})
    run.gpus(GPU)
    for step, text in ((2000, "def main():"), (0, f"def {HOSTILE}"), (900, "between")):
        run.line("events", NOW, {"kind": "sample", "text": "", "step": step, "sample": text})
    for at, step in ((-900.0, 1000), (0.0, 2000)):
        run.line("events", NOW + at, {"kind": "save", "text": "save", "step": step})
        run.line("mirror_metrics", NOW + at + 60, {"kind": "mirrored", "step": step})
    # A mirror that is started again reports what it finds there.
    run.line("mirror_metrics", NOW + 90, {"kind": "mirrored", "step": 1000})
    run.line("events", NOW - 900, {"kind": "save_failed", "text": f"no room {HOSTILE}"})
    return run


class Reader(html.parser.HTMLParser):
    """Notes the elements of a page, what they load, and the text of its JSON."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str | None] = []
        self.runs = ""
        self._is_json = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self._is_json = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        self.runs += data if self._is_json else ""
        self._is_json = False


def test_a_page_embeds_the_run_and_nothing_of_it_escapes(run: WatchedRun) -> None:
    write_summary(run.folder, run.view())
    page = Reader((run.folder / "summary.html").read_text())
    assert (page.tags.count("script"), page.loads) == (4, [])
    (content,) = json.loads(page.runs)
    assert content["name"] == f"one {HOSTILE}"
    assert content["samples"] == [[0, f"def {HOSTILE}"], [2000, "def main():"]]
    assert len(content["troubles"]) == 1 and ["status", "finished, exit code 0"] in content["rows"]
    assert content["validations"] == {"step": [2000], "loss": [3.05]}
    assert content["steps"]["step"][-1] == 2000 and content["saved"]["step"] == [1000, 2000]
    assert content["mirrored"]["time"] == [
        pytest.approx((2000 * 1.5 + 10 - 840) / 3600, abs=0.01),
        pytest.approx((2000 * 1.5 + 10 + 60) / 3600, abs=0.01),
    ]


def test_long_curves_keep_their_extremes_and_their_end() -> None:
    points = [StepMetrics(n, time=7200.0 + n, loss=2.0 + n % 2) for n in range(1, 100_001)]
    points[50_000] = StepMetrics(50_001, time=57_201.0, loss=9.5)
    points[60_000] = StepMetrics(60_001, time=67_201.0, loss=math.nan)
    found: dict[str, Any] = columns(points, *CURVES, began=7200.0, most=MOST_COLUMNS)
    assert {len(values) for values in found.values()} <= {MOST_COLUMNS - 1, MOST_COLUMNS}
    assert (found["step"][-1], found["time"][-1]) == (100_000, pytest.approx(100_000 / 3600))
    assert (max(found["loss_high"]), min(found["loss_low"])) == (9.5, 2.0)
    assert max(found["loss"]) < 2.6
    assert set(found) == {"step", "time", "loss", "loss_low", "loss_high"}
    assert columns([], *CURVES) == {} and columns([StepMetrics(3)], *CURVES) == {"step": [3]}


def test_one_page_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for name in ("one", "two"):
        other = new_run(tmp_path / name)
        other.begin()
        folders.append(str(other.folder))
    out = tmp_path / "pages" / "both.html"
    assert main([*folders, "--page", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert len(json.loads(Reader(out.read_text()).runs)) == 2
    (tmp_path / "file").touch()
    assert main([*folders, "--page", str(tmp_path / "file" / "page.html")]) == 1
    assert "another place with --page." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("size", ["1280,900", "500,800"])
def test_a_browser_draws_the_page_without_a_network(
    run: WatchedRun, tmp_path: Path, size: str
) -> None:
    write_summary(run.folder, run.view())
    page = (run.folder / "summary.html").read_text()
    driven = tmp_path / "driven.html"
    driven.write_text(page.replace("</body>", f"{DRIVER}</body>"))
    profile = ["--user-data-dir=" + str(tmp_path / "profile"), "--host-rules=MAP * ~NOTFOUND"]
    shown = subprocess.run(
        [
            *(str(CHROMIUM), *HEADLESS.split(), *profile),
            *(f"--window-size={size}", "--virtual-time-budget=9000", "--dump-dom", str(driven)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout
    assert '<pre id="seen">' in shown, shown[-2000:]
    text = html.unescape(shown.partition('<pre id="seen">')[2].partition("</pre>")[0])
    seen = json.loads(text)
    assert (seen["errors"], seen["loaded"]) == ("", 0)
    assert seen["titles"] == [
        *("Loss", "Learning rate", "Throughput", "MFU", "Saved and mirrored"),
        *("GPU utilization", "GPU temperature", "GPU power", "GPU memory"),
    ]
    assert len(seen["light"]) == len(seen["titles"]) and min(seen["light"]) > 0
    assert seen["page"] != seen["darkPage"] and seen["light"] != seen["dark"]
    step, loss = re.findall(r"[\d.,]+", seen["hovered"])[:2]
    assert float(loss) == pytest.approx(3 + 100 / float(step), abs=1e-3)
    (low, high), second, *_ = seen["zoomed"]
    assert 10 < low < high < 2000 and second == [low, high]  # panels zoom together
    assert seen["whole"][0] == [10, 2000] and seen["hidden"] == [False, True, False]
    assert seen["wider"] <= 0
