"""The newest figures of a run as an OpenMetrics text file, which Prometheus' node exporter reads.

The exporter's textfile collector takes the files `*.prom` of a folder. All metrics are gauges and
have no time stamps: so the text is also of Prometheus' own, older form, which is the one that the
collector parses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from refocused.metrics.trackers import END, Record, scalars
from refocused.system.atomic_files import replace_file

_HELP = {
    "train_step": "Optimizer steps made.",
    "train_total_steps": "Steps of the whole run.",
    "train_tokens": "Tokens trained on since the first start.",
    "train_loss": "Mean loss of the last logged step, in nats a token.",
    "train_loss_mean": "Mean of the losses of the steps since the one logged before.",
    "train_best_loss": "Lowest validation loss so far.",
    "train_learning_rate": "Of the last logged step.",
    "train_gradient_norm": "Of the whole gradient before clipping.",
    "train_step_seconds": "Mean time of the steps since the last line.",
    "train_tokens_per_second": "Over all ranks, validations and saves included.",
    "train_mfu_fraction": "Share of the GPUs' dense peak that the model's FLOPs take.",
    "train_data_wait_fraction": "Share of the time spent waiting for batches.",
    "train_gpu_memory_fraction": "Peak share of the fullest GPU's memory.",
    "train_seconds_left": "Until the run ends.",
    "train_seconds_trained": "Of all sessions since the first start.",
    "train_cost_usd": "Of that time.",
    "train_cost_left_usd": "Of the time left.",
    "validation_loss": "Mean loss on the validation windows, in nats a token.",
    "validation_step": "Step of that validation.",
}


class OpenMetricsTracker:
    """Keeps one file that holds the newest figures."""

    name = "openmetrics"

    def __init__(self, file: Path, *, run: str, clock: Callable[[], float] = time.time) -> None:
        """Prepare; nothing is written before the first record.

        Args:
            file: Replaced at every record; its folder must exist.
            run: The run's name, the label of every metric.
            clock: Unix seconds.
        """
        self._file, self._run, self._clock = file, run, clock
        self._values: dict[str, float] = {}

    def open(self) -> str:
        """Refuse a folder that is not there: nobody would read a new one."""
        if not self._file.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self._file.parent}")
        return f"the newest figures are in {self._file}"

    def write(self, record: Record) -> None:
        """Replace the file by one with a record's numbers, besides those of other kinds."""
        if record["kind"] not in ("step", "validation", END):
            return
        group = "validation" if record["kind"] == "validation" else "train"
        numbers = {**scalars(record), f"{group}/step": float(str(record["step"]))}
        known = {name.replace("/", "_"): value for name, value in numbers.items()}
        self._values |= {name: value for name, value in known.items() if name in _HELP}
        self._replace(training=True)

    def close(self, exit_code: int) -> str:
        """Say in the file that nothing trains any more."""
        if self._values:
            self._replace(training=False)
        return ""

    def _replace(self, *, training: bool) -> None:
        text = openmetrics_text(self._values, run=self._run, training=training, now=self._clock())
        replace_file(self._file, text.encode())


def openmetrics_text(values: Mapping[str, float], *, run: str, training: bool, now: float) -> str:
    """Write figures down, each as a gauge of this run.

    Args:
        values: By name, among those that have a description here.
        run: The run's name; it holds no character that would have to be escaped.
        training: Whether training goes on.
        now: Unix seconds.
    """
    described = [(name, _HELP[name], values[name]) for name in _HELP if name in values]
    described += [
        ("training", "1 while the run trains, 0 when it has ended.", float(training)),
        ("updated_timestamp_seconds", "When this file was written.", now),
    ]
    lines = []
    for name, text, value in described:
        lines += [
            f"# TYPE refocused_{name} gauge",
            f"# HELP refocused_{name} {text}",
            f'refocused_{name}{{run="{run}"}} {_number(value)}',
        ]
    return "\n".join([*lines, "# EOF\n"])


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
