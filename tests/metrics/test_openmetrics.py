from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from refocused.metrics.openmetrics import OpenMetricsTracker, openmetrics_text
from refocused.metrics.step_metrics import StepMetrics

STEP = StepMetrics(
    step=40,
    total_steps=100,
    tokens=24_000,
    epoch=0,
    loss=3.25,
    loss_mean=3.5,
    best_loss=None,
    learning_rate=3e-4,
    gradient_norm=math.inf,
    loss_scale=None,
    skipped_steps=0,
    step_seconds=2.0,
    tokens_per_second=300.0,
    mfu_fraction=None,
    data_wait_fraction=0.25,
    gpu_memory_fraction=None,
    seconds_left=120.0,
    seconds_trained=90.0,
    cost_usd=1.5,
    cost_left_usd=2.0,
)


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
    assert found[0] == found[1]
    return found[0]


def tracker(file: Path, now: float = 1.7e9) -> OpenMetricsTracker:
    return OpenMetricsTracker(file, run="my-run_1.5", clock=lambda: now)


def test_the_file_holds_the_newest_of_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    told = tracker(file)
    told.open()
    assert not file.exists()
    told.write({"kind": "step", **STEP.as_record()})
    told.write({"kind": "validation", "step": 40, "validation_loss": 3.5, "perplexity": 33.1})
    told.write({"kind": "step", **STEP.as_record(), "step": 50, "loss": 3.125})
    told.write({"kind": "sample", "step": 50, "sample": "text"})
    values = read(file.read_text())
    assert values["train_step"] == 50
    assert values["train_loss"] == 3.125
    assert values["train_gradient_norm"] == math.inf
    assert values["train_cost_usd"] == 1.5
    assert (values["validation_loss"], values["validation_step"]) == (3.5, 40)
    assert (values["training"], values["updated_timestamp_seconds"]) == (1, 1.7e9)
    assert "train_mfu_fraction" not in values  # unknown is left out
    told.write({"kind": "end", "step": 50, "seconds_trained": 100.0, "cost_usd": 1.75})
    values = read(file.read_text())
    assert (values["train_cost_usd"], values["train_loss"]) == (1.75, 3.125)
    told.close(0)
    assert read(file.read_text())["training"] == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_loss_that_is_no_number_is_written_as_such() -> None:
    text = openmetrics_text(
        {"train_loss": math.nan, "train_gradient_norm": -math.inf},
        run="my-run_1.5",
        training=True,
        now=1.0,
    )
    assert "refocused_train_loss{" in text
    values = read_unequal(text)
    assert math.isnan(values["refocused_train_loss"])
    assert values["refocused_train_gradient_norm"] == -math.inf


def read_unequal(text: str) -> dict[str, float]:
    """Parse what holds a NaN, which equals nothing."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_folder_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tracker(tmp_path / "nowhere" / "run.prom").open()
