"""Convert token files of any supported format to 1-D `.npy` shards with a manifest."""

import contextlib
import dataclasses
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import TOKEN_PATTERNS, TOKEN_SUFFIXES, fits, unusable
from refocused.data.formats.token_blocks import BLOCK_IDS, Ids, token_blocks
from refocused.data.formats.token_layout import element_type, read_layout
from refocused.data.manifest.shard_manifest import (
    EXCLUDE,
    Manifest,
    check_chunks,
    check_listing,
    is_megatron,
    listed_rows,
    named_tokenizer,
)
from refocused.prepare.write_shards import Journal, PackResult, ShardPacker, pack_once
from refocused.system.errors import ShardError

STREAM = "convert"
_NO_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertRequest:
    """Settings of a conversion."""

    vocabulary: int  # ids must be below it; determines uint16 or uint32
    shard_tokens: int | None = None  # ids of a packed shard; None: one shard per file
    name: str = "tokens"  # prefix of the names of packed shards
    best_fit: int | None = None  # sequence length to pack documents for; None: as they are


def convert(
    source: Bucket,
    target: Bucket,
    *,
    data: DataConfig,
    work: Path,
    request: ConvertRequest,
    progress: Callable[[int, int], None],
) -> PackResult:
    """Write every file of a source as 1-D `.npy` without padding, and then a manifest.

    After a kill, the same call continues from the unfinished file or shard. `best_fit` packs what
    lies between the `data.separator_id`s of a file.

    Args:
        source: The token files.
        target: Receives the shards; empty, or from an earlier call with the same request.
        data: Patterns, and how files are read.
        work: Local folder for unfinished files; removed at the end.
        request: The settings.
        progress: Called with bytes done and in all, at the start and after each file.

    Raises:
        ShardError: A file is unsupported or corrupt, an id is outside the vocabulary, or the
            target holds other data.
        BucketError: A bucket cannot be read or written.
    """
    listing = {blob.name: blob for blob in source.list()}
    check_chunks(source, listing, data=data)
    rows = listed_rows(source, listing, exclude=data.exclude)
    names = _names({*listing, *rows}, data, url=source.url)
    listed = [rows[name] for name in names if name in rows]
    check_listing(listed, listing, url=source.url, way_out=EXCLUDE)
    tokenizer, counts = named_tokenizer(source, listing, names, data=data), Counter[str]()
    shard_tokens, separator = request.shard_tokens, data.separator_id

    def shard_name(number: int) -> str:
        return (
            _target_name(names[number])
            if shard_tokens is None
            else f"{request.name}_{number:06d}.npy"
        )

    def blocks_of(name: str) -> Iterator[Ids]:
        """Yield a file's ids; end its documents with a separator if another file may follow."""
        last_id, fuses = None, shard_tokens is not None
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(_local(source, listing[name], work))
            if is_megatron(name, listing):
                index = listing[f"{name.removesuffix('.bin')}.idx"]
                index_path = stack.enter_context(_local(source, index, work))
                blocks = megatron_blocks(index_path, path, separator_id=separator, name=name)
            else:
                file = stack.enter_context(path.open("rb"))
                layout = read_layout(file, name=name, data=data)
                blocks = token_blocks(file, layout, name=name)
                fuses = fuses and layout.separator_id is not None
            for block in blocks:
                yield block
                last_id = int(block[-1]) if len(block) else last_id
        if fuses and separator is not None and last_id not in (None, separator):
            yield np.array([separator])

    def convert_file(name: str, packer: ShardPacker) -> None:
        skipped, tokens = packer.start, 0
        for block in blocks_of(name):
            tokens += len(block)
            ids = block[skipped:]
            skipped -= len(block) - len(ids)
            if len(ids) and (largest := int(ids.max())) >= request.vocabulary:
                raise ShardError(
                    f"{name}: it holds the id {largest:,}, but --vocabulary is "
                    f"{request.vocabulary:,}. Give a larger one, or exclude the file."
                )
            if len(ids):
                packer.add(ids)
        if not tokens:  # training rejects such files too
            raise ShardError(f"{name}: it holds no tokens. Exclude it.")

    def pack(journal: Journal) -> Manifest:
        packer = ShardPacker(
            target,
            journal,
            STREAM,
            folder=work,
            name=STREAM,
            shard_name=shard_name,
            shard_tokens=shard_tokens or _NO_LIMIT,
            # Files that are not packed may have it before or between documents.
            begin_id=None if request.best_fit is None else separator,
            best_fit=request.best_fit,
        )
        sizes = [listing[name].size for name in names]
        progress(sum(sizes[: packer.source]), sum(sizes))
        for number in range(packer.source, len(names)):
            convert_file(names[number], packer)
            packer.end_source()
            if shard_tokens is None:
                packer.end_shard()
            progress(sum(sizes[: number + 1]), sum(sizes))
        packer.end_shard()
        packer.close()
        counts.update(packer.counts)
        shards = sorted(journal.shards(STREAM), key=lambda shard: shard.name)
        return Manifest(tuple(shards), tokenizer)

    recipe = {
        "made by": "convert",
        **dataclasses.asdict(request),
        **{name: getattr(data, name) for name in ("dtype", "pad_id", "tokenizer")},
        "end_of_text_id": separator,
        "inputs": [[name, listing[name].size, listing[name].crc32c] for name in names],
    }
    manifest = pack_once(target, work, recipe, pack, dtype=element_type(request.vocabulary))
    return PackResult(manifest, counts)


@contextlib.contextmanager
def _local(source: Bucket, blob: BlobInfo, work: Path) -> Iterator[Path]:
    """Yield the path of a local object, or download it, verified."""
    if isinstance(source, DirectoryBucket):
        yield Path(source.url) / blob.name
        return
    path = work / f"object{Path(blob.name).suffix}"
    source.download(blob, path)
    try:
        yield path
    finally:
        path.unlink()


def _names(listing: Collection[str], data: DataConfig, *, url: str) -> list[str]:
    """Return the files to convert, in name order; of Megatron's pairs, the `.bin`."""
    names = [
        name
        for name in sorted(listing)
        if name.endswith(TOKEN_SUFFIXES) and fits(name, include=data.include, exclude=data.exclude)
    ][: data.max_files]
    if not names:
        raise ShardError(
            f"{url}: no token files among {len(listing):,} objects ({TOKEN_PATTERNS}, at any "
            "depth). Correct the address or the patterns; for text, use "
            "`refocused prepare_data tokenize`."
        )
    targets: dict[str, str] = {}
    for name in names:
        other = targets.setdefault(_target_name(name), name)
        if other != name:
            raise ShardError(
                f"{url}: {other} and {name} would both become {_target_name(name)}. Convert them "
                "separately with --include, or pack them with --shard-tokens."
            )
    return names


def _target_name(name: str) -> str:
    return name[: name.rindex(".")] + ".npy"


CHECKED_IDS = 1 << 22
# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic, version, dtype code, number
# of sequences and of document boundaries; then int32 lengths, int64 pointers, int64 boundaries.
MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron_blocks(
    index: Path, content: Path, *, separator_id: int | None, name: str
) -> Iterator[Ids]:
    """Yield the ids of an `.idx` and its `.bin` in order.

    A separator follows each document that does not end with it, but the last. Empty documents are
    skipped. Raises `ShardError` if the index has another format or version, is truncated, or does
    not fit the `.bin`, or if an id is negative.
    """
    dtype, lengths = _read_index(index, content, name=name)
    filled = lengths[lengths > 0]
    if separator_id is None and len(filled) > 1:
        ends = np.cumsum(filled)
        ends = ends[: max(int(np.searchsorted(ends, CHECKED_IDS)), 2)]
        some = np.memmap(content, dtype, "r", shape=(int(ends[-1]),))
        # They have an end-of-text id of their own if all end with one that is nowhere else.
        if not np.array_equal(np.flatnonzero(some == some[ends[0] - 1]) + 1, ends):
            raise ShardError(
                f"{name}: it holds {len(filled):,} documents, with no end-of-text id between them. "
                "Give the id to put there with --separator-id."
            )
    starts, first, last_id = np.cumsum(filled) - filled, 0, None
    with content.open("rb") as file:
        while raw := file.read(BLOCK_IDS * dtype.itemsize):
            ids: Ids = np.frombuffer(raw, dtype)
            if ids.min() < 0:
                raise unusable(name, f"it holds the negative id {ids.min()}")
            here = slice(*np.searchsorted(starts, [first, first + len(ids)]))
            begins = starts[here] - first
            previous, last_id = last_id, int(ids[-1])
            first += len(ids)
            if separator_id is not None:  # before documents, but the file's first
                ids = ids.astype(np.int64)
                before = np.concatenate(
                    [[separator_id if previous is None else previous], ids[:-1]]
                )
                ids = np.insert(ids, begins[before[begins] != separator_id], separator_id)
            yield ids


def _read_index(
    index: Path, content: Path, *, name: str
) -> tuple[np.dtype[Any], npt.NDArray[np.int64]]:
    """Return the element type, and the ids of each document."""
    size = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise unusable(name, f"it starts with {header[:9]!r}, not as Megatron's index")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        types = ", ".join(map(str, _TYPES))
        problem = f"its index has version {version} and element type {code}; only version 1 and"
        raise unusable(name, f"{problem} the integer types {types} are supported")
    if size != _HEADER.size + 12 * sequences + 8 * boundaries or not sequences:
        problem = f"{sequences:,} sequences and {boundaries:,} document boundaries do not fit"
        raise unusable(
            name, f"{problem} its {size:,} bytes; it is truncated or its header is wrong"
        )
    dtype = np.dtype(_TYPES[code])
    at = _HEADER.size
    counts = np.memmap(index, "<i4", "r", at, (sequences,)).astype(np.int64)
    pointers = np.memmap(index, "<i8", "r", at + 4 * sequences, (sequences,))
    ends = np.memmap(index, "<i8", "r", at + 12 * sequences, (boundaries,))
    starts = np.concatenate([[0], np.cumsum(counts)])
    fits = starts[-1] * dtype.itemsize == content.stat().st_size
    if counts.min() < 0 or not fits or not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        problem = f"its sequences are not contiguous in {content.name}, or do not fill its"
        raise unusable(name, f"{problem} {content.stat().st_size:,} bytes")
    if not boundaries or ends[0] != 0 or ends[-1] != sequences or np.any(np.diff(ends) < 0):
        raise unusable(name, "its document boundaries do not cover its sequences")
    return dtype, np.diff(starts[ends])
