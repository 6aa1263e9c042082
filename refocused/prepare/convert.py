"""Convert token files of any supported format to 1-D `.npy` shards with a manifest."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import TOKEN_PATTERNS, TOKEN_SUFFIXES, fits
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.formats.token_layout import element_type, read_layout
from refocused.data.manifest.select_files import check_chunks, is_megatron, named_tokenizer
from refocused.data.manifest.shard_manifest import EXCLUDE, Manifest, check_listing, listed_rows
from refocused.prepare.document_streams import megatron_blocks
from refocused.prepare.packing_state import Journal, PackResult, pack_once
from refocused.prepare.shard_packer import ShardPacker
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
    tokenizer = named_tokenizer(source, listing, names, data=data)
    conversion = _Conversion(source, target, data, work, request, listing, names)

    def pack(journal: Journal) -> Manifest:
        conversion.run(journal, progress)
        shards = sorted(journal.shards(STREAM), key=lambda shard: shard.name)
        return Manifest(tuple(shards), tokenizer)

    recipe = {
        "made by": "convert",
        **dataclasses.asdict(request),
        **{name: getattr(data, name) for name in ("dtype", "pad_id", "tokenizer")},
        "end_of_text_id": data.separator_id,
        "inputs": [[name, listing[name].size, listing[name].crc32c] for name in names],
    }
    manifest = pack_once(target, work, recipe, pack, dtype=element_type(request.vocabulary))
    return PackResult(manifest, conversion.counts)


@dataclasses.dataclass
class _Conversion:
    source: Bucket
    target: Bucket
    data: DataConfig
    work: Path
    request: ConvertRequest
    listing: Mapping[str, BlobInfo]
    names: Sequence[str]
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

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
            # Files that are not packed may have it before or between documents.
            begin_id=None if self.request.best_fit is None else self.data.separator_id,
            best_fit=self.request.best_fit,
        )
        sizes = [self.listing[name].size for name in self.names]
        if shard_tokens is None and not packer.cursor.offset:
            packer.end_shard()  # of a file that was complete when the earlier call was killed
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
        self.counts += packer.counts

    def _shard_name(self, number: int) -> str:
        if self.request.shard_tokens is not None:
            return f"{self.request.name}_{number:06d}.npy"
        return _target_name(self.names[number])

    def _convert(self, name: str, packer: ShardPacker) -> None:
        skipped, found = packer.start, 0
        for block in self._blocks(name):
            found += len(block)
            ids = block[skipped:]
            skipped -= len(block) - len(ids)
            if len(ids) and (largest := int(ids.max())) >= self.request.vocabulary:
                raise ShardError(
                    f"{name}: it holds the id {largest:,}, but --vocabulary is "
                    f"{self.request.vocabulary:,}. Give a larger one, or exclude the file."
                )
            if len(ids):
                packer.add(ids)
        if not found:  # training rejects such files too
            raise ShardError(f"{name}: it holds no tokens. Exclude it.")

    def _blocks(self, name: str) -> Iterator[Ids]:
        separator = self.data.separator_id
        with self._local(name) as path, path.open("rb") as file:
            if is_megatron(name, self.listing):
                with self._local(f"{name.removesuffix('.bin')}.idx") as index:
                    blocks = megatron_blocks(index, path, separator_id=separator, name=name)
                    yield from self._ended(blocks)
                return
            layout = read_layout(file, name=name, data=self.data)
            blocks = token_blocks(file, layout, name=name)
            yield from blocks if layout.separator_id is None else self._ended(blocks)

    def _ended(self, blocks: Iterator[Ids]) -> Iterator[Ids]:
        """End a file of documents with a separator if another file may follow in the shard."""
        last_id = None
        for block in blocks:
            yield block
            last_id = int(block[-1]) if len(block) else last_id
        separator = self.data.separator_id
        packed = self.request.shard_tokens is not None
        if packed and separator is not None and last_id not in (None, separator):
            yield np.array([separator])

    @contextlib.contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        """Yield the path of a local object, or download it, verified."""
        if isinstance(self.source, DirectoryBucket):
            yield Path(self.source.url) / name
            return
        path = self.work / f"object{Path(name).suffix}"
        self.source.download(self.listing[name], path)
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
