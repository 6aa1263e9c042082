"""Any readable form to 1-D `.npy` shards with a manifest, file by file or packed to one size."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.formats.array_headers import PickledArrayError
from refocused.data.formats.object_names import TOKEN_SUFFIXES, matches
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.formats.token_layout import ID_KEYS, element_type, read_layout
from refocused.data.manifest.select_files import check_chunks, is_megatron, named_tokenizer
from refocused.data.manifest.shard_manifest import Manifest, write_manifest
from refocused.prepare import pickled_arrays
from refocused.prepare.document_streams import document_blocks, megatron_blocks
from refocused.prepare.packing_state import (
    Journal,
    check_recipe,
    finished_manifest,
    keep_whole_shards,
    manifest_of,
    remove_leftovers,
)
from refocused.prepare.shard_packer import Cursor, ShardPacker, is_open_shard_whole
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder

STREAM = "convert"
_NO_LIMIT = 1 << 62

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertRequest:
    """What is wanted.

    Attributes:
        vocabulary: Ids must be below it; it decides between uint16 and uint32.
        shard_tokens: Pack the files to shards of so many ids; None: one shard a file.
        name: Start of the names of packed shards.
        allow_pickle: Read arrays of Python objects, which can run code.
    """

    vocabulary: int
    shard_tokens: int | None = None
    name: str = "tokens"
    allow_pickle: bool = False


def convert(
    source: Bucket,
    target: Bucket,
    *,
    data: DataConfig,
    work: Path,
    request: ConvertRequest,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Write every file of a source as 1-D `.npy`, padding left out, and a manifest, last.

    Killed at any moment, the same call goes on from the file, or the shard, it was at.

    Args:
        source: The files.
        target: Where shards go; empty, or of an earlier call with the same request.
        data: Patterns, and how files are read.
        work: Local folder for what is unfinished; removed at the end.
        request: What is wanted.
        progress: Called with bytes done and bytes in all, at the start and after each file.

    Raises:
        ShardError: A file is refused or corrupt, an id is outside the vocabulary, or the target
            holds something else.
        BucketError: A bucket cannot be read or written.
    """
    listing = {blob.name: blob for blob in source.list()}
    check_chunks(source, listing, data=data)
    names = _names(listing, data, url=source.url)
    tokenizer = data.tokenizer
    if tokenizer == "unknown":
        tokenizer = named_tokenizer(source, listing, names) or "unknown"
    with exclusive_folder(work):
        remove_leftovers(target, work)
        check_recipe(target, _recipe([listing[name] for name in names], data, request))
        manifest = finished_manifest(target)
        if manifest is None:
            with Journal(work / "journal.jsonl") as journal:
                made = _Making(source, target, data, work, request, journal, listing, names)
                made.run(progress)
                dtype = element_type(request.vocabulary).name
                manifest = manifest_of(journal.rows(STREAM), dtype=dtype, tokenizer=tokenizer)
            write_manifest(target, manifest)
        shutil.rmtree(work)
    return manifest


@dataclasses.dataclass
class _Making:
    """One start of converting."""

    source: Bucket
    target: Bucket
    data: DataConfig
    work: Path
    request: ConvertRequest
    journal: Journal
    listing: Mapping[str, BlobInfo]
    names: Sequence[str]

    def run(self, progress: Callable[[int, int], None]) -> None:
        packer = self._packer(self._start())
        sizes = [self.listing[name].size for name in self.names]
        if self.request.shard_tokens is None and not packer.cursor.offset:
            packer.end_shard()  # of a file that was whole when the earlier start was killed
        progress(sum(sizes[: packer.cursor.source]), sum(sizes))
        while packer.cursor.source < len(self.names):
            number = packer.cursor.source
            self._convert(self.names[number], packer)
            packer.end_source()
            if self.request.shard_tokens is None:
                packer.end_shard()
            progress(sum(sizes[: number + 1]), sum(sizes))
        packer.end_shard()
        packer.close()

    def _start(self) -> Cursor:
        kept = keep_whole_shards(self.journal, STREAM, self.target)
        cursor = self.journal.cursor(STREAM)
        dtype = element_type(self.request.vocabulary)
        if not is_open_shard_whole(self.work, STREAM, cursor, dtype=dtype):
            _log.warning("the unfinished shard is damaged, and made again")
            self.journal.rewind(STREAM, shards=kept)
        return self.journal.cursor(STREAM)

    def _packer(self, cursor: Cursor) -> ShardPacker:
        return ShardPacker(
            self.target,
            folder=self.work,
            name=STREAM,
            shard_name=self._shard_name,
            shard_tokens=self.request.shard_tokens or _NO_LIMIT,
            dtype=element_type(self.request.vocabulary),
            begin_id=None,  # whether it stands before or between documents is the files' affair
            cursor=cursor,
            note=lambda cursor, row: self.journal.note(STREAM, cursor, row),
        )

    def _shard_name(self, number: int) -> str:
        if self.request.shard_tokens is not None:
            return f"{self.request.name}_{number:06d}.npy"
        return _target_name(self.names[number])

    def _convert(self, name: str, packer: ShardPacker) -> None:
        skipped, found = packer.cursor.offset, 0
        for block in self._blocks(name):
            found += len(block)
            ids = block[skipped:]
            skipped -= len(block) - len(ids)
            if len(ids) and (largest := int(ids.max())) >= self.request.vocabulary:
                raise ShardError(
                    f"{name}: it holds the id {largest:,}, and --vocabulary is "
                    f"{self.request.vocabulary:,}. Name a vocabulary above it, or exclude the file."
                )
            if len(ids):
                packer.add(ids)
        if not found:  # as training would; and shards are named by their number
            raise ShardError(f"{name}: it holds no tokens. Exclude it.")

    def _blocks(self, name: str) -> Iterator[Ids]:
        separator = self.data.separator_id
        with self._local(name) as path:
            if is_megatron(name, self.listing):
                with self._local(f"{name.removesuffix('.bin')}.idx") as index:
                    blocks = megatron_blocks(index, path, separator_id=separator, name=name)
                    yield from self._ended(blocks)
                return
            try:
                with path.open("rb") as file:
                    layout = read_layout(file, name=name, data=self.data)
            except PickledArrayError:
                if not self.request.allow_pickle:
                    raise
                yield from self._ended(self._pickled_blocks(path, name))
                return
            with path.open("rb") as file:
                blocks = token_blocks(file, layout, name=name)
                yield from blocks if layout.separator_id is None else self._ended(blocks)

    def _ended(self, blocks: Iterator[Ids]) -> Iterator[Ids]:
        """End a file of whole documents with a separator where another file is packed behind it."""
        last_id = None
        for block in blocks:
            yield block
            last_id = int(block[-1]) if len(block) else last_id
        separator = self.data.separator_id
        packed = self.request.shard_tokens is not None
        if packed and separator is not None and last_id not in (None, separator):
            yield np.array([separator])

    def _pickled_blocks(self, path: Path, name: str) -> Iterator[Ids]:
        program = [sys.executable, "-I", pickled_arrays.__file__]
        done = subprocess.run(
            [*program, str(path.absolute()), ",".join(ID_KEYS), str(self.work.absolute())],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stdout or done.stderr).strip().splitlines()
            raise ShardError(
                f"{name}: its pickled arrays cannot be read: {said[-1] if said else 'no reason'}. "
                "Put its name in data.exclude."
            )
        lengths = np.fromfile(self.work / "lengths", "<i8")
        with (self.work / "ids").open("rb") as file:
            yield from document_blocks(
                file,
                dtype=np.dtype("<i8"),
                lengths=lengths,
                separator_id=self.data.separator_id,
                name=name,
            )

    @contextlib.contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        """Make an object a local file: its bytes are verified only when it is fetched whole."""
        if isinstance(self.source, DirectoryBucket):
            yield Path(self.source.url) / name
            return
        path = self.work / f"object{Path(name).suffix}"
        self.source.download(self.listing[name], path)
        try:
            yield path
        finally:
            path.unlink()


def _names(listing: Mapping[str, BlobInfo], data: DataConfig, *, url: str) -> list[str]:
    """Return the files to convert, in name order; of a pair, the `.bin`."""
    names = [
        name
        for name in sorted(listing)
        if name.endswith(TOKEN_SUFFIXES)
        and (not data.include or matches(name, data.include))
        and not matches(name, data.exclude)
    ][: data.max_files]
    if not names:
        raise ShardError(
            f"{url}: no token files among {len(listing):,} objects. Looked for "
            f"{', '.join('*' + suffix for suffix in TOKEN_SUFFIXES)}, at any depth; text is for "
            "`refocused prepare_data tokenize`."
        )
    targets: dict[str, str] = {}
    for name in names:
        other = targets.setdefault(_target_name(name), name)
        if other != name:
            raise ShardError(
                f"{url}: {other} and {name} would both become {_target_name(name)}. Convert them "
                "by themselves with --include, or pack them with --shard-tokens."
            )
    return names


def _target_name(name: str) -> str:
    return name[: name.rindex(".")] + ".npy"


def _recipe(
    blobs: Sequence[BlobInfo], data: DataConfig, request: ConvertRequest
) -> dict[str, object]:
    return {
        "made by": "convert",
        "vocabulary": request.vocabulary,
        "shard_tokens": request.shard_tokens,
        "name": request.name,
        "dtype": data.dtype,
        "pad_id": data.pad_id,
        "end_of_text_id": data.separator_id,
        "tokenizer": data.tokenizer,
        "inputs": [[blob.name, blob.size, blob.crc32c] for blob in blobs],
    }
