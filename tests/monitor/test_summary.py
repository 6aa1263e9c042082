"""The summary of a run: the rows, the page that embeds it, and what a browser makes of that."""

import json
import math
import re
from typing import Any

import pytest
from monitor.browser import needs_chromium, seen_in_browser
from monitor.watched_run import GPU, NOW, new_run

from refocused.commands.main import run_command
from refocused.metrics.history import StepMetrics, read_history
from refocused.metrics.jsonl import JsonLinesTail
from refocused.monitor import readings
from refocused.monitor.readings import (
    GpuMinute,
    GpuSample,
    as_record,
    gpu_minutes,
    read_gpu_minutes,
)
from refocused.monitor.screen.pictures import columns, draw_history, limits, line_of
from refocused.monitor.screen.summary import CURVES, MOST_COLUMNS, write_summary

HOSTILE = "</script><script>alert(1)</script><!--<script> \u2028 {{runs}}"
# Drag over the first panel, hide a line, choose the dark colours, and write down what is there.
DRIVER = """
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
      seen.highest = charts.map(one => one.chart.scales.y.max);
      const logged = {steps: {step: [10, 20], tokens: [4, 6]}};
      seen.placed = [0, 5, 15, 30].map(step => placed(logged, step, "tokens"));
      seen.hidden = chart.series.map(one => !one.show);
      get("theme").value = "dark";
      setTheme();
      setTimeout(() => {
        seen.dark = drawn();
        seen.darkPage = getComputedStyle(document.body).backgroundColor;
        report(seen);
      }, 100);
    }, 100);
  }, 100);
}, 300);
"""


@pytest.fixture
def run(tmp_path):
    """A finished run with a hostile name, with saves, samples, alarms and troubles."""
    run = new_run(tmp_path)
    facts = {"exit_code": 0, "validation_loss": 2.0, "bits_per_byte": 0.75}
    facts |= {"run": f"one {HOSTILE}"}
    run.begin(step=2000, status="finished", **facts)
    losses = {"validation_loss": 3.05, "bits_per_byte": 0.875}
    run.line("training_metrics", NOW, {"kind": "validation", "step": 2000, **losses})
    run.gpus(GPU)
    for kind in ("start", "resume", "resume"):
        run.line("events", NOW, {"kind": kind, "text": kind})
    for step, text in ((2000, "def main():"), (0, f"def {HOSTILE}"), (900, "between")):
        run.line("events", NOW, {"kind": "sample", "text": "", "step": step, "sample": text})
    for at, step, stall in ((-900.0, 1000, 1.0), (0.0, 2000, 3.0)):
        save = {"kind": "save", "text": "save", "step": step, "stall_seconds": stall}
        run.line("events", NOW + at, save)
        run.line("mirror_metrics", NOW + at + 60, {"kind": "mirrored", "step": step})
    # A mirror that is started again reports what it finds there.
    run.line("mirror_metrics", NOW + 90, {"kind": "mirrored", "step": 1000})
    run.line("events", NOW - 900, {"kind": "save_failed", "text": f"no room {HOSTILE} | x"})
    run.line("events-node-1", NOW - 950, {"kind": "sampler_warning", "text": "no driver there"})
    run.line("events", NOW, {"text": "of no kind"})
    secret = "https://hooks.example.com/SECRET"
    for git in ("aaaaaaa", "bbbbbbb-dirty"):
        setup = {"command": f"refocused launch log.on_alarm={secret}", "git": git, "model": 3}
        setup |= {"versions": {"torch": "2.13", "python": "3.12"}, "hosts": ["node1", "node2"]}
        run.line("events", NOW, {"kind": "setup", **setup, "tokenizer": HOSTILE})
    with (run.folder / "run.yaml").open("a") as settings:
        settings.write(f"log: {{interval: 10, on_alarm: {secret}}}\n")
        settings.write(f"evaluation: {{sample_prompt: {json.dumps(HOSTILE)}}}\n")
    with (run.folder / "logs" / "training_metrics.jsonl").open("a") as lines:
        lines.write('{"kind": "step", "st\n\n')
    run.alarm()
    run.alarm(raised=False)
    for step, correct in ((500, 0.25), (1000, 0.5)):
        acc = {"value": correct, "standard_error": 0.0125}
        scores = {"mine": {"items": 40, "acc": acc}, "core": {"CORE": {"value": 0.1, "x": 1}}}
        line = {"kind": "tasks", "step": step, "tasks": scores | {"damaged": {"acc": "x"}, "y": 2}}
        run.line("training_metrics", NOW - 1500 + step, line)
    # Of a damaged line the rest counts.
    slowest = {"rank": 1, "excess_fraction": 0.1, "limit_fraction": 0.06, "phase": "data"}
    step_line = {"kind": "step", "step": 2001, "tokens_per_second": -1, "slowest": slowest}
    run.line("training_metrics", NOW, step_line)
    return run


def summary_of(run):
    """Write the summary and return the rows of its Markdown."""
    write_summary(run.folder, run.view())
    lines = (run.folder / "SUMMARY.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cell[0]: cell[1] for cell in cells if len(cell) == 2}


def test_the_rows_and_the_last_troubles_say_what_the_files_say(run):
    rows = summary_of(run)
    expected = {
        "status": "finished, exit code 0",
        "steps": "2,000 of 2,000 (100.0%)",
        "validation loss": f"2.0000, perplexity {math.exp(2):.2f}",
        "bits per byte": "0.7500",
        "mine acc": "0.5000 +- 0.0125 at step 1,000",
        "core CORE": "0.1000 at step 1,000",
        "git": "aaaaaaa -> bbbbbbb-dirty",  # of two sessions
        "versions": "torch 2.13; python 3.12",
        "command": "refocused launch log.on_alarm=https://hooks.example.com/...",
        "hosts": "node1; node2",
        "cost.per_hour_usd": "36.0",
        "log.on_alarm": '"https://hooks.example.com/..."',
        "time trained": "50.0 min",
        "cost": "$20.00",
        "a million tokens": "$10.0000",  # 20 dollars for 2,000 steps of 1,000 tokens
        "tokens a second, mean": "700,000",
        "step, mean": "1.5 s",
        "GPUs busy, mean": "97.0%",
        "sessions": "3",
        "saves": "2, 2 s each without training",
        "newest checkpoint here": "step 1,900",
        "alarms": "1",
    }
    assert {name: rows[name] for name in expected} == expected
    assert not {"damaged", "damaged acc", "y", "model", "log.interval"} & set(rows)
    assert (
        rows["best validation loss"].endswith("0.9500 bits per byte at step 900")
        and "left" not in rows
    )
    text = (run.folder / "SUMMARY.md").read_text()
    assert "<script" not in text and "SECRET" not in text
    assert "- 1 line of logs/training_metrics.jsonl cannot be read, and left out" in text
    assert 0 < text.find("no driver there") < text.find(r"\| x")  # of any machine, by time


def test_the_validation_before_training_has_a_row_and_the_expected_loss_a_curve(
    tmp_path, monkeypatch
):
    run = new_run(tmp_path)
    run.line("training_metrics", NOW - 900, {"kind": "validation", "step": 0, "validation_loss": 9})
    step = {"kind": "step", "loss": 3.5, "total_steps": 400}
    run.line("training_metrics", NOW - 10, {**step, "step": 100, "tokens": 1_000_000})
    run.line("training_metrics", NOW, {**step, "step": 200, "tokens": 2_000_000})
    row = {"validation loss before training": f"9.0000, perplexity {math.exp(9):.2f}"}
    without = summary_of(run)
    assert row.items() <= without.items() and "expected loss" not in without
    record = {"curve": [[1_000_000, 4.0], [2_000_000, 3.0], [4_000_000, 2.0]]}
    (run.folder / "expected_loss.json").write_text(json.dumps(record))
    assert summary_of(run)["expected loss"].endswith("end 2.50 +- 0.12 by the losses so far")
    (content,) = embedded((run.folder / "summary.html").read_text())
    drawn = content["expected"]
    assert (drawn["step"][0], drawn["loss"][0], drawn["step"][-1]) == (100, 4.5, 250)
    assert drawn["loss_low"][-1] < drawn["loss"][-1] == 3.25 < drawn["loss_high"][-1]
    pictures: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda *given, **_how: pictures.append(given)
    )
    run_command("checkpoints", ["plot", "--run", str(run.folder)])
    [axes] = pictures[0][0].axes
    assert axes.lines[2].get_label() == "expected"
    assert axes.get_ylim()[0] < drawn["loss_low"][-1]


def embedded(page):
    """The runs of a page, which loads nothing, as a browser reads them."""
    assert page.count("<script") == 4 and not re.search(r"<[^>]* (src|href)=", page)
    script = re.search(r'<script type="application/json" id="runs">(.*?)</script>', page)
    assert script is not None
    runs: list[dict[str, Any]] = json.loads(script[1])
    return runs


def test_a_page_embeds_the_run_and_nothing_of_it_escapes(run):
    write_summary(run.folder, run.view())
    (content,) = embedded((run.folder / "summary.html").read_text())
    assert content["name"] == f"one {HOSTILE}"
    assert content["samples"] == [[0, f"def {HOSTILE}"], [2000, "def main():"]]
    assert ["tokenizer", HOSTILE] in content["setup"] and "SECRET" not in json.dumps(content)
    prompt = ["evaluation.sample_prompt", json.dumps(HOSTILE, ensure_ascii=False), True]
    assert prompt in content["settings"] and ["log.interval", "10", False] in content["settings"]
    assert (
        len(content["troubles"] + content["damage"]) == 5
        and ["status", "finished, exit code 0"] in content["rows"]
    )
    assert content["validations"] == {"step": [2000], "loss": [3.05], "bits_per_byte": [0.875]}
    assert content["steps"]["step"][-1] == 2001 and content["saved"]["step"] == [1000, 2000]
    assert content["mirrored"]["time"] == [
        pytest.approx((2000 * 1.5 + 10 - 840) / 3600, abs=0.01),
        pytest.approx((2000 * 1.5 + 10 + 60) / 3600, abs=0.01),
    ]


@pytest.mark.parametrize("files", ["none", "no steps", "not finite"])
def test_of_a_run_of_which_little_is_known_there_is_a_summary_too(tmp_path, files):
    run = new_run(tmp_path)
    if files != "none":
        run.state(step=0, status="failed", loss=None, total_steps=None)
    if files == "not finite":
        run.line("training_metrics", NOW, {"kind": "step", "step": 1, "loss": None})
        run.line("training_metrics", NOW, {"kind": "validation", "step": 1})
    assert summary_of(run)["status"].startswith("starting" if files == "none" else "failed")
    (run.folder / "lines").write_text('{"kind": "validation", "step": 1}\n')
    draw_history(read_history(run.folder / "lines"), run.folder / "loss.png", title="one")
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    made = {path.name for path in run.folder.iterdir() if path.is_file()}
    assert made - {"lines", "loss.png", "state.json"} == {"SUMMARY.md", "summary.html"}


def test_one_page_compares_runs(tmp_path, capsys):
    folders = []
    for name in ("one", "two"):
        other = new_run(tmp_path / name)
        other.begin()
        folders.append(str(other.folder))
    out = tmp_path / "pages" / "both.html"
    assert run_command("monitor", [*folders, "--page", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert len(embedded(out.read_text())) == 2
    (tmp_path / "file").touch()
    assert run_command("monitor", [*folders, "--page", str(tmp_path / "file" / "page.html")]) == 1
    assert "another place with --page." in capsys.readouterr().err


MINUTE = NOW // 60 * 60


def test_gpu_readings_are_gathered_by_the_minute_also_those_of_a_part_of_a_long_file(
    tmp_path, monkeypatch
):
    run, logs = new_run(tmp_path), tmp_path / "one" / "logs"
    assert read_gpu_minutes(logs) == []
    for at, changes in (
        (1, {"utilization_fraction": 0.9, "temperature_celsius": 60, "local_rank": 0}),
        (59, {"utilization_fraction": 0.5, "temperature_celsius": 80, "local_rank": 1}),
        (30, {"temperature_celsius": 90}),  # of others on the machine
        (70, {"lost": True, "index": 7}),
        (130, {}),  # no ranks are known
    ):
        sample = GpuSample("node1", 7) if "lost" in changes else GPU
        record = {**as_record(sample), **changes}
        run.line("gpu_metrics", MINUTE + at, record)
    run.line("gpu_metrics", MINUTE, {"kind": "system", "host": "node1"})
    found = [
        GpuMinute(MINUTE, 0.7, 80, 640.0, 48.4),
        GpuMinute(MINUTE + 60, None, None, None, None),
        GpuMinute(MINUTE + 120, 0.97, 66, 640.0, 48.4),
    ]
    assert read_gpu_minutes(logs) == found
    assert (
        gpu_minutes([*JsonLinesTail(logs / "gpu_metrics.jsonl").records(), {"kind": "gpu"}])
        == found
    )
    for second in range(600):
        run.line("gpu_metrics-node-1", MINUTE + second, as_record(GPU))
    assert len(read_gpu_minutes(logs)) == 10
    size = (logs / "gpu_metrics-node-1.jsonl").stat().st_size
    monkeypatch.setattr(readings, "MOST_BYTES", size // 2)
    thinned = read_gpu_minutes(logs)
    assert 3 <= len(thinned) < 10 and thinned[-1].time > MINUTE + 300


def points(*values):
    return [StepMetrics(step, loss=value) for step, value in enumerate(values, 1)]


def test_a_long_line_is_thinned_by_means_and_keeps_its_gaps():
    places, values = line_of(points(2.0, None, math.nan), "loss")
    assert (places, values[0]) == ([1, 2, 3], 2.0)
    assert all(map(math.isnan, values[1:]))
    places, values = line_of(points(*(float(n % 2) for n in range(3000))), "loss")
    assert (len(places), places[-1]) == (1000, 3000)
    assert values[0] == pytest.approx(1 / 3)
    _, values = line_of(points(*[None] * 2000), "loss")
    assert all(map(math.isnan, values))


def test_long_curves_keep_their_extremes_and_their_end():
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


def test_the_first_steps_do_not_set_the_scale():
    falling = [100.0] * 3 + [3.0 - step / 100 for step in range(3, 100)]
    low, high = limits(line_of(points(*falling), "loss"), ([], []))
    assert (low, high) == (pytest.approx(2.01 - 0.047), pytest.approx(2.95 + 0.047))
    few = limits(line_of(points(100.0, *[3.0] * 38), "loss"))
    assert few == (pytest.approx(3 - 4.85), pytest.approx(100 + 4.85))  # too few to leave any out
    assert limits(line_of(points(2.0), "loss")) == (pytest.approx(1.98), 2.02)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("size", ["1280,900", "500,800"])
def test_a_browser_draws_the_page_without_a_network(run, size):
    write_summary(run.folder, run.view())
    page = (run.folder / "summary.html").read_text()
    validated = '"validations":{"step":[2000],"loss":[3.05],"bits_per_byte":[0.875]}'
    with_baseline = (
        '"validations":{"step":[0,1000,2000],"loss":[11,3.2,3.05],"bits_per_byte":[3,1,0.9]}'
    )
    band = '"loss":[3.1,3.05,3],"loss_low":[3.1,3.03,2.9],"loss_high":[3.1,3.07,3.1]'
    for before, after in (
        (validated, with_baseline),
        ('"expected":{}', f'"expected":{{"step":[1000,2001,2501],{band}}}'),
    ):
        assert page.count(before) == 1
        page = page.replace(before, after)
    (run.folder / "summary.html").write_text(page)
    seen = seen_in_browser(run.folder / "summary.html", DRIVER, size=size)
    assert (seen["errors"], seen["loaded"]) == ("", 0)
    assert seen["titles"] == [
        *("Loss", "Bits per byte", "Learning rate", "Throughput", "MFU", "Saved and mirrored"),
        *("GPU utilization", "GPU temperature", "GPU power", "GPU memory"),
    ]
    assert len(seen["light"]) == len(seen["titles"]) and min(seen["light"]) > 0
    assert seen["page"] != seen["darkPage"] and seen["light"] != seen["dark"]
    step, loss = re.findall(r"[\d.,]+", seen["hovered"])[:2]
    assert float(loss) == pytest.approx(3 + 100 / float(step), abs=1e-3)
    (low, high), second, *_ = seen["zoomed"]
    assert 10 < low < high < 2000 and second == [low, high]  # panels zoom together
    # The expected loss alone goes on, and its band belongs to it; untrained losses set no scale.
    assert seen["whole"][:2] == [[0, 2501], [0, 2001]] and seen["placed"] == [0, 2, 5, 8]
    assert seen["hidden"] == [False, True, False, False, False, False]
    assert seen["highest"][0] < 5 and 1 < seen["highest"][1] < 1.1
    assert seen["wider"] <= 0
