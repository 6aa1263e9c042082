"""Count the tokens of many files from their headers, and cache the counts."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.transfer import map_in_threads
from refocused.config.data import DataConfig
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import TokenCount, count_tokens
from refocused.data.formats.token_layout import SMALL_VOCABULARY, TokenLayout, read_layout
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.strict_json import parse_json_object

SCHEMA = 3
SHOWN_FAILURES = 5

_log = logging.getLogger(__name__)


Facts = dict[str, Any]  # attributes of a `Shard` that come from the file's headers
Counts = Path | dict[str, Facts] | None  # where known facts are kept, by `_key`
FACTS = ("tokens", "dtype", "documents", "pad_id", "separator_id")


def survey(
    bucket: Bucket, blobs: Sequence[BlobInfo], *, data: DataConfig, cache_file: Counts
) -> list[Facts]:
    """Return the facts of each object, in the order given.

    Objects in the cache file, with the same name and version, are not read.
    Raises `ShardError` if files cannot be used (naming up to five), `BucketError` if not read.
    """
    known = cache_file if isinstance(cache_file, dict) else _read_cache(cache_file)
    keys = [_key(blob, data) for blob in blobs]
    unknown = {key: blob for key, blob in zip(keys, blobs, strict=True) if key not in known}
    if not unknown:
        return [known[key] for key in keys]
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
        if isinstance(cache_file, Path):
            text = json.dumps({"schema": SCHEMA, "headers": known})
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
    return [known[key] for key in keys]


def read_headers(
    bucket: Bucket, blob: BlobInfo, data: DataConfig, known: dict[str, Facts]
) -> tuple[TokenLayout, TokenCount]:
    """Read an object's headers, and count its tokens; note the facts in `known`."""
    file = ObjectReader(bucket, blob)
    layout = read_layout(file, name=blob.name, data=data)
    count, ids = count_tokens(file, layout, name=blob.name), (layout.pad_id, layout.separator_id)
    is_short = layout.ids.dtype.itemsize <= 2 and (layout.separator_id or 0) < SMALL_VOCABULARY
    facts = count.tokens, "uint16" if is_short else "uint32", count.rows, *ids
    known[_key(blob, data)] = dict(zip(FACTS, facts, strict=True))
    return layout, count


def _key(blob: BlobInfo, data: DataConfig) -> str:
    """Identify an object's content, and the settings that its facts depend on."""
    settings = [data.dtype, data.pad_id, data.separator_id, data.mask_documents]
    return json.dumps([blob.name, blob.version, *settings])


def _read_cache(cache_file: Path | None) -> dict[str, Facts]:
    if cache_file is None:
        return {}
    try:
        content = parse_json_object(cache_file.read_bytes())
        if content["schema"] != SCHEMA:
            return {}
        headers = content["headers"].items()
        return {key: {name: facts[name] for name in FACTS} for key, facts in headers}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s: not readable (%s); reading the headers again", cache_file, error)
        return {}
