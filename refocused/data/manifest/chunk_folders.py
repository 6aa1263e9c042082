"""Folders of `chunk_NNNNNN.pt` files whose `metadata.json` says how many there should be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import METADATA_NAME, matches
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json_object

LARGEST_METADATA_BYTES = 1_000_000
NAMED_GAPS = 5


def check_chunks(bucket: Bucket, listing: Mapping[str, BlobInfo], *, data: DataConfig) -> None:
    """Compare each folder's chunks with the number its metadata gives.

    Raises:
        ShardError: Chunks are missing that `data.include` and `data.exclude` do not leave out.
    """
    for name, blob in listing.items():
        folder = PurePosixPath(name).parent
        first = _chunk_name(folder, 0)
        if PurePosixPath(name).name != METADATA_NAME or matches(first, data.exclude):
            continue
        if data.include and not matches(first, data.include):
            continue
        promised = _metadata(bucket, blob).get("num_chunks")
        if isinstance(promised, int):
            _check_folder(bucket, listing, data, folder=folder, promised=promised)


def named_tokenizer(
    bucket: Bucket, listing: Mapping[str, BlobInfo], names: Iterable[str]
) -> str | None:
    """Return the tokenizer that the chosen files' metadata name, when they agree on one."""
    folders = sorted({PurePosixPath(name).parent for name in names})
    beside = [str(folder / METADATA_NAME) for folder in folders]
    found = [_metadata(bucket, listing[n]).get("tokenizer") for n in beside if n in listing]
    agree = found and isinstance(found[0], str) and found.count(found[0]) == len(found)
    return str(found[0]) if agree else None


def _chunk_name(folder: PurePosixPath, number: int) -> str:
    return str(folder / f"chunk_{number:06d}.pt")


def _check_folder(
    bucket: Bucket,
    listing: Mapping[str, BlobInfo],
    data: DataConfig,
    *,
    folder: PurePosixPath,
    promised: int,
) -> None:
    there = sum(name.startswith(_chunk_name(folder, 0)[:-9]) for name in listing)
    if not there:
        return  # metadata of something else
    # A few more than are there are enough to find gaps, whatever the number promised.
    numbers = range(min(promised, there + NAMED_GAPS))
    wanted = (_chunk_name(folder, number) for number in numbers)
    missing = [name for name in wanted if name not in listing and not matches(name, data.exclude)]
    if missing:
        raise ShardError(
            f"{bucket.url}: {folder / METADATA_NAME} promises {promised:,} chunks and {there:,} "
            f"are there; missing are {', '.join(missing[:NAMED_GAPS])}. Upload them, or put their "
            "names in data.exclude."
        )


def _metadata(bucket: Bucket, blob: BlobInfo) -> dict[str, Any]:
    if blob.size > LARGEST_METADATA_BYTES:
        return {}
    try:
        return parse_json_object(bucket.read(blob.name))
    except MalformedError:  # some other program's; the chunks' own headers are what counts
        return {}
