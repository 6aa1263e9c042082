"""What `compare` counts: losses at equal tokens, and whether scores differ by more than errors."""

import json
from pathlib import Path

import pytest
from commands.scenes import compare

from refocused.commands.main import run_command
from refocused.commands.monitor import at_tenths, at_validations, compare_scores


def test_losses_are_compared_over_the_tokens_that_both_runs_have_seen() -> None:
    short = [(10 * step, float(step)) for step in range(1, 11)]
    long = [(5 * step, step / 2 + 1) for step in range(1, 41)]  # of half the batch, to twice as far
    rows = at_tenths([short, long])
    assert [row["tokens"] for row in rows] == list(range(10, 101, 10))
    assert rows[0]["values"] == [1.0, 1.75] and rows[9]["values"] == [10.0, 10.75]
    # A tenth in which one run has logged nothing is left out.
    assert [row["tokens"] for row in at_tenths([short, long[::10]])] == [10, 60]
    seen = at_validations([short, long])
    assert seen[0] == {"tokens": 10, "values": [1.0, 2.0]} and len(seen) == 10
    thousand = [(step, 1.0) for step in range(1001)]
    shown = [row["tokens"] for row in at_validations([thousand, thousand])]
    assert len(shown) <= 10 and shown[-1] == 1000
    assert at_validations([short, [(7, 1.0)]]) == [] == at_validations([short, []])


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
