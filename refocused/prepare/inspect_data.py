"""Inspect a data set: headers and a sample of its tokens, read by ranges, with a picture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.config.data import DataConfig
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.formats.token_layout import vocabulary_for
from refocused.data.manifest.select_files import named_tokenizer
from refocused.prepare.id_statistics import Histogram, IdCounter, IdStatistics
from refocused.prepare.report_headers import (
    FileReport,
    begin_id,
    candidate_names,
    prepared_facts,
    read_headers,
)
from refocused.system.errors import ShardError

SAMPLED_FILES = 64
MUCH_PADDING = 0.2
_ROW_END = 1 << 40  # no id: it stands between the rows of padded files


@dataclasses.dataclass(frozen=True, slots=True)
class DataReport:
    """What there is.

    Attributes:
        url: The source.
        files: Token files that can be read.
        kinds: Files of each form.
        bytes: Of them.
        tokens: Real tokens.
        places: Ids stored, padding with them.
        padding_fraction: Share of the places that is padding.
        bytes_per_token: Stored bytes for each real token.
        documents: Rows, or documents by the manifest; None: nobody knows.
        tokenizer: Named by the manifest or metadata; None: nobody says.
        sampled_files: Files whose tokens were read.
        sampled_fraction: Share of the tokens that was read.
        sample: What was seen in them.
        problems: What keeps files from being used, each with its way out.
        notes: What one should know.
        unlisted: Those of the files that a run does not use, because `manifest.json` does not list
            them.
    """

    url: str
    files: int
    kinds: Mapping[str, int]
    bytes: int
    tokens: int
    places: int
    padding_fraction: float | None
    bytes_per_token: float | None
    documents: int | None
    tokenizer: str | None
    sampled_files: int
    sampled_fraction: float
    sample: IdStatistics
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    unlisted: int


def inspect_data(
    bucket: Bucket, data: DataConfig, *, sample_tokens: int, vocabulary: int | None = None
) -> DataReport:
    """Look at a data set; nothing is downloaded whole.

    Headers are read of every file, tokens of up to 64 files spread over the set.

    Args:
        bucket: The source.
        data: Patterns, `max_files`, and how files are read.
        sample_tokens: Most tokens to read; as many as there are reads everything.
        vocabulary: Ids that the model knows; larger ones are a problem.

    Raises:
        BucketError: The source cannot be listed or read.
        ShardError: There is no file that looks like tokens or text.
    """
    listing = {blob.name: blob for blob in bucket.list()}
    names = candidate_names(listing, data, url=bucket.url)
    problems: list[str] = []
    files = read_headers(bucket, [listing[name] for name in names], data, problems)
    documents, tokenizer, unlisted = prepared_facts(bucket, listing, data, problems)
    boundary = data.separator_id if data.separator_id is not None else begin_id(bucket, listing)
    counter = IdCounter()
    whole = _total(files) <= sample_tokens
    chosen = files if whole else _spread(files, SAMPLED_FILES)
    for file in chosen:
        most = None if whole else -(-sample_tokens // len(chosen))
        try:
            _sample(bucket, file, counter, boundary=boundary, most=most)
        except ShardError as error:
            problems.append(str(error))
    sample = counter.statistics()
    if vocabulary is not None and sample.max_id is not None and sample.max_id >= vocabulary:
        problems.append(
            f"the id {sample.max_id:,} is in the data, and a vocabulary of {vocabulary:,} ends at "
            f"{vocabulary - 1:,}. {vocabulary_for(sample.max_id)}."
        )
    if tokenizer is None:
        tokenizer = named_tokenizer(bucket, listing, names)
    report = _report(bucket.url, files, len(chosen), sample, documents, tokenizer, problems)
    report = dataclasses.replace(report, unlisted=unlisted)
    return dataclasses.replace(report, notes=tuple(_notes(report)))


def _total(files: Sequence[FileReport]) -> int:
    return sum(file.tokens for file in files)


def _spread(files: Sequence[FileReport], most: int) -> list[FileReport]:
    """Return at most so many files, evenly spaced over all."""
    chosen = np.unique(np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int))
    return [files[int(number)] for number in chosen]


def _sample(
    bucket: Bucket, file: FileReport, counter: IdCounter, *, boundary: int | None, most: int | None
) -> None:
    """Count a file's first `most` tokens, or all."""
    layout, row_length = file.layout, None
    if layout.padded:
        layout, boundary = dataclasses.replace(layout, separator_id=_ROW_END), _ROW_END
    elif len(layout.ids.shape) == 2:
        row_length = layout.ids.shape[1]
    left = most
    reader = ObjectReader(bucket, file.blob)
    for block in token_blocks(reader, layout, name=file.blob.name):
        ids = block if left is None else block[:left]
        real = ids[ids != _ROW_END] if layout.padded else ids
        counter.add(real)
        if row_length is not None:
            _add_rows(counter, ids, row_length)
        elif boundary is not None:
            _add_documents(counter, ids, boundary)
        if left is not None:
            left -= len(ids)
            if left <= 0:
                counter.drop_document()
                return
    if boundary is not None:
        counter.end_document()
    counter.drop_document()


def _add_documents(counter: IdCounter, ids: Ids, boundary: int) -> None:
    for part in _parts(ids, np.flatnonzero(ids == boundary)):
        if part is None:
            counter.end_document()
        else:
            counter.add_to_document(part)


def _parts(ids: Ids, ends: Ids) -> Iterator[Ids | None]:
    """Yield what lies between boundaries, and None for each boundary."""
    start = 0
    for end in ends:
        yield ids[start:end]
        yield None
        start = end + 1
    yield ids[start:]


def _add_rows(counter: IdCounter, ids: Ids, length: int) -> None:
    while len(ids):
        row = ids[: length - counter.open_length]
        counter.add_to_document(row)
        if counter.open_length == length:
            counter.end_document()
        ids = ids[len(row) :]


def _report(
    url: str,
    files: Sequence[FileReport],
    sampled_files: int,
    sample: IdStatistics,
    documents: int | None,
    tokenizer: str | None,
    problems: Sequence[str],
) -> DataReport:
    tokens = _total(files)
    places = sum(file.layout.ids.elements for file in files)
    size = sum(file.blob.size for file in files)
    real = sum(file.tokens - _separators(file) for file in files)
    rows = [file.rows for file in files if file.rows is not None]
    if documents is None and files and len(rows) == len(files):
        documents = sum(rows)
    return DataReport(
        url=url,
        files=len(files),
        kinds=dict(Counter(file.layout.kind for file in files)),
        bytes=size,
        tokens=tokens,
        places=places,
        padding_fraction=1 - real / places if places else None,
        bytes_per_token=size / tokens if tokens else None,
        documents=documents,
        tokenizer=tokenizer,
        sampled_files=sampled_files,
        sampled_fraction=min(sample.tokens / real, 1.0) if real else 0.0,
        sample=sample,
        problems=tuple(problems),
        notes=(),
        unlisted=0,
    )


def _separators(file: FileReport) -> int:
    """Return the separators that reading puts between rows: they are stored nowhere."""
    if file.layout.separator_id is None or file.rows is None:
        return 0
    return file.rows - 1


def _notes(report: DataReport) -> Iterator[str]:
    if report.unlisted:
        yield (
            f"{report.unlisted:,} of {report.files:,} token files are not used by a run, because "
            "manifest.json does not list them. Add them with: refocused prepare_data manifest "
            f"{report.url} --update"
        )
    if report.padding_fraction is not None and report.padding_fraction > MUCH_PADDING:
        yield (
            f"{report.padding_fraction:.1%} of what is stored is padding: {report.places:,} ids "
            f"are {report.tokens:,} tokens."
        )
    if len(report.kinds) > 1:
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
        yield f"files of several forms: {kinds}; they train together all the same."
    sample = report.sample
    if sample.documents and sample.duplicate_documents:
        share = sample.duplicate_documents / sample.documents
        yield f"{share:.1%} of the documents that were read repeat an earlier one."
    if report.sampled_fraction < 1 and report.files:
        yield (
            f"read were the first tokens of {report.sampled_files} of {report.files} files, "
            f"{report.sampled_fraction:.2%} of all; ids, frequencies and duplicates are theirs."
        )


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
