from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from refocused.metrics.openmetrics import OpenMetricsTracker


def step(number: int, **changes: Any) -> dict[str, Any]:
    known = {"loss": 3.25, "gradient_norm": math.inf, "mfu_fraction": None, "cost_usd": 1.5}
    return {"kind": "step", "step": number, "epoch": 0, **known, **changes}


def read(text: str) -> dict[str, float]:
    """Parse as OpenMetrics and as Prometheus' older form; both must find the same."""
    found = []
    for parse in (text_string_to_metric_families, parser.text_string_to_metric_families):
        values = {}
        for family in parse(text):
            assert family.type == "gauge"
            assert family.documentation
            (sample,) = family.samples
            assert sample.labels == {"run": "my-run_1.5"}
            assert sample.timestamp is None  # node exporter refuses a file with one
            values[sample.name.removeprefix("refocused_")] = sample.value
        found.append(values)
    assert str(found[0]) == str(found[1])  # as texts: NaN equals nothing
    return found[0]


def tracker(file: Path) -> OpenMetricsTracker:
    return OpenMetricsTracker(file, run="my-run_1.5", clock=lambda: 1.7e9)


def test_the_file_holds_the_newest_of_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    opened = tracker(file)
    opened.open()
    assert not file.exists()
    opened.write(step(40))
    opened.write({"kind": "validation", "step": 40, "validation_loss": 3.5, "perplexity": 33.1})
    opened.write(step(50, loss=3.125))
    opened.write({"kind": "sample", "step": 50, "sample": "text"})
    assert read(file.read_text()) == {
        "train_step": 50,
        "train_loss": 3.125,
        "train_gradient_norm": math.inf,
        "train_cost_usd": 1.5,
        "validation_loss": 3.5,
        "validation_step": 40,
        "training": 1,
        "updated_timestamp_seconds": 1.7e9,
    }  # what is unknown is left out
    opened.write({"kind": "end", "step": 50, "seconds_trained": 100.0, "cost_usd": 1.75})
    values = read(file.read_text())
    assert (values["train_cost_usd"], values["train_loss"]) == (1.75, 3.125)
    opened.close(0)
    assert read(file.read_text())["training"] == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_figure_that_is_no_number_is_written_as_such(tmp_path: Path) -> None:
    tracker(tmp_path / "run.prom").write(step(1, loss=math.nan, gradient_norm=-math.inf))
    values = read((tmp_path / "run.prom").read_text())
    assert math.isnan(values["train_loss"])
    assert values["train_gradient_norm"] == -math.inf


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tracker(tmp_path / "nowhere" / "run.prom").open()
