"""Select the token files of a source, and those for validation."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.transfer import object_files
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import (
    DESCRIPTION,
    METADATA_NAME,
    RECIPE_NAME,
    TOKEN_PATTERNS,
    TOKEN_SUFFIXES,
    fits,
    matches,
    text_kind,
)
from refocused.data.formats.token_layout import why_unsupported
from refocused.system.errors import ShardError, as_typed, counted
from refocused.system.strict_json import MalformedError, parse_json_object

if TYPE_CHECKING:
    from refocused.data.manifest.shard_manifest import Shard

MAX_METADATA_BYTES = 1_000_000
SHOWN_GAPS = 5


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
        there = sum(one.startswith(chunk(0).removesuffix("000000.pt")) for one in listing)
        if not isinstance(promised, int) or not there:
            continue  # not metadata of chunks
        # Enough to find gaps, however large the promised number is.
        expected = map(chunk, range(min(promised, there + SHOWN_GAPS)))
        missing = [one for one in expected if one not in listing and not matches(one, data.exclude)]
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
    found = [_metadata(bucket, listing[n]).get("tokenizer") for n in beside if n in listing]
    agree = found and isinstance(found[0], str) and found.count(found[0]) == len(found)
    return str(found[0]) if agree else "unknown"


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
    _check_found(selected, names, data=data, url=url)
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


def _check_found(
    selected: list[str], names: Collection[str], *, data: DataConfig, url: str
) -> None:
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
