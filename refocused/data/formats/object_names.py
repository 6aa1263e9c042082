"""What an object's name says of it; imports nothing that a sync would wait for."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from refocused.system.errors import ShardError

TOKEN_SUFFIXES = (".npz", ".npy", ".pt", ".bin")
TEXT_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
TOKEN_PATTERNS = ", ".join("*" + suffix for suffix in TOKEN_SUFFIXES)
MANIFEST_NAME = "manifest.json"
METADATA_NAME = "metadata.json"  # beside the chunks that it counts


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a glob pattern fits an object's whole name or its last part."""
    last = PurePosixPath(name).name
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)
        for pattern in patterns
    )


def fits(name: str, *, include: Collection[str], exclude: Iterable[str]) -> bool:
    """Whether patterns choose an object; an empty `include` chooses all."""
    return (not include or matches(name, include)) and not matches(name, exclude)


def unusable(name: str, problem: str) -> ShardError:
    """Return the error of a token file that is damaged or lies."""
    return ShardError(f"{name}: {problem}. Write the file again, or put its name in data.exclude.")
