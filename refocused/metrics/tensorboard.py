"""What a run measures, in files that TensorBoard shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from refocused.metrics.trackers import Record, histograms, scalars, step_of

_FLUSH_SECONDS = 30


class TensorBoardTracker:
    """Writes numbers and samples into event files, one more for each session."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, step: int, settings: Mapping[str, object]) -> None:
        """Prepare; `open` begins to write.

        Args:
            folder: Where the files go.
            step: Where the session begins: what earlier ones wrote of later steps counts no more.
            settings: All that the run was given, nested.
        """
        self._folder, self._step, self._settings = folder, step, settings
        self._writer: Any = None  # torch's SummaryWriter
        self._summary_form: Any = None  # of what an event holds

    def open(self) -> str:
        """Begin a file, with the settings of the run.

        Raises:
            ModuleNotFoundError: The package that writes is not installed.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("try: pip install tensorboard")
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter, summary  # nobody else needs it

        self._summary_form = Summary
        self._writer = SummaryWriter(
            str(self._folder), purge_step=self._step + 1, flush_secs=_FLUSH_SECONDS
        )
        # SummaryWriter.add_hparams would begin another folder, without the metrics.
        shown = dict(_flat(self._settings))
        hparams: Any = summary.hparams  # not annotated
        for part in hparams(shown, {"train/loss": 0, "validation/loss": 0}):
            self._writer.file_writer.add_summary(part)
        return f"tensorboard --logdir {self._folder}"

    def write(self, record: Record) -> None:
        """Add a record's numbers, or the text of a sample."""
        step = step_of(record)
        if record["kind"] == "sample":
            text = "".join(f"    {line}\n" for line in str(record["sample"]).splitlines())
            self._writer.add_text("sample", text, step)
            return
        if record["kind"] == "histograms":
            self._write_histograms(record, step)
            return
        form, numbers = self._summary_form, scalars(record)
        # One event for all: SummaryWriter.add_scalar would make one of each, at twice the cost.
        values = [form.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.file_writer.add_summary(form(value=values), step)

    def _write_histograms(self, record: Record, step: int) -> None:
        for one in histograms(record):
            self._writer.add_histogram_raw(
                one.name,
                min=one.edges[0],
                max=one.edges[-1],
                num=sum(one.counts),
                sum=one.total,
                sum_squares=one.squares,
                bucket_limits=one.edges[1:],
                bucket_counts=one.counts,
                global_step=step,
            )

    def close(self, exit_code: int) -> str:
        """Write what waits."""
        self._writer.close()
        return ""


def _flat(settings: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield settings by dotted name, as TensorBoard's table of hyper-parameters takes them."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            is_plain = isinstance(value, bool | int | float | str)
            yield f"{above}{name}", value if is_plain else str(value)
