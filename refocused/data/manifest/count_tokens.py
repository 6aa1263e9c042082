"""Counts of many token files at once by their headers, kept on disk for the next start."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import count_tokens
from refocused.data.formats.token_layout import read_layout
from refocused.system.atomic_files import replace_file
from refocused.system.errors import BucketError, ShardError
from refocused.system.strict_json import parse_json_object

SCHEMA = 2
NAMED_FAILURES = 5

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderFacts:
    """What a file's headers say.

    Attributes:
        tokens: Real tokens, separators included.
        dtype: `uint16` or `uint32`: holds whatever the stored type can hold.
        documents: Filled rows of a padded file; None: the headers do not say.
        pad_id: Id that marks the padding of rows; None: none does.
        separator_id: Id put between rows; None: none is.
    """

    tokens: int
    dtype: str
    documents: int | None
    pad_id: int | None
    separator_id: int | None


def survey(
    bucket: Bucket, blobs: Sequence[BlobInfo], *, data: DataConfig, cache_file: Path | None
) -> list[HeaderFacts]:
    """Return the facts of each object, in the order given.

    Objects that the cache file knows, by name, size, CRC-32C and generation, are not read.

    Raises:
        ShardError: Some files are refused; up to five are named.
        BucketError: An object cannot be read.
    """
    known = _read_cache(cache_file)
    keys = [_key(blob, data) for blob in blobs]
    unknown = [(k, blob) for k, blob in zip(keys, blobs, strict=True) if k not in known]
    if unknown:
        _log.info("  shards   %s: reading the headers of %d files", bucket.url, len(unknown))
    try:
        failures = _read_many(bucket, unknown, known, data=data)
    finally:
        if cache_file is not None and unknown:
            _write_cache(cache_file, known)
    if failures:
        raise ShardError(_together(failures, total=len(blobs), url=bucket.url))
    return [known[key] for key in keys]


def _read_many(
    bucket: Bucket,
    unknown: Sequence[tuple[str, BlobInfo]],
    known: dict[str, HeaderFacts],
    *,
    data: DataConfig,
) -> list[str]:
    """Add the facts of many objects to `known`; return what is wrong with the others."""
    failures = []
    with concurrent.futures.ThreadPoolExecutor(data.fetch_threads, "headers") as pool:
        jobs = {key: pool.submit(_read_facts, bucket, blob, data) for key, blob in unknown}
        for key, job in jobs.items():
            try:
                known[key] = job.result()
            except ShardError as error:
                failures.append(str(error))
            except BucketError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return failures


def _read_facts(bucket: Bucket, blob: BlobInfo, data: DataConfig) -> HeaderFacts:
    file = ObjectReader(bucket, blob)
    layout = read_layout(file, name=blob.name, data=data)
    count = count_tokens(file, layout, name=blob.name)
    return HeaderFacts(
        tokens=count.tokens,
        dtype=layout.local_dtype,
        documents=count.rows,
        pad_id=layout.pad_id,
        separator_id=layout.separator_id,
    )


def _together(failures: list[str], *, total: int, url: str) -> str:
    if len(failures) == 1:
        return f"{url}: {failures[0]}"
    more = len(failures) - NAMED_FAILURES
    lines = failures[:NAMED_FAILURES] + ([f"and {more:,} more"] if more > 0 else [])
    return f"{url}: {len(failures):,} of {total:,} files cannot be used:\n  " + "\n  ".join(lines)


def _key(blob: BlobInfo, data: DataConfig) -> str:
    """Name an object's content, and the settings that its counts, or its refusal, depend on."""
    read_as = [data.dtype, data.pad_id, data.separator_id, data.mask_documents]
    return json.dumps([blob.name, blob.size, blob.crc32c, blob.generation, *read_as])


def _read_cache(cache_file: Path | None) -> dict[str, HeaderFacts]:
    if cache_file is None or not cache_file.exists():
        return {}
    try:
        content = parse_json_object(cache_file.read_bytes())
        if content["schema"] != SCHEMA:
            return {}
        return {key: HeaderFacts(**facts) for key, facts in content["headers"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s: not readable (%s); the headers are read again", cache_file, error)
        return {}


def _write_cache(cache_file: Path, known: dict[str, HeaderFacts]) -> None:
    headers = {key: dataclasses.asdict(facts) for key, facts in known.items()}
    text = json.dumps({"schema": SCHEMA, "headers": headers})
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(cache_file, text.encode(), rivals=True)
    except OSError as error:
        _log.warning(
            "%s: %s. The headers are read again at the next start.", cache_file, error.strerror
        )
