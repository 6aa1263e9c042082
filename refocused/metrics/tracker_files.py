"""Trackers that write files: event files for TensorBoard, and newest figures for Prometheus."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refocused.metrics.jsonl import dotted
from refocused.metrics.trackers import END, Record, TrackedRun, scalars
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
    "train_goodput_fraction": "Share of the time since the first start in steps that count.",
    "train_gpu_memory_fraction": "Peak share of the fullest GPU's memory.",
    "train_slowest_rank": "Rank with the longest work in a step.",
    "train_slowest_excess_fraction": "Of its work beyond that of the median rank.",
    "train_seconds_left": "Until the run ends.",
    "train_seconds_trained": "Of all sessions since the first start.",
    "train_cost_usd": "Of that time.",
    "train_cost_left_usd": "Of the time left.",
    "validation_loss": "Mean loss on the validation sequences, in nats a token.",
    "validation_bits_per_byte": "Of text, on the validation sequences.",
    "validation_step": "Step of that validation.",
    "training": "1 while the run trains, 0 when it has ended.",
    "updated_timestamp_seconds": "When this file was written.",
}


class TensorBoardTracker:
    """Writes one event file per session to `RUN/tensorboard`."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None  # torch's SummaryWriter, which is not annotated

    def open(self) -> str:
        """Create a file with the settings, and purge later steps."""
        from torch.utils.tensorboard import SummaryWriter, summary

        folder = self._run.folder / "tensorboard"
        writer: Any = SummaryWriter
        self._writer = writer(str(folder), purge_step=self._run.step + 1, flush_secs=30)
        # SummaryWriter.add_hparams would begin a file without `purge_step`, and write a loss of 0.
        hparams: Any = summary.hparams
        metrics = {"train/loss": 0, "validation/loss": 0}
        plain = bool | int | float | str
        settings = {
            name: value if isinstance(value, plain) else str(value)
            for name, value in dotted(self._run.settings).items()
        }
        for part in hparams(settings, metrics):
            self._writer.file_writer.add_summary(part)
        return f"tensorboard --logdir {folder}"

    def write(self, record: Record) -> None:
        """Add a record's numbers, a text sample or histograms."""
        step = record["step"]
        if record["kind"] == "sample":
            text = "".join(f"    {line}\n" for line in record["sample"].splitlines())
            self._writer.add_text("sample", text, step)
        elif record["kind"] == "histograms":
            for histogram in record["histograms"]:
                self._writer.add_histogram_raw(
                    histogram.name,
                    min=histogram.low,
                    max=histogram.high,
                    num=sum(histogram.counts),
                    sum=histogram.total,
                    sum_squares=histogram.squares,
                    bucket_limits=histogram.edges[1:],
                    bucket_counts=histogram.counts,
                    global_step=step,
                )
        else:
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> str:
        """Flush and close the file."""
        self._writer.close()
        return ""


class OpenMetricsTracker:
    """Keeps a run's newest figures in an OpenMetrics text file for Prometheus' node exporter.

    The exporter's textfile collector reads the files `*.prom` of a folder in Prometheus' older text
    form. All metrics are gauges without time stamps, whose text is the same in both forms.
    """

    name = "openmetrics"

    def __init__(self, run: TrackedRun, *, clock: Callable[[], float] = time.time) -> None:
        """Prepare; nothing is written before the first record. The clock gives Unix seconds."""
        self._file = Path(str(run.tracking.openmetrics))
        self._run, self._clock = run.name, clock
        self._values: dict[str, float] = {}

    def open(self) -> str:
        """Check that the folder exists: the exporter would not read a new one."""
        if not self._file.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self._file.parent}")
        return f"the newest figures are in {self._file}"

    def write(self, record: Record) -> None:
        """Replace the file: update this record's numbers, keep those of other kinds."""
        if record["kind"] not in ("step", "validation", END):
            return
        group = "validation" if record["kind"] == "validation" else "train"
        numbers = {**scalars(record), f"{group}/step": record["step"]}
        self._values |= {name.replace("/", "_"): value for name, value in numbers.items()}
        self._replace(training=True)

    def close(self, exit_code: int) -> str:
        """Mark in the file that training has ended."""
        if self._values:
            self._replace(training=False)
        return ""

    def _replace(self, *, training: bool) -> None:
        from prometheus_client import CollectorRegistry, Gauge
        from prometheus_client.openmetrics.exposition import generate_latest

        registry = CollectorRegistry()
        self._values |= {"training": training, "updated_timestamp_seconds": self._clock()}
        for name, text in _HELP.items():
            if name in self._values:
                gauge = Gauge(f"refocused_{name}", text, ["run"], registry=registry)
                gauge.labels(self._run).set(self._values[name])
        replace_file(self._file, generate_latest(registry))  # type: ignore[no-untyped-call]
