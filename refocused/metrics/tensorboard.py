"""Write measurements to TensorBoard event files."""

from typing import Any

from refocused.metrics.jsonl import dotted
from refocused.metrics.trackers import Record, TrackedRun, scalars


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
            for one in record["histograms"]:
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
        else:
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> str:
        """Flush and close the file."""
        self._writer.close()
        return ""
