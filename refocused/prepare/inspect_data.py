"""Inspect a data set: read all headers and a sample of its tokens, and draw histograms."""

import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.transfer import map_in_threads
from refocused.config.data import DataConfig
from refocused.data.formats import token_layout
from refocused.data.formats.object_names import (
    MANIFEST_NAME,
    TEXT_PATTERNS,
    TOKEN_PATTERNS,
    TOKEN_SUFFIXES,
    fits,
    is_data,
    matches,
)
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.manifest.shard_manifest import (
    Facts,
    Manifest,
    Shard,
    build_manifest,
    check_chunks,
    is_megatron,
    list_source,
    named_tokenizer,
    read_headers,
)
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import (
    VOCABULARIES,
    TokenizerChoice,
    found_end_of_text,
    load_content,
    settings_file,
    unknown_id,
)
from refocused.tokenizers.tokenizer_json import tokenizer_file

SAMPLED_FILES = 64
SHOWN_FILES, SHOWN_IDS = 3, 40  # whose text is shown, and the ids on both sides of a border
COMPARED_IDS = 1 << 20  # of all sampled files: decoded, and encoded again
EDGE_IDS = 4  # of a text that may be cut, so that they encode differently
MUCH_PADDING, MUCH_LOSS = 0.2, 0.01
_ROW_END = 1 << 40  # not an id: separates the rows of padded files
COUNTED_IDS = 1 << 20  # larger ids, beyond any vocabulary, only enter the maximum
BINS = 64
LENGTH_BINS = 48
REMEMBERED_DOCUMENTS = 4_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class BinCounts:
    """Counts between edges, of which there is one more; upper edges are exclusive."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IdStatistics:
    """Statistics of the ids that were read; None: unknown."""

    tokens: int
    min_id: int | None
    max_id: int | None
    distinct_ids: int
    most_frequent: tuple[tuple[int, float], ...]  # the ten most frequent ids and their shares
    documents: int | None  # or rows; one that spans two files counts twice
    id_histogram: BinCounts  # tokens by id, in bins of equal width
    length_histogram: BinCounts  # documents by tokens, in bins of equal ratio


class IdCounter:
    """Counts ids, and documents where their ends are known, in bounded memory."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens = 0
        self._min_id: int | None = None
        self._max_id: int | None = None
        self._knows_documents = False
        self._lengths: list[int] = []

    def add(self, ids: Ids) -> None:
        """Count ids."""
        if not len(ids):
            return
        self._tokens += len(ids)
        low, high = int(ids.min()), int(ids.max())
        self._min_id = min(low, low if self._min_id is None else self._min_id)
        self._max_id = max(high, self._max_id or 0)
        counted = ids if high < COUNTED_IDS else ids[ids < COUNTED_IDS]
        counts = np.bincount(counted.astype(np.int64, copy=False), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def add_documents(self, lengths: Iterable[int]) -> None:
        """Count documents, of so many tokens each, but no empty ones."""
        self._knows_documents = True
        room = REMEMBERED_DOCUMENTS - len(self._lengths)
        self._lengths += [length for length in lengths if length][:room]

    def statistics(self) -> IdStatistics:
        """Return the statistics so far."""
        counts = self._counts
        order = np.argsort(-counts, kind="stable")[:10]
        frequent = ((int(n), float(counts[n] / self._tokens)) for n in order if counts[n])
        starts = np.arange(0, len(counts), max(-(-len(counts) // BINS), 1))
        by_id = np.add.reduceat(counts, starts) if len(starts) else starts
        id_edges = np.arange(len(starts) + 1) * max(-(-len(counts) // BINS), 1)
        length_edges = by_length = np.zeros(0)
        if self._lengths:
            edges = np.geomspace(1, max(self._lengths) + 1, LENGTH_BINS + 1)
            by_length, length_edges = np.histogram(self._lengths, np.unique(edges.round()))
        return IdStatistics(
            tokens=self._tokens,
            min_id=self._min_id,
            max_id=self._max_id,
            distinct_ids=int(np.count_nonzero(counts)),
            most_frequent=tuple(frequent),
            documents=len(self._lengths) if self._knows_documents else None,
            id_histogram=BinCounts(tuple(map(float, id_edges)), tuple(map(int, by_id))),
            length_histogram=BinCounts(tuple(map(float, length_edges)), tuple(map(int, by_length))),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class DataReport:
    """Contents of a data set; None: unknown."""

    url: str
    files: int  # readable token files
    kinds: Mapping[str, int]  # files of each format
    bytes: int
    tokens: int  # without padding
    places: int  # stored ids, with padding
    padding_fraction: float | None
    bytes_per_token: float | None
    documents: int | None  # rows, or documents by the manifest
    tokenizer: str | None  # from the manifest or metadata
    sampled_files: int
    sampled_fraction: float  # of the tokens
    sample: IdStatistics
    lost_fraction: float | None  # of the sample's ids, which their text does not give again
    problems: tuple[str, ...]  # reasons that files cannot be used, each with its remedy
    notes: tuple[str, ...]
    texts: tuple[str, ...]  # around the first borders of documents in some files, or why not
    unlisted: int  # files that a run does not use, because `manifest.json` does not list them


_File = tuple[Shard, token_layout.TokenLayout]  # a file by its headers; its documents are its rows


def inspect_data(
    bucket: Bucket,
    data: DataConfig,
    sample_tokens: int,
    vocabulary: int | None,
    *,
    shows_text: bool,
    known: dict[str, Facts] | None = None,
) -> DataReport:
    """Inspect a data set without downloading whole files.

    Reads the headers of every file, and up to `sample_tokens` from up to 64 files spread over the
    set. Ids beyond `vocabulary` are reported as a problem. With `shows_text`, some tokens are
    decoded, or the report says why not. Notes in `known` what the headers say. Raises
    `BucketError` if the source cannot be read, `ShardError` if no file looks like tokens or text.
    """
    listing = list_source(bucket, exclude=data.exclude)
    names = [
        name
        for name in sorted(listing)
        if is_data(name) and fits(name, include=data.include, exclude=data.exclude)
    ][: data.max_files]
    if not names:
        raise ShardError(
            f"{bucket.url}: neither tokens nor text among {len(listing):,} objects "
            f"({TOKEN_PATTERNS}, {TEXT_PATTERNS}, at any depth). Correct the address, --include or "
            "--exclude."
        )
    problems: list[str] = []
    files = _read_headers(
        bucket, [listing[name] for name in names], data, problems, {} if known is None else known
    )
    manifest: Manifest | None = None
    try:
        check_chunks(bucket, listing, data=data)
        if MANIFEST_NAME in listing and not matches(MANIFEST_NAME, data.exclude):
            manifest = build_manifest(bucket, data)
    except ShardError as error:
        problems.append(str(error))
    tokenizer = (manifest and manifest.tokenizer) or named_tokenizer(
        bucket, listing, names, data=data
    )
    recorded = None if manifest is None else manifest.end_of_text_id
    boundary = recorded if data.separator_id is None else data.separator_id
    decoder: Any = None
    counter, texts, lost, compared = IdCounter(), list[str](), Counter[int](), 0
    try:
        if shows_text:
            choice = TokenizerChoice.of_data(data)
            if data.tokenizer == "unknown":
                choice = dataclasses.replace(choice, name=str(tokenizer))
                if choice.name not in VOCABULARIES:
                    fix = "Give its file or model with --tokenizer."
                    raise ShardError(f"the tokenizer is {tokenizer}. {fix}")
            content = tokenizer_file(choice, vocabulary=sys.maxsize)
            decoder = load_content(content, where=choice.name)
            if boundary is None and (end := found_end_of_text(decoder, settings_file(choice))):
                boundary = decoder.token_to_id(end)
    except ShardError as error:
        texts.append(f"none, and no round trip: {error}" if decoder is None else str(error))
    tokens = sum(shard.tokens for shard, _ in files)
    chosen, most = files, None
    if tokens > sample_tokens:  # read some files, evenly spaced over all
        count = min(SAMPLED_FILES, len(files))
        numbers = np.unique(np.linspace(0, len(files) - 1, count).round().astype(int))
        chosen = [files[int(number)] for number in numbers]
        most = -(-sample_tokens // len(chosen))
    for number, file in enumerate(chosen):
        border = _ROW_END if len(file[1].ids.shape) == 2 else boundary
        try:
            first = _sample(bucket, file, counter, problems, boundary=border, most=most)
        except ShardError as error:
            problems.append(str(error))
            continue
        if decoder and number % -(-len(chosen) // SHOWN_FILES) == 0:
            texts.append(f"{file[0].name}: {_text(first, border, decoder)}")
        if decoder:
            first = first[: COMPARED_IDS // len(chosen)]
            lost += _lost(first, border, decoder)
            compared += int(np.count_nonzero(first != _ROW_END))
    lost_fraction, notes = lost.total() / compared if compared else None, list[str]()
    if lost_fraction:
        most_lost = [f"{n} {decoder.id_to_token(n)!r}" for n, _ in lost.most_common(5)]
        (problems if lost_fraction > MUCH_LOSS else notes).append(
            f"{lost_fraction:.2%} of {compared:,} ids are lost in a round trip: they are unknown, "
            f"or their text gets other ids, such as {', '.join(most_lost)}. Give the tokenizer "
            "that made them with --tokenizer, or tokenize the texts again."
        )
    sample = counter.statistics()
    if vocabulary is not None and sample.max_id is not None and sample.max_id >= vocabulary:
        problems.append(
            f"the data hold the id {sample.max_id:,}, but a vocabulary of {vocabulary:,} ends at "
            f"{vocabulary - 1:,}. {token_layout.vocabulary_advice(sample.max_id)}."
        )
    counts = [shard.documents for shard in manifest.shards] if manifest else [None]
    counts = [shard.documents for shard, _ in files] if None in counts else counts
    places = sum(layout.ids.elements for _, layout in files)
    size = sum(shard.size for shard, _ in files)
    # Reading inserts separators between rows.
    rows = [shard.documents for shard, layout in files if layout.separator_id is not None]
    real = tokens - sum(number - 1 for number in rows if number)
    kinds = Counter[str](layout.kind for _, layout in files)
    padding = 1 - real / places if places else None
    sampled = min(sample.tokens / real, 1.0) if real else 0.0
    unlisted = len(manifest.unlisted) if manifest else 0
    if unlisted:
        notes.append(
            f"Runs do not use {unlisted:,} of {len(files):,} token files, because manifest.json "
            "does not list them. Add them with: refocused prepare_data manifest "
            f"{bucket.url} --update"
        )
    if padding is not None and padding > MUCH_PADDING:
        notes.append(
            f"{padding:.1%} of the stored ids are padding: {places:,} ids hold {tokens:,} tokens."
        )
    if len(kinds) > 1:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        notes.append(f"The files have several formats ({listed}); a run can mix them.")
    if sampled < 1 and files:
        notes.append(
            "Ids, frequencies and lengths are from a sample: the first tokens of "
            f"{len(chosen)} of {len(files)} files, {sampled:.2%} of all."
        )
    return DataReport(
        url=bucket.url,
        files=len(files),
        kinds=dict(kinds),
        bytes=size,
        tokens=tokens,
        places=places,
        padding_fraction=padding,
        bytes_per_token=size / tokens if tokens else None,
        documents=None if None in counts or not counts else sum(filter(None, counts)),
        tokenizer=None if tokenizer == "unknown" else tokenizer,
        sampled_files=len(chosen),
        sampled_fraction=sampled,
        sample=sample,
        lost_fraction=lost_fraction,
        problems=tuple(problems),
        notes=(*notes, *(manifest.notes if manifest else ())),
        texts=tuple(texts),
        unlisted=unlisted,
    )


def _read_headers(
    bucket: Bucket,
    blobs: Sequence[BlobInfo],
    data: DataConfig,
    problems: list[str],
    known: dict[str, Facts],
) -> list[_File]:
    """Read the headers of objects in parallel; append problems with others to `problems`."""
    names = {blob.name for blob in blobs}
    unsupported = defaultdict[str, list[str]](list)  # names by reason
    for name in sorted(names):
        if is_megatron(name, names) or not name.endswith(TOKEN_SUFFIXES):
            unsupported[token_layout.why_unsupported(name).removeprefix(name)].append(name)
    for reason, same in unsupported.items():
        others = f" (and {len(same) - 1:,} more like it)" if len(same) > 1 else ""
        problems.append(f"{same[0]}{others}{reason}")

    def read(blob: BlobInfo) -> _File | str:
        try:
            layout, facts = read_headers(bucket, blob, data, known)
        except ShardError as error:
            return str(error)
        if facts["documents"] is None and len(layout.ids.shape) == 2:
            facts = facts | {"documents": layout.ids.shape[0]}
        return Shard(**dataclasses.asdict(blob), **facts), layout

    excluded = {name for same in unsupported.values() for name in same}
    readable = [blob for blob in blobs if blob.name not in excluded]
    reports = map_in_threads(read, readable, threads=data.fetch_threads)
    problems += [report for report in reports if isinstance(report, str)]
    return [report for report in reports if not isinstance(report, str)]


def _sample(
    bucket: Bucket,
    file: _File,
    counter: IdCounter,
    problems: list[str],
    *,
    boundary: int | None,
    most: int | None,
) -> Ids:
    """Count a file's first `most` tokens, or all; append what is wrong with them to `problems`.

    Returns the first of them, with `_ROW_END` between rows.
    """
    (shard, plain), name = file, file[0].name
    layout, shape = dataclasses.replace(plain, separator_id=_ROW_END), plain.ids.shape
    left, counted, open_length = most, 0, 0  # the last of the document whose end is not read yet
    reader, first = ObjectReader(bucket, shard.blob), np.zeros(0, np.int64)
    for block in token_blocks(reader, layout, name=name):
        if len(shape) == 2 and not layout.padded:
            firsts = np.arange(-counted % shape[1], len(block), shape[1])
            block = np.insert(block.astype(np.int64), firsts[firsts + counted > 0], _ROW_END)
        ids = block if left is None else block[:left]
        real = ids[ids != _ROW_END]
        if not counted and (problem := token_layout.suspicion(real)) is not None:
            problems.append(f"{name}: {problem}.")
        first = first if counted else ids
        counted += len(real)
        counter.add(real)
        if boundary is not None:
            ends = np.flatnonzero(ids == boundary)
            # As if a document before this block had ended where the open one began.
            ends = np.concatenate(([-1 - open_length], ends))
            counter.add_documents((np.diff(ends) - 1).tolist())
            open_length = len(ids) - 1 - int(ends[-1])
        if left is not None:
            left -= len(ids)
            if left <= 0:
                return first
    if boundary is not None:
        counter.add_documents([open_length])
    return first


def _text(ids: Ids, boundary: int | None, decoder: Any) -> str:
    """Return the text on both sides of the first border of documents or rows, or at the start."""
    at = next((int(border) for border in np.flatnonzero(ids == boundary) if border), 0)
    near = ids[max(at - SHOWN_IDS, 0) : at + SHOWN_IDS]
    parts = [part.tolist() for part in np.split(near, np.flatnonzero(near == boundary))]
    documents = [[number for number in part if number != boundary] for part in parts]
    mark = "(end of row)" if boundary == _ROW_END else decoder.id_to_token(boundary or 0)
    return f" {mark} ".join(
        repr(decoder.decode(part, skip_special_tokens=False)) if part else "" for part in documents
    ).strip()


def _lost(ids: Ids, boundary: int | None, decoder: Any) -> Counter[int]:
    """Return the ids that the tokenizer lacks, its unknown ones, and those not of their text.

    What lies between special tokens is decoded and encoded again. Without a decoder, a tokenizer
    joins tokens by spaces, so that the text says nothing.
    """
    added, unknown = decoder.get_added_tokens_decoder().items(), unknown_id(decoder)
    apart = {boundary, *(number for number, token in added if token.special)} - {unknown, None}
    words = {*decoder.get_vocab(with_added_tokens=True).values()} - apart - {unknown}
    plain = np.isin(ids, list(words))
    lost = Counter[int](ids[~plain & ~np.isin(ids, list(apart))].tolist())
    parts = np.split(ids, np.flatnonzero(np.diff(plain)) + 1) if decoder.decoder else []
    pieces = [part.tolist() for part in parts if part[0] in words]
    decoder.encode_special_tokens = True
    texts = decoder.decode_batch(pieces, skip_special_tokens=False)
    encodings = decoder.encode_batch_fast(texts, add_special_tokens=False)
    for piece, encoded in zip(pieces, encodings, strict=True):
        whole = piece[EDGE_IDS:-EDGE_IDS] if len(piece) > 4 * EDGE_IDS else piece
        lost += Counter(whole) - Counter(encoded.ids)
    return lost


def draw_report(report: DataReport, file: Path) -> None:
    """Write two histograms as a PNG: tokens by id, and documents by length."""
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


def _draw(axes: Any, histogram: BinCounts, *, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if not histogram.counts:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)
        return
    axes.stairs(histogram.counts, histogram.edges, fill=True)
    axes.set_yscale("log")
