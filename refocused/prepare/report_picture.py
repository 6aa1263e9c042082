"""The picture of a data report: which ids there are, and how long documents are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refocused.bucket.partial_files import disk_errors
from refocused.prepare.id_statistics import Histogram
from refocused.prepare.inspect_data import DataReport


def draw_report(report: DataReport, file: Path) -> None:
    """Write two histograms as a PNG: tokens by id, and documents by length.

    Raises:
        BucketError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    ids, lengths = figure.subplots(1, 2)
    _draw(ids, report.sample.id_histogram, x="id", y="tokens")
    _draw(lengths, report.sample.length_histogram, x="tokens of a document", y="documents")
    lengths.set_xscale("log")
    padding = "" if report.padding_fraction is None else f", {report.padding_fraction:.1%} padding"
    figure.suptitle(f"{report.url}: {report.tokens:,} tokens in {report.files} files{padding}")
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=110)


def _draw(axes: Any, histogram: Histogram, *, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if not histogram.counts:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)
        return
    axes.stairs(histogram.counts, histogram.edges, fill=True)
    axes.set_yscale("log")
