"""The token files of a run: list, select, describe by their headers, check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import pydantic

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c, with_checksum
from refocused.bucket.retry import RefusedRequestError
from refocused.bucket.transfer import map_in_threads, object_files
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import (
    DESCRIPTION,
    MANIFEST_NAME,
    METADATA_NAME,
    RECIPE_NAME,
    TOKEN_PATTERNS,
    TOKEN_SUFFIXES,
    fits,
    matches,
    text_kind,
)
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import count_tokens
from refocused.data.formats.token_layout import (
    SMALL_VOCABULARY,
    TokenLayout,
    read_layout,
    why_unsupported,
)
from refocused.system.atomic_files import replace_file
from refocused.system.errors import BucketError, ShardError, as_typed, counted
from refocused.system.strict_json import MalformedError, parse_json_object
from refocused.tokenizers.encoders import TokenizerChoice, described

SCHEMA, COUNTS_SCHEMA = 1, 3  # of `manifest.json`, and of the counts on this machine
MAX_METADATA_BYTES = 1_000_000
SHOWN_GAPS = SHOWN_FAILURES = 5
SKIP, EXCLUDE = "put their names in data.skip", "leave them out with --exclude"
SAMPLED_BLOCKS, SAMPLED_BLOCK_BYTES = 8, 16 * 1024
Whole = Annotated[int, pydantic.Strict(), pydantic.Field(ge=0, lt=2**63)]

Facts = dict[str, Any]  # attributes of a `Shard` that come from the file's headers
Counts = Path | dict[str, Facts] | None  # where known facts are kept, by `_counts_key`
FACTS = ("tokens", "dtype", "documents", "pad_id", "separator_id")

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
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards)

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


def build_manifest(bucket: Bucket, data: DataConfig, *, cache_file: Counts = None) -> Manifest:
    """Describe the token files of a source without downloading them.

    A `manifest.json` in the source is used if the listing, where it is allowed, agrees with it.
    Otherwise the headers are read in parallel, and the counts are cached in `cache_file`.

    Raises:
        ShardError: There are no token files, a format is not supported, or objects differ from
            the `manifest.json`.
        BucketError: The source cannot be listed or read.
    """
    listing = list_source(bucket, exclude=data.exclude)
    url = bucket.url
    if MANIFEST_NAME not in listing or matches(MANIFEST_NAME, data.exclude):
        check_chunks(bucket, listing, data=data)
        names = chosen_names(listing, data=data, url=url)
        blobs = [listing[name] for name in names]
        files = describe_files(bucket, blobs, data, cache_file=cache_file)
        return Manifest(files, named_tokenizer(bucket, listing, names, data=data))
    stored = read_manifest(bucket)
    check_tokenizer(stored, data, url=url)
    rows = {shard.name: shard for shard in stored.shards}
    chosen = [rows[name] for name in chosen_names(rows, data=data, url=url)]
    check_listing([shard for shard in chosen if not is_skipped(shard, data)], listing, url=url)
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
        unlisted=tuple(unlisted_names(listing, listed=rows, data=data)),
    )


def list_source(bucket: Bucket, *, exclude: Iterable[str]) -> dict[str, BlobInfo]:
    """List a source; where that is not allowed, return what its `manifest.json` lists."""
    try:
        return {blob.name: blob for blob in bucket.list()}
    except RefusedRequestError as refused:
        if refused.status not in (401, 403) or matches(MANIFEST_NAME, exclude):
            raise
        try:
            stored, described = read_manifest(bucket), bucket.info(MANIFEST_NAME)
        except (BucketError, ShardError):
            raise refused from None
        assert described is not None
        _log.info("  shards   %s: may not be listed; its %s is used", bucket.url, MANIFEST_NAME)
        return {described.name: described} | {shard.name: shard.blob for shard in stored.shards}


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


def check_chunks(bucket: Bucket, listing: Mapping[str, BlobInfo], *, data: DataConfig) -> None:
    """Raise `ShardError` if a folder has fewer chunks than its metadata say."""
    for name, blob in listing.items():
        folder = PurePosixPath(name).parent

        def chunk(number: int, folder: PurePosixPath = folder) -> str:
            return str(folder / f"chunk_{number:06d}.pt")

        if PurePosixPath(name).name != METADATA_NAME or not fits(
            chunk(0), include=data.include, exclude=data.exclude
        ):
            continue
        promised = _metadata(bucket, blob).get("num_chunks")
        there = sum(listed.startswith(chunk(0).removesuffix("000000.pt")) for listed in listing)
        if not isinstance(promised, int) or not there:
            continue  # not metadata of chunks
        # Enough to find gaps, however large the promised number is.
        expected = map(chunk, range(min(promised, there + SHOWN_GAPS)))
        absent = [chunk_name for chunk_name in expected if chunk_name not in listing]
        missing = [chunk_name for chunk_name in absent if not matches(chunk_name, data.exclude)]
        if missing:
            raise ShardError(
                f"{bucket.url}: {name} promises {promised:,} chunks, but there are {there:,}; "
                f"missing are {', '.join(missing[:SHOWN_GAPS])}. Upload them, or put their names "
                "in data.exclude."
            )


def named_tokenizer(
    bucket: Bucket, listing: Mapping[str, BlobInfo], names: Iterable[str], *, data: DataConfig
) -> str:
    """Return `data.tokenizer`, else the one that all metadata of the files name, else `unknown`.

    Where a set is unfinished, its recipe names it.
    """
    if data.tokenizer != "unknown":
        return data.tokenizer
    folders = sorted({PurePosixPath(name).parent for name in names})
    beside = [str(folder / name) for folder in folders for name in (METADATA_NAME, RECIPE_NAME)]
    tokenizers = [_metadata(bucket, listing[n]).get("tokenizer") for n in beside if n in listing]
    first = next(iter(tokenizers), None)
    agree = isinstance(first, str) and tokenizers.count(first) == len(tokenizers)
    return str(first) if agree else "unknown"


def _metadata(bucket: Bucket, blob: BlobInfo) -> dict[str, Any]:
    if blob.size > MAX_METADATA_BYTES:
        return {}
    try:
        return parse_json_object(bucket.read(blob.name))
    except MalformedError:  # another program's file
        return {}


def is_skipped(shard: Shard, data: DataConfig) -> bool:
    """Whether `data.skip` names a shard or one of its parts."""
    return any(matches(file.name, data.skip) for file in shard.files)


def chosen_names(names: Collection[str], *, data: DataConfig, url: str) -> list[str]:
    """Return those of the objects `names` that a run uses, in name order.

    `data.max_files` limits training files only. Raises `ShardError` if no files are left, a
    pattern matches nothing, or a format is not supported, and `BucketError` as `object_files`.
    """
    selected = [name for name in sorted(names) if _is_selected(name, data)]
    if not data.include and not any(name.endswith((*TOKEN_SUFFIXES, ".idx")) for name in names):
        others = [name for name in names if not DESCRIPTION.fullmatch(PurePosixPath(name).name)]
        texts = [kind for name in others if (kind := text_kind(name))]
        kinds = Counter(texts) or Counter(PurePosixPath(name).suffix or "other" for name in names)
        holds = ", ".join(f"{n:,} {kind} file{'s'[: n != 1]}" for kind, n in kinds.most_common(5))
        remedy = (
            f"Token files end in {TOKEN_PATTERNS}, at any depth. Correct data.source, or name the "
            "files in data.include."
        )
        if texts:
            command = f"{as_typed('prepare_data tokenize')} {shlex.quote(url)} --out data/tokens"
            command += f" --tokenizer {data.tokenizer if data.tokenizer != 'unknown' else 'gpt2'}"
            if data.bpe_folder is not None:
                command += f" --bpe-folder {shlex.quote(data.bpe_folder)}"
            remedy = f"Tokenize them: {command}; then set data.source=data/tokens"
        raise ShardError(f"{url}: no token files; it holds {holds or 'no files'}. {remedy}")
    example = f" (the first is {min(names)!r})" if names else ""
    for pattern in (*data.include, *data.validation_files):
        if not any(matches(name, [pattern]) for name in selected):
            raise ShardError(
                f"{url}: the pattern {pattern!r} of data.include or data.validation_files matches "
                f"none of its {counted(len(names), 'object')}{example}. Correct the pattern."
            )
    if not selected:
        raise ShardError(
            f"{url}: data.exclude leaves none of its {counted(len(names), 'object')}{example}."
        )
    object_files(selected, Path(data.cache), where=url)
    for name in selected:
        if is_megatron(name, names) or not name.endswith(TOKEN_SUFFIXES):
            raise ShardError(why_unsupported(name))
    training = [name for name in selected if not matches(name, data.validation_files)]
    validation = [name for name in selected if matches(name, data.validation_files)]
    return sorted(training[: data.max_files] + validation)


def _is_selected(name: str, data: DataConfig) -> bool:
    if matches(name, data.exclude):
        return False
    if data.include:
        return matches(name, (*data.include, *data.validation_files))
    return name.endswith((*TOKEN_SUFFIXES, ".idx"))


def unlisted_names(
    names: Collection[str], *, listed: Collection[str], data: DataConfig
) -> list[str]:
    """Return the token files that a run would use if its manifest listed them."""
    return [
        name
        for name in sorted({*names} - {*listed})
        if name.endswith(TOKEN_SUFFIXES)
        and _is_selected(name, data)
        and not is_megatron(name, names)
    ]


def is_megatron(name: str, names: Collection[str]) -> bool:
    """Whether an object is one of a `.bin` and `.idx` pair."""
    stem = name.removesuffix(".bin").removesuffix(".idx")
    return name in (f"{stem}.bin", f"{stem}.idx") and f"{stem}.idx" in names


def describe_files(
    bucket: Bucket, blobs: Sequence[BlobInfo], data: DataConfig, *, cache_file: Counts = None
) -> tuple[Shard, ...]:
    """Describe token files from their headers, in the order given.

    Objects in the cache file, with the same name and version, are not read.
    Raises `ShardError` if files cannot be used (naming up to five), `BucketError` if not read.
    """
    known = cache_file if isinstance(cache_file, dict) else {}
    if isinstance(cache_file, Path):
        try:
            content = parse_json_object(cache_file.read_bytes())
            if content["schema"] == COUNTS_SCHEMA:
                headers = content["headers"].items()
                known = {key: {name: facts[name] for name in FACTS} for key, facts in headers}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s: not readable (%s); reading the headers again", cache_file, error)
    keys = [_counts_key(blob, data) for blob in blobs]
    unknown = {key: blob for key, blob in zip(keys, blobs, strict=True) if key not in known}
    if unknown:
        _log.info("  shards   %s: reading the headers of %d files", bucket.url, len(unknown))
    failures: dict[str, str] = {}

    def read(key: str) -> None:
        try:
            read_headers(bucket, unknown[key], data, known)
        except ShardError as error:
            failures[key] = str(error)

    try:
        map_in_threads(read, list(unknown), threads=data.fetch_threads)
    finally:
        if unknown and isinstance(cache_file, Path):
            text = json.dumps({"schema": COUNTS_SCHEMA, "headers": known})
            try:
                cache_file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(cache_file, text.encode(), concurrent=True)
            except OSError as error:
                problem = "%s: %s. The next start will read the headers again."
                _log.warning(problem, cache_file, error.strerror)
    messages = [failures[key] for key in unknown if key in failures]
    if len(messages) == 1:
        raise ShardError(f"{bucket.url}: {messages[0]}")
    if messages:
        more = len(messages) - SHOWN_FAILURES
        raise ShardError(
            f"{bucket.url}: {len(messages):,} of {len(blobs):,} files cannot be used:\n  "
            + "\n  ".join(messages[:SHOWN_FAILURES] + [f"and {more:,} more"] * (more > 0))
        )
    shards = [
        Shard(**dataclasses.asdict(blob), **known[key])
        for blob, key in zip(blobs, keys, strict=True)
    ]
    return _with_content(bucket, shards, data)


def read_headers(
    bucket: Bucket, blob: BlobInfo, data: DataConfig, known: dict[str, Facts]
) -> tuple[TokenLayout, Facts]:
    """Read an object's headers, and count its tokens; note the facts in `known`."""
    file = ObjectReader(bucket, blob)
    layout = read_layout(file, name=blob.name, data=data)
    tokens, rows = count_tokens(file, layout, name=blob.name)
    is_short = layout.ids.dtype.itemsize <= 2 and (layout.separator_id or 0) < SMALL_VOCABULARY
    kind = "uint16" if is_short else "uint32"
    facts = zip(FACTS, (tokens, kind, rows, layout.pad_id, layout.separator_id), strict=True)
    known[_counts_key(blob, data)] = counted = dict(facts)
    return layout, counted


def _counts_key(blob: BlobInfo, data: DataConfig) -> str:
    """Identify an object's content, and the settings that its facts depend on."""
    settings = [data.dtype, data.pad_id, data.separator_id, data.mask_documents]
    return json.dumps([blob.name, blob.version, *settings])
