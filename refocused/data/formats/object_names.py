"""Names of objects: suffixes, glob patterns. Imports little, so that a sync starts at once."""

import fnmatch
from collections.abc import Collection, Iterable

from refocused.system.errors import ShardError

TOKEN_SUFFIXES = (".npz", ".npy", ".pt", ".bin")
TEXT_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
TOKEN_PATTERNS = ", ".join("*" + suffix for suffix in TOKEN_SUFFIXES)
MANIFEST_NAME = "manifest.json"
METADATA_NAME = "metadata.json"  # beside chunks, whose number it has


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a glob pattern matches an object's whole name or its last part."""
    last = name.rstrip("/").rpartition("/")[2]
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)
        for pattern in patterns
    )


def fits(name: str, *, include: Collection[str], exclude: Iterable[str]) -> bool:
    """Whether the patterns select an object; an empty `include` selects all."""
    return (not include or matches(name, include)) and not matches(name, exclude)


def unusable(name: str, problem: str) -> ShardError:
    """Return the error of a damaged or inconsistent token file."""
    return ShardError(f"{name}: {problem}. Write the file again, or put its name in data.exclude.")
