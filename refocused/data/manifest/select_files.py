"""Which objects of a source are its token files: by form, patterns and `data.max_files`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.bucket.object_files import object_files
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import TEXT_SUFFIXES, TOKEN_SUFFIXES, matches
from refocused.data.formats.token_layout import refusal
from refocused.system.errors import ShardError

if TYPE_CHECKING:
    from refocused.data.manifest.shard_manifest import Shard


def is_validation(name: str, data: DataConfig) -> bool:
    """Whether `data.validation_files` keeps a file for validation."""
    return matches(name, data.validation_files)


def is_skipped(shard: Shard, data: DataConfig) -> bool:
    """Whether `data.skip` names a shard, or a file that it is packed from."""
    return any(matches(file.name, data.skip) for file in shard.files)


def chosen_names(names: Collection[str], *, data: DataConfig, url: str) -> list[str]:
    """Return the token files that a run uses, in name order.

    `data.max_files` counts training files only; validation files are always kept.

    Args:
        names: Every object of the source.
        data: The patterns and the number.
        url: The source, for messages.

    Raises:
        ShardError: Nothing is left, a pattern fits nothing, or a chosen form is refused.
        BucketError: A name cannot be a file's, or two objects would be one file of the cache.
    """
    wanted = [name for name in sorted(names) if _is_wanted(name, data)]
    _check_found(wanted, names, data=data, url=url)
    object_files(wanted, Path(data.cache), where=url)
    for name in wanted:
        if is_megatron(name, names) or not name.endswith(TOKEN_SUFFIXES):
            raise ShardError(refusal(name))
    training = [name for name in wanted if not is_validation(name, data)]
    validation = [name for name in wanted if is_validation(name, data)]
    return sorted(training[: data.max_files] + validation)


def _is_wanted(name: str, data: DataConfig) -> bool:
    if matches(name, data.exclude):
        return False
    if data.include:
        return matches(name, data.include) or is_validation(name, data)
    return name.endswith((*TOKEN_SUFFIXES, ".idx"))


def unlisted_names(
    names: Collection[str], *, listed: Collection[str], data: DataConfig
) -> list[str]:
    """Return the token files that a run would use if the manifest listed them, in name order.

    Args:
        names: Every object of the source.
        listed: Those of its manifest.
        data: The patterns.
    """
    return [
        name
        for name in sorted({*names} - {*listed})
        if name.endswith(TOKEN_SUFFIXES) and _is_wanted(name, data) and not is_megatron(name, names)
    ]


def is_megatron(name: str, names: Collection[str]) -> bool:
    """Whether an object is one of a `.bin` and `.idx` pair."""
    stem = name.removesuffix(".bin").removesuffix(".idx")
    return name in (f"{stem}.bin", f"{stem}.idx") and f"{stem}.idx" in names


def _check_found(wanted: list[str], names: Collection[str], *, data: DataConfig, url: str) -> None:
    for pattern in (*data.include, *data.validation_files):
        if not any(matches(name, [pattern]) for name in wanted):
            raise ShardError(
                f"{url}: the pattern {pattern!r} of data.include or data.validation_files fits "
                f"none of its {len(names):,} objects{_for_example(names)}. Correct the pattern."
            )
    if wanted:
        return
    text = sorted(name for name in names if name.endswith(TEXT_SUFFIXES))
    if text and not data.exclude:
        raise ShardError(f"{url} has no token files, only text. {refusal(text[0])}")
    left_out = " after data.exclude" if data.exclude else ""
    raise ShardError(
        f"{url}: no token files{left_out} among {len(names):,} objects{_for_example(names)}. "
        f"Looked for {', '.join('*' + suffix for suffix in TOKEN_SUFFIXES)}, at any depth. "
        "Correct data.source, or name the files in data.include."
    )


def _for_example(names: Collection[str]) -> str:
    return f" (the first is {min(names)!r})" if names else ""
