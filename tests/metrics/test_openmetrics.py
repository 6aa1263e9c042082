import math
from pathlib import Path

import pytest
from metrics.session_records import step, tracked_run
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from refocused.metrics.tracker_files import OpenMetricsTracker


def read(file: Path) -> dict[str, float]:
    """Parse as OpenMetrics and as Prometheus' older form; both must find the same."""
    found = []
    for parse in (text_string_to_metric_families, parser.text_string_to_metric_families):
        values = {}
        for family in parse(file.read_text()):
            assert (family.type, bool(family.documentation)) == ("gauge", True)
            (sample,) = family.samples
            assert sample.labels == {"run": "tiny"}
            assert sample.timestamp is None  # node exporter refuses a file with one
            values[sample.name.removeprefix("refocused_")] = sample.value
        found.append(values)
    assert str(found[0]) == str(found[1])  # as texts: NaN equals nothing
    return found[0]


def tracker(file: Path) -> OpenMetricsTracker:
    run = tracked_run(file.parent, openmetrics=str(file))
    return OpenMetricsTracker(run, clock=lambda: 1.7e9)


def test_the_file_holds_the_newest_of_every_figure(tmp_path: Path) -> None:
    file, known = tmp_path / "run.prom", {"gradient_norm": math.inf, "cost_usd": 1.5, "epoch": 0}
    opened = tracker(file)
    opened.open()
    assert not file.exists()
    opened.write(step(40, math.nan, **known))
    values = read(file)
    assert math.isnan(values["train_loss"]) and values["train_step"] == 40
    opened.write({"kind": "validation", "step": 40, "validation_loss": 3.5, "perplexity": 33.1})
    opened.write(step(50, 3.125, **known))
    opened.write({"kind": "sample", "step": 50, "sample": "text"})
    assert read(file) == {
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
    values = read(file)
    assert (values["train_cost_usd"], values["train_loss"]) == (1.75, 3.125)
    opened.close(0)
    assert read(file)["training"] == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tracker(tmp_path / "nowhere" / "run.prom").open()
