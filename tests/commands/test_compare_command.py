"""What `compare` counts: losses at equal tokens, and whether scores differ by more than errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands.scenes import compare
from monitor.browser import needs_chromium, seen_in_browser

from refocused.commands.main import run_command
from refocused.commands.monitor import at_tenths, at_validations, compare_scores, losses_of
from refocused.metrics.history import Validation


def test_losses_are_compared_over_the_tokens_that_both_runs_have_seen() -> None:
    short = [(10 * step, float(step)) for step in range(1, 11)]
    long = [(5 * step, step / 2 + 1) for step in range(1, 41)]  # of half the batch, to twice as far
    rows = at_tenths([short, long])
    # Two lines of each run at least: a mean over 10 tokens says nothing of half of them.
    assert [(row["from"], row["tokens"]) for row in rows] == [(n, n + 20) for n in range(0, 81, 20)]
    assert rows[0]["values"] == [1.5, 2.25] and rows[4]["values"] == [9.5, 10.25]
    (coarse,) = at_tenths([short, long[9::20]])  # a line each 100 tokens
    assert coarse["values"] == [5.5, 11.0]
    thousand = [(step, 1.0) for step in range(1, 1001)]
    assert len(at_tenths([thousand, thousand])) == 10
    # A part in which one run has logged nothing is left out, and a long gap widens no other part.
    gap = thousand[:250] + thousand[420:]
    assert [row["tokens"] for row in at_tenths([thousand, gap])] == [
        *(100, 200, 300),
        *range(500, 1001, 100),
    ]
    # A log line counts by its tokens: those of a larger batch count more.
    grown = [(10, 4.0), (20, 4.0), (30, 4.0), (60, 1.0)]
    assert at_tenths([grown, grown])[1]["values"] == [2.5, 2.5]
    # A run that goes on from another begins at its first line.
    late = [(step, 2.0) for step in range(911, 1001)]
    assert [row["tokens"] for row in at_tenths([thousand, late])] == [1000]
    assert len(at_tenths([[(5, 1.0), (5, 2.0)], [(5, 1.0)]])) == 1  # damaged
    seen = at_validations([short, long])
    assert seen[0] == {"tokens": 10, "values": [1.0, 2.0]} and len(seen) == 10
    thousand = [(step, 1.0) for step in range(1001)]
    shown = [row["tokens"] for row in at_validations([thousand, thousand])]
    assert len(shown) <= 10 and shown[-1] == 1000
    assert at_validations([short, [(7, 1.0)]]) == [] == at_validations([short, []])
    # That before the first step counts (evaluation.at_start); of a damaged step there is no tenth.
    points = [Validation(0, 9.0, tokens=0), Validation(5, 3.0, tokens=50), Validation(9, 2.0)]
    assert losses_of(points) == [(0, 9.0), (50, 3.0)]
    assert at_validations([losses_of(points)] * 2)[0] == {"tokens": 0, "values": [9.0, 9.0]}
    assert at_tenths([[(0, 9.0)], short]) == []


@pytest.mark.parametrize(("change", "exceeds"), [(0.099, False), (-0.099, False), (0.101, True)])
def test_the_error_of_a_difference_is_that_of_both_scores(change: float, exceeds: bool) -> None:
    runs = [
        {"a acc": (0.5, 0.03), "b": (1.0, None)},
        {"a acc": (0.5 + change, 0.04), "b": (2.0, 0.1)},
    ]
    known, unknown = compare_scores([*runs, {"a acc": (0.5, 0.0), "b": (1.0, None)}])
    (first, _) = known["changes"]
    assert (first["value"], first["error"]) == (pytest.approx(change), pytest.approx(0.05))
    assert first["exceeds_errors"] is exceeds
    assert [each["exceeds_errors"] for each in unknown["changes"]] == [None, None]
    assert compare_scores([*runs, {"b": (1.0, None)}])[0]["name"] == "b"


def test_json_holds_numbers_of_every_run_and_only_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    assert run_command("compare", ["one", "two", "one/../bytes", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.count("warning: ") == len(found["warnings"]) == 2
    assert [run["run"] for run in found["runs"]] == ["runs/one", "runs/two", "runs/one/../bytes"]
    assert [run["tokens"] for run in found["runs"]] == [1_000_000] * 3
    settings = {row["name"]: row["values"] for row in found["settings"]}
    assert settings == {
        "optimizer.lr": [0.001, 0.002, 0.001],
        "data.tokenizer": ["gpt2", "gpt2", "bytes"],
    }
    assert found["training_losses"] == found["validation_losses"] == []
    assert [row["name"] for row in found["setup"]] == ["git"]
    assert [row["name"] for row in found["scores"]] == ["piqa acc", "mine acc"]


def test_what_is_not_known_of_a_run_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    Path("runs/two/run.yaml").write_text("run: [one\n<b>: {{")
    lines = Path("runs/one/logs/training_metrics.jsonl")
    lines.write_text("".join(line for line in lines.open() if '"tasks"' not in line))
    assert run_command("compare", ["one", "two", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["settings"] == found["scores"] == []
    assert "runs/two: run.yaml is missing or damaged" in err
    # A score of one run alone stands with the figures, whichever run that is.
    for runs in (["one", "two"], ["two", "one"]):
        assert run_command("compare", [*runs, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)["figures"]
        assert {"piqa acc", "mine acc"} < {row["name"] for row in figures}


def test_figures_have_their_change_from_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    facts = ("one", 2.0, 1.0, 100), ("two", 2.5, 0.75, 150), ("bytes", 1.0, 0.5, None)
    for name, loss, bits, seconds in facts:
        state = Path("runs", name, "state.json")
        known = json.loads(state.read_text()) | {"loss": loss, "best_loss": loss, "best_step": 3}
        known |= {"bits_per_byte": bits, "seconds": seconds, "cost_usd": 1.0}
        state.write_text(json.dumps(known))
    assert run_command("compare", ["one", "two", "--page", "page.html"]) == 0
    lines = {line.split("   ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["training loss"].endswith(" 2.5000 (+0.5000)")
    assert " 2.5000 (+0.5000), perplexity 12.18" in lines["best validation loss"]
    assert lines["bits per byte"].endswith(" 0.7500 (-0.2500)")
    assert lines["time trained"].endswith(" 2.5 min (x1.5)") and "cost" not in lines
    # Losses of two tokenizers have no difference; bits per byte do.
    assert run_command("compare", ["one", "bytes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["figures"]}
    assert "changes" not in rows["training loss"] and "changes" not in rows["best validation loss"]
    assert rows["bits per byte"]["changes"] == [-0.5]
    script = re.search(r'id="runs">(.*?)</script>', Path("page.html").read_text())
    assert script is not None
    first, second = json.loads(script[1])
    assert second["changes"]["training loss"] == "2.5000 (+0.5000)"
    assert second["compared"]["validation losses at so many tokens"][0] == [
        "200,000",
        "2.8000 (-0.2500)",
    ]
    assert first["compared"]["scores"][0] == ["piqa acc", "0.3000 +- 0.0200"]


def test_a_run_that_is_only_in_the_bucket_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    logs = Path(shutil.copytree("runs/two", "bucket/two/logs/host"))
    for file in (logs / "logs").iterdir():
        file.rename(logs / file.name)
    shutil.rmtree("runs/two")
    assert run_command("compare", ["one", "runs/two", "--bucket", "bucket", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [run["run"] for run in found["runs"]] == ["runs/one", "bucket/two"]
    assert [row["name"] for row in found["settings"]] == ["optimizer.lr"] and not err
    assert len(found["training_losses"]) == 5 and len(found["scores"]) == 2
    assert not Path("runs/two").exists()
    for runs, words in (
        (["one", "missing"], "no machine has sent logs of a run missing here"),
        (["two", "two"], "name two or more different runs"),
    ):
        assert run_command("compare", [*runs, "--bucket", "bucket"])
        assert words in capsys.readouterr().err


def test_addresses_in_settings_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    with Path("runs/two/run.yaml").open("a") as settings:
        settings.write("log: {on_alarm: 'https://hooks.example.com/SECRET'}\n")
    for option in ((), ("--json",), ("--page", "page.html")):
        assert run_command("compare", ["one", "two", *option]) == 0
        printed = capsys.readouterr().out
        assert "https://hooks.example.com/..." in printed and "SECRET" not in printed
    assert "SECRET" not in Path("page.html").read_text()


# Write down what the page of the runs shows, then add the runs of another page: of itself.
DRIVER = """
const rows = id => [...document.querySelectorAll(`#${id} tr`)].map(
  row => [...row.children].map(cell => cell.innerText));
const shown = () => ({warnings: get("warnings").innerText, compared: rows("compared"),
  facts: rows("facts"), differ: rows("settings"), along: get("along").value,
  lines: charts[0].chart.series.length});
setTimeout(async () => {
  const seen = {before: shown()}, text = async () => document.documentElement.outerHTML;
  await get("more").onchange({target: {files: [{name: "other.html", text}]}});
  report({...seen, after: shown()});
}, 300);
"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("size", ["1400,900", "500,800"])
def test_a_browser_shows_runs_beside_each_other(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(monkeypatch)
    hostile = "one <script>alert(1)</script>"
    state = Path("runs/one/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"run": hostile}))
    assert run_command("compare", ["one", "two", "--page", "page.html"]) == 0
    seen = seen_in_browser(tmp_path / "page.html", DRIVER, size=size)
    assert (seen["errors"], seen["loaded"]) == ("", 0) and seen["wider"] <= 0
    before, after = seen["before"], seen["after"]
    assert (before["warnings"], before["along"]) == ("", "tokens")
    assert before["differ"][:3] == [
        ["", hostile, "two"],
        ["run.name", '"one"', '"two"'],
        ["optimizer.lr", "0.001", "0.002"],
    ]
    assert ["bits per byte", "0.7500", "0.6875 (-0.0625)"] in before["facts"]
    assert ["0 to 100,000", "3.7500", "3.5000 (-0.2500)"] in before["compared"]
    assert ["200,000", "3.0500", "2.8000 (-0.2500)"] in before["compared"]
    assert ["mine acc", "0.1000", "0.2000 (+0.1000)"] in before["compared"]
    # The changes of another page are from its own first run.
    assert after["facts"][0] == ["", hostile, "two", f"{hostile} (2)", "two (2)"]
    assert ["bits per byte", "0.7500", "0.6875 (-0.0625)", "0.7500", "0.6875"] in after["facts"]
    assert ["mine acc", "0.1000", "0.2000 (+0.1000)", "-", "-"] in after["compared"]
    assert after["lines"] > before["lines"]
    # Runs of two tokenizers have no losses beside each other, but a warning.
    assert run_command("compare", ["one", "bytes", "--page", "page.html"]) == 0
    seen = seen_in_browser(tmp_path / "page.html", DRIVER, size=size)["before"]
    assert seen["warnings"].startswith("The tokenizers differ") and len(seen["compared"]) == 3
    assert ["bits per byte", "0.7500", "0.2500 (-0.5000)"] in seen["facts"]
