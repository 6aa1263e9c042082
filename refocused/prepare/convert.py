"""Convert any readable token files to 1-D `.npy` shards with a manifest, one each or packed."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.formats.array_headers import PickledArrayError
from refocused.data.formats.object_names import TOKEN_PATTERNS, TOKEN_SUFFIXES, fits
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.formats.token_layout import ID_KEYS, element_type, read_layout
from refocused.data.manifest.select_files import check_chunks, is_megatron, named_tokenizer
from refocused.data.manifest.shard_manifest import Manifest
from refocused.prepare import pickled_arrays
from refocused.prepare.document_streams import document_blocks, megatron_blocks
from refocused.prepare.packing_state import Journal, manifest_of, pack_once
from refocused.prepare.shard_packer import ShardPacker
from refocused.system.errors import ShardError

STREAM = "convert"
_NO_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertRequest:
    """What to make of the files."""

    vocabulary: int  # ids must be below it; it decides between uint16 and uint32
    shard_tokens: int | None = None  # ids of a packed shard; None: one shard a file
    name: str = "tokens"  # start of the names of packed shards
    allow_pickle: bool = False  # read arrays of Python objects, which can run code


def convert(
    source: Bucket,
    target: Bucket,
    *,
    data: DataConfig,
    work: Path,
    request: ConvertRequest,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Write every file of a source as 1-D `.npy`, without padding, and a manifest, last.

    After a kill at any moment, the same call goes on from the file, or the shard, it was at.

    Args:
        target: Where shards go; empty, or of an earlier call with the same request.
        data: Patterns, and how files are read.
        work: Local folder for what is unfinished; removed at the end.
        progress: Called with bytes done and in all, at the start and after each file.

    Raises:
        ShardError: A file is refused or corrupt, an id is outside the vocabulary, or the target
            holds something else.
        BucketError: A bucket cannot be read or written.
    """
    listing = {blob.name: blob for blob in source.list()}
    check_chunks(source, listing, data=data)
    names = _names(listing, data, url=source.url)
    tokenizer = named_tokenizer(source, listing, names, data=data)
    making = _Making(source, target, data, work, request, listing, names)

    def pack(journal: Journal) -> Manifest:
        making.run(journal, progress)
        return manifest_of(journal.shards(STREAM), tokenizer=tokenizer)

    blobs = [listing[name] for name in names]
    recipe = {
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
    return pack_once(target, work, recipe, pack, dtype=element_type(request.vocabulary))


@dataclasses.dataclass
class _Making:
    source: Bucket
    target: Bucket
    data: DataConfig
    work: Path
    request: ConvertRequest
    listing: Mapping[str, BlobInfo]
    names: Sequence[str]

    def run(self, journal: Journal, progress: Callable[[int, int], None]) -> None:
        shard_tokens = self.request.shard_tokens
        packer = ShardPacker(
            self.target,
            journal,
            STREAM,
            folder=self.work,
            name=STREAM,
            shard_name=self._shard_name,
            shard_tokens=shard_tokens or _NO_LIMIT,
            begin_id=None,  # the files may have it before or between documents
        )
        sizes = [self.listing[name].size for name in self.names]
        if shard_tokens is None and not packer.cursor.offset:
            packer.end_shard()  # of a file that was whole when the earlier start was killed
        progress(sum(sizes[: packer.cursor.source]), sum(sizes))
        while packer.cursor.source < len(self.names):
            number = packer.cursor.source
            self._convert(self.names[number], packer)
            packer.end_source()
            if shard_tokens is None:
                packer.end_shard()
            progress(sum(sizes[: number + 1]), sum(sizes))
        packer.end_shard()
        packer.close()

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
        if not found:  # training refuses it too, and shards are named by their number
            raise ShardError(f"{name}: it holds no tokens. Exclude it.")

    def _blocks(self, name: str) -> Iterator[Ids]:
        separator = self.data.separator_id
        with self._local(name) as path, path.open("rb") as file:
            if is_megatron(name, self.listing):
                with self._local(f"{name.removesuffix('.bin')}.idx") as index:
                    blocks = megatron_blocks(index, path, separator_id=separator, name=name)
                    yield from self._ended(blocks)
                return
            try:
                layout = read_layout(file, name=name, data=self.data)
            except PickledArrayError:
                if not self.request.allow_pickle:
                    raise
                yield from self._ended(self._pickled_blocks(path, name))
                return
            blocks = token_blocks(file, layout, name=name)
            yield from blocks if layout.separator_id is None else self._ended(blocks)

    def _ended(self, blocks: Iterator[Ids]) -> Iterator[Ids]:
        """End a file of documents with a separator where another may follow in the shard."""
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
        lengths, separator = np.fromfile(self.work / "lengths", "<i8"), self.data.separator_id
        with (self.work / "ids").open("rb") as file:
            yield from document_blocks(
                file, dtype=lengths.dtype, lengths=lengths, separator_id=separator, name=name
            )

    @contextlib.contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        """Download an object, which verifies its bytes; give the path of a local one."""
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
    """Return the files to convert, in name order; of Megatron's pairs, the `.bin`."""
    names = [
        name
        for name in sorted(listing)
        if name.endswith(TOKEN_SUFFIXES) and fits(name, include=data.include, exclude=data.exclude)
    ][: data.max_files]
    if not names:
        raise ShardError(
            f"{url}: no token files among {len(listing):,} objects. Looked for {TOKEN_PATTERNS}, "
            "at any depth; text is for `refocused prepare_data tokenize`."
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
