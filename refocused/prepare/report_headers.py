"""What the headers, the manifest and the recipe of a data set say, file by file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import (
    MANIFEST_NAME,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    matches,
)
from refocused.data.formats.object_reader import ObjectReader
from refocused.data.formats.token_blocks import count_tokens
from refocused.data.formats.token_layout import TokenLayout, read_layout, refusal
from refocused.data.manifest.select_files import check_chunks, is_megatron
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.prepare.packing_state import RECIPE_NAME
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json_object


@dataclasses.dataclass(frozen=True, slots=True)
class FileReport:
    """What one file's headers say.

    Attributes:
        blob: The object.
        layout: Where its ids are.
        tokens: Real tokens.
        rows: Rows that hold tokens; None: the file is a stream.
    """

    blob: BlobInfo
    layout: TokenLayout
    tokens: int
    rows: int | None


def candidate_names(listing: Mapping[str, BlobInfo], data: DataConfig, *, url: str) -> list[str]:
    """Return the objects that look like tokens or text, in name order.

    Raises:
        ShardError: There are none.
    """
    names = [
        name
        for name in sorted(listing)
        if name.endswith((*TOKEN_SUFFIXES, ".idx", *TEXT_SUFFIXES))
        and (not data.include or matches(name, data.include))
        and not matches(name, data.exclude)
    ]
    if not names:
        raise ShardError(
            f"{url}: neither tokens nor text among {len(listing):,} objects. Looked for "
            f"{', '.join('*' + suffix for suffix in (*TOKEN_SUFFIXES, *TEXT_SUFFIXES))}, at any "
            "depth. Correct the address, or --include and --exclude."
        )
    return names[: data.max_files]


def read_headers(
    bucket: Bucket, blobs: Sequence[BlobInfo], data: DataConfig, problems: list[str]
) -> list[FileReport]:
    """Read the headers of objects, many at once; add what is wrong with others to `problems`."""
    names = {blob.name for blob in blobs}
    refused = {
        name for name in names if is_megatron(name, names) or not name.endswith(TOKEN_SUFFIXES)
    }

    def read(blob: BlobInfo) -> FileReport | str:
        try:
            reader = ObjectReader(bucket, blob)
            layout = read_layout(reader, name=blob.name, data=data)
            count = count_tokens(reader, layout, name=blob.name)
        except ShardError as error:
            return str(error)
        rows = count.rows
        if rows is None and len(layout.ids.shape) == 2:
            rows = layout.ids.shape[0]
        return FileReport(blob, layout, count.tokens, rows)

    with concurrent.futures.ThreadPoolExecutor(data.fetch_threads, "headers") as pool:
        found = list(pool.map(read, (blob for blob in blobs if blob.name not in refused)))
    problems += [*_refusals(sorted(refused)), *(one for one in found if isinstance(one, str))]
    return [one for one in found if isinstance(one, FileReport)]


def _refusals(names: Sequence[str]) -> list[str]:
    """Return one problem for all files that are refused for the same reason."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(refusal(name).removeprefix(name), []).append(name)
    problems = []
    for reason, same in alike.items():
        others = f" (and {len(same) - 1:,} more like it)" if len(same) > 1 else ""
        problems.append(f"{same[0]}{others}{reason}")
    return problems


def prepared_facts(
    bucket: Bucket, listing: Mapping[str, BlobInfo], data: DataConfig, problems: list[str]
) -> tuple[int | None, str | None, int]:
    """Return what a manifest knows; compare it with the listing.

    Returns:
        Its documents, its tokenizer, and the number of token files that it does not list.
    """
    try:
        check_chunks(bucket, listing, data=data)
        if MANIFEST_NAME not in listing or matches(MANIFEST_NAME, data.exclude):
            return None, None, 0
        manifest = build_manifest(bucket, data, cache_file=None)
    except ShardError as error:
        problems.append(str(error))
        return None, None, 0
    counts = [shard.documents for shard in manifest.shards]
    known = [count for count in counts if count is not None]
    documents = sum(known) if len(known) == len(counts) else None
    return documents, manifest.tokenizer, len(manifest.unlisted)


def begin_id(bucket: Bucket, listing: Mapping[str, BlobInfo]) -> int | None:
    """Return the id that begins documents, where data prepared here say so."""
    if RECIPE_NAME not in listing:
        return None
    try:
        found = parse_json_object(bucket.read(RECIPE_NAME)).get("end_of_text_id")
    except MalformedError:  # some other program's file
        return None
    return found if isinstance(found, int) else None
