"""`Shard` and `Manifest`: the token files of a run in order, with a fingerprint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import pydantic

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c, with_checksum
from refocused.bucket.retry import RefusedRequestError
from refocused.bucket.transfer import map_in_threads
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME, matches
from refocused.data.manifest import select_files
from refocused.data.manifest.count_tokens import Counts, survey
from refocused.system.errors import BucketError, ShardError
from refocused.system.strict_json import parse_json_object
from refocused.tokenizers.encoders import TokenizerChoice, described

SCHEMA = 1
SKIP, EXCLUDE = "put their names in data.skip", "leave them out with --exclude"
SAMPLED_BLOCKS, SAMPLED_BLOCK_BYTES = 8, 16 * 1024
Whole = Annotated[int, pydantic.Strict(), pydantic.Field(ge=0, lt=2**63)]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens, or several short ones that are packed into one local file."""

    name: str  # below the source; for a pack, a name made of its parts'
    tokens: Whole  # without padding, with separators between rows
    dtype: str  # narrowest local type that certainly holds the ids: uint16 or uint32
    size: Whole  # bytes of the object
    crc32c: Whole | None  # of the object; None where the store keeps none
    # The store's version number.
    generation: str | None = dataclasses.field(default=None, compare=False)
    max_id: Whole | None = None  # if known without reading the file
    documents: Whole | None = None  # if known; with `packed_for`, every part of one counts
    pad_id: int | None = None  # id whose trailing run in each row is padding
    separator_id: int | None = None  # id inserted between rows
    packed_for: Whole | None = None  # sequence length whose sequences begin with a document
    document_id: Whole | None = None  # with `packed_for`: begins each document, and pads
    parts: tuple[Shard, ...] = ()  # the files of a pack, in order
    sample: int | None = None  # checksum of sampled blocks, if `crc32c` is not known
    # Another checksum than `crc32c` that the store keeps, as that of `BlobInfo`.
    checksum: str | None = dataclasses.field(default=None, compare=False)

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    @property
    def files(self) -> tuple[Shard, ...]:
        """Its parts, or itself."""
        return self.parts or (self,)

    @property
    def file_names(self) -> str:
        """Its files for messages, by the names that `data.skip` takes."""
        return f"{self.parts[0].name} to {self.parts[-1].name}" if self.parts else self.name

    @property
    def blob(self) -> BlobInfo:
        """The object of a single file."""
        return BlobInfo(self.name, self.size, self.crc32c, self.generation, self.checksum)

    def renamed(self, rename: Callable[[str], str]) -> Shard:
        """Return the shard with new names for itself and its parts."""
        parts = tuple(part.renamed(rename) for part in self.parts)
        return dataclasses.replace(self, name=rename(self.name), parts=parts)

    @property
    def content(self) -> str | None:
        """Identify its bytes on any machine: by CRC-32C, else size and sample; None: not known."""
        if self.crc32c is not None:
            return f"crc32c {self.crc32c}"
        return None if self.sample is None else f"size {self.size}, sample {self.sample}"

    def fingerprint_row(self) -> list[object]:
        """Return what determines its tokens: name, content, tokens, dtype, row settings, parts.

        Row settings and parts are included only if there are any.
        """
        content = self.content or f"size {self.size}"
        row: list[object] = [self.name, content, self.tokens, self.dtype]
        if (self.pad_id, self.separator_id) != (None, None):
            row.append({"pad_id": self.pad_id, "separator_id": self.separator_id})
        return row + [part.fingerprint_row() for part in self.parts]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All shards in name order; other modules refer to a shard by its index."""

    shards: tuple[Shard, ...]  # one per file, or for a run as `pack_chunks` returns them
    tokenizer: str  # name of the tokenizer of the data
    # unused token files that a `manifest.json` beside them does not list
    unlisted: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # of the tokenizer
    vocabulary: Annotated[Whole, pydantic.Field(ge=1)] | None = dataclasses.field(
        default=None, compare=False
    )
    # of `tokenize`: the id that begins each document, and what the tokenizer does to text
    end_of_text_id: Whole | None = dataclasses.field(default=None, compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of all files' rows, independent of packing."""
        files = [file for shard in self.shards for file in shard.files]
        return _digest(f.fingerprint_row() for f in sorted(files, key=lambda file: file.name))

    @functools.cached_property
    def packing(self) -> str:
        """SHA-256 (hexadecimal) of the names and tokens of all files, as packed into shards."""
        shards = self.shards
        return _digest([shard.name, *((f.name, f.tokens) for f in shard.files)] for shard in shards)


_MANIFEST = pydantic.TypeAdapter(Manifest)


def _digest(rows: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def build_manifest(bucket: Bucket, data: DataConfig, *, cache_file: Counts) -> Manifest:
    """Describe the token files of a source without downloading them.

    A `manifest.json` in the source is used if the listing, where it is allowed, agrees with it.
    Otherwise the headers are read in parallel, and the counts are cached in `cache_file`.

    Raises:
        ShardError: There are no token files, a format is not supported, or objects differ from
            the `manifest.json`.
        BucketError: The source cannot be listed or read.
    """
    listing = list_source(bucket, exclude=data.exclude)
    if MANIFEST_NAME in listing and not matches(MANIFEST_NAME, data.exclude):
        return _from_prepared(bucket, data, listing)
    select_files.check_chunks(bucket, listing, data=data)
    names = select_files.chosen_names(listing, data=data, url=bucket.url)
    shards = describe_files(bucket, [listing[name] for name in names], data, cache_file=cache_file)
    return Manifest(shards, select_files.named_tokenizer(bucket, listing, names, data=data))


def list_source(bucket: Bucket, *, exclude: Iterable[str]) -> dict[str, BlobInfo]:
    """List a source; where that is not allowed, return what its `manifest.json` lists."""
    try:
        return {blob.name: blob for blob in bucket.list()}
    except RefusedRequestError as refused:
        if refused.status not in (401, 403) or matches(MANIFEST_NAME, exclude):
            raise
        try:
            stored, own = read_manifest(bucket), bucket.info(MANIFEST_NAME)
        except (BucketError, ShardError):
            raise refused from None
        assert own is not None
        _log.info("  shards   %s: may not be listed; its %s is used", bucket.url, MANIFEST_NAME)
        return {own.name: own} | {shard.name: shard.blob for shard in stored.shards}


def describe_files(
    bucket: Bucket, blobs: Sequence[BlobInfo], data: DataConfig, *, cache_file: Counts
) -> tuple[Shard, ...]:
    """Describe token files from their headers; raises as `build_manifest`."""
    facts = survey(bucket, blobs, data=data, cache_file=cache_file)
    shards = [
        Shard(**dataclasses.asdict(blob), **found) for blob, found in zip(blobs, facts, strict=True)
    ]
    return _with_content(bucket, shards, data)


def manifest_to_json(manifest: Manifest) -> str:
    """Return the text of a `manifest.json`, with one row per file."""
    always = ("crc32c", "max_id", "documents")  # null if unknown; other keys are then left out
    hidden, rows = ("generation", "checksum", "parts"), []
    for shard in manifest.shards:
        assert not shard.parts, "each run packs chunks itself"
        row = dataclasses.asdict(shard)
        shown = [key for key, value in row.items() if value is not None or key in always]
        rows.append({key: row[key] for key in shown if key not in hidden})
    names = ("tokenizer", "vocabulary", "end_of_text_id", "notes", "tokens", "fingerprint")
    content = {name: getattr(manifest, name) for name in names}
    return json.dumps({"schema": SCHEMA, **content, "shards": rows}, indent=1) + "\n"


def manifest_from_json(text: bytes | str, *, where: str) -> Manifest:
    """Parse a `manifest.json`; raise `ShardError` if it is invalid or of another schema."""
    try:
        content = parse_json_object(text)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r:.80}, not {SCHEMA}")
        manifest = _MANIFEST.validate_python(content | {"unlisted": ()})
        shards = manifest.shards
        if any(shard.parts or shard.dtype not in ("uint16", "uint32") for shard in shards):
            raise ValueError("a row has parts, or another dtype than uint16 and uint32")
        if manifest.fingerprint != content["fingerprint"]:
            raise ValueError("its fingerprint does not match its rows")
        return manifest
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ShardError(
            f"{where}: this is not a valid manifest of token files ({reason:.200}). "
            f"Prepare the data again, or put {MANIFEST_NAME} in data.exclude to read the files' "
            "own headers."
        ) from None


def wrong_type(shard: Shard, max_id: int) -> str:
    """Return what to do about an id that is too large for the type in the manifest."""
    return (
        f"{shard.name}: it holds the id {max_id:,}, but {MANIFEST_NAME} says {shard.dtype}. Write "
        "the manifest again: refocused prepare_data manifest --write"
    )


def write_manifest(bucket: Bucket, manifest: Manifest) -> None:
    """Write `manifest.json` beside the shards, which must be complete."""
    bucket.write(MANIFEST_NAME, manifest_to_json(manifest).encode(), overwrite=True)


def read_manifest(bucket: Bucket) -> Manifest:
    """Read the `manifest.json` of prepared data; raises as `manifest_from_json`, or BucketError."""
    where = f"{bucket.url.rstrip('/')}/{MANIFEST_NAME}"
    return manifest_from_json(bucket.read(MANIFEST_NAME), where=where)


def check_tokenizer(manifest: Manifest, data: DataConfig, *, url: str) -> None:
    """Raise `ShardError` if the data have another tokenizer than `data.tokenizer`."""
    named = data.tokenizer
    if named not in ("unknown", manifest.tokenizer):
        with contextlib.suppress(ShardError):  # not readable: compare its name
            named, _ = described(TokenizerChoice.of_data(data))
    if named not in ("unknown", manifest.tokenizer):
        raise ShardError(
            f"{url}: its {MANIFEST_NAME} says tokenizer {manifest.tokenizer!r}, but data.tokenizer "
            f"is {data.tokenizer!r}. Set data.tokenizer to that of the data, or use another source."
        )


def _from_prepared(bucket: Bucket, data: DataConfig, listing: Mapping[str, BlobInfo]) -> Manifest:
    url, stored = bucket.url, read_manifest(bucket)
    check_tokenizer(stored, data, url=url)
    rows = {shard.name: shard for shard in stored.shards}
    chosen = [rows[name] for name in select_files.chosen_names(rows, data=data, url=url)]
    check_listing(
        [one for one in chosen if not select_files.is_skipped(one, data)], listing, url=url
    )
    shards = []
    for shard in chosen:
        for key in ("pad_id", "separator_id"):
            counted, given = getattr(shard, key), getattr(data, key)
            if counted is not None and counted != given:
                raise ShardError(
                    f"{url}: its {MANIFEST_NAME} counted {shard.name} with {key} {counted}, but "
                    f"data.{key} is {given}. Set data.{key}={counted}, or write the manifest again "
                    "with the other id: refocused prepare_data manifest --write"
                )
        blob = listing.get(shard.name, shard.blob)
        crc32c = blob.crc32c if shard.crc32c is None else shard.crc32c
        shards.append(dataclasses.replace(shard, generation=blob.generation, crc32c=crc32c))
    _log.info("  shards   %s: %d by its %s", url, len(shards), MANIFEST_NAME)
    return dataclasses.replace(
        stored,
        shards=_with_content(bucket, shards, data),
        unlisted=tuple(select_files.unlisted_names(listing, listed=rows, data=data)),
    )


def _with_content(bucket: Bucket, shards: Sequence[Shard], data: DataConfig) -> tuple[Shard, ...]:
    """Add the store's checksums, or samples, to the shards that were listed without a checksum.

    A sample is the CRC-32C of 8 blocks of 16 KiB, evenly spaced from the first byte to the last, or
    of all bytes of a shorter object. It takes less time than a checksum of a folder's file.
    """

    def with_content(shard: Shard) -> Shard:
        if shard.crc32c is not None:
            return shard
        blob, sample = shard.blob, None
        if bucket.local_file(blob) is None:
            blob = with_checksum(bucket, blob)
        if blob.crc32c is None:
            starts, length = [0], SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES
            if blob.size > length:
                last, length = blob.size - SAMPLED_BLOCK_BYTES, SAMPLED_BLOCK_BYTES
                starts = [last * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)]
            sample = 0
            for start in starts:
                block = bucket.read(blob.name, start=start, length=length)
                sample = extended_crc32c(sample, block)
        return dataclasses.replace(shard, crc32c=blob.crc32c, checksum=blob.checksum, sample=sample)

    if all(shard.crc32c is not None for shard in shards):
        return tuple(shards)
    return tuple(map_in_threads(with_content, shards, threads=data.fetch_threads))


def listed_rows(
    bucket: Bucket, listing: Mapping[str, BlobInfo], *, exclude: Iterable[str]
) -> dict[str, Shard]:
    """Return the rows of a source's `manifest.json`; none if there is none, or it is excluded."""
    if MANIFEST_NAME not in listing or matches(MANIFEST_NAME, exclude):
        return {}
    return {shard.name: shard for shard in read_manifest(bucket).shards}


def check_listing(
    shards: Sequence[Shard], listing: Mapping[str, BlobInfo], *, url: str, way_out: str = SKIP
) -> None:
    """Raise `ShardError` if an object of these rows of a manifest is missing or differs.

    `way_out` says how to leave an object out.
    """
    wrong = []
    for shard in shards:
        blob = listing.get(shard.name)
        if blob is None:
            wrong.append(f"{shard.name} is missing")
        elif blob.size != shard.size:
            wrong.append(f"{shard.name} has {blob.size:,} bytes, not {shard.size:,}")
        elif None not in (blob.crc32c, shard.crc32c) and blob.crc32c != shard.crc32c:
            wrong.append(f"{shard.name} has the CRC-32C {blob.crc32c}, not {shard.crc32c}")
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ShardError(
            f"{url}: {len(wrong)} of {len(shards):,} objects differ from {MANIFEST_NAME}: "
            f"{'; '.join(wrong[:5])}{more}. Prepare or upload them again, or {way_out}."
        )
