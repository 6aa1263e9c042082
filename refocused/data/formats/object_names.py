"""Names of objects: suffixes, glob patterns. Imports little, so that a sync starts at once."""

import fnmatch
import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from refocused.system.errors import ShardError

TOKEN_SUFFIXES = (".npz", ".npy", ".pt", ".bin")
TEXT_KINDS = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
TEXT_PATTERNS = ", ".join("*" + kind for kind in TEXT_KINDS) + "; compressed: .gz, .zst"
# Files that describe the data beside them, and what `datasets` has computed from it.
DESCRIPTION = re.compile(
    r"readme\.md|(dataset_infos?|dataset_dict|state|metadata|manifest|recipe|config|tokenizer"
    r"|tokenizer_config|special_tokens_map|encoder|vocab)\.json|(cache-[0-9a-f]+|indices)\.arrow",
    re.IGNORECASE,
)
# As validation and test sets are usually named: val.bin, test-00000-of-00002.parquet, x/dev/1.txt.
HELD_OUT = re.compile(
    r"(?:^|[/_.-])(?:val|valid|validation|dev|eval|test|heldout)\d*(?:[/_.-]|$)", re.IGNORECASE
)
TOKEN_PATTERNS = ", ".join("*" + suffix for suffix in TOKEN_SUFFIXES)
MANIFEST_NAME = "manifest.json"
RECIPE_NAME = "recipe.json"  # of a set that this program makes
METADATA_NAME = "metadata.json"  # beside chunks, whose number it has


def text_kind(name: str) -> str:
    """Return a text file's format, as its suffix without that of a compression; "" for others."""
    path = PurePosixPath(name.lower())
    suffix, kind = path.suffix, PurePosixPath(path.stem).suffix
    if suffix not in (".gz", ".zst"):
        return suffix if suffix in TEXT_KINDS else ""
    if kind in TEXT_KINDS[:5]:
        return kind
    # As published dumps are named: RC_2011-01.zst.
    return ".jsonl" if suffix == ".zst" and not kind[1:].isalpha() else ""


def is_data(name: str) -> bool:
    """Whether a file is tokens, or text rather than a description of tokens."""
    is_text = text_kind(name) != "" and not name.lower().endswith((".json", ".md"))
    return is_text or name.endswith((*TOKEN_SUFFIXES, ".idx"))


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
