"""Collect text that every machine has: the prose in the docstrings of the installed packages."""

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from refocused.system.errors import ShardError

PROSE = 0.98  # least share of letters, spaces and the marks of sentences in a paragraph
# A triple-quoted text that begins a line. Parsing every file would take six times as long.
_DOCSTRING = re.compile(r'^[ \t]*[rR]?("""|\'\'\')((?s:.*?))\1', re.MULTILINE)
_SENTENCES = re.compile(r"[A-Z](?!.*--).{98,}[.]")


def docstrings_key() -> str:
    """Return what the docstrings depend on: the packages and their versions, and Python's."""
    names = sorted(f"{one.name}=={one.version}" for one in metadata.distributions())
    return f"{sysconfig.get_python_version()} {' '.join(names)}"


def docstrings(characters: int) -> Iterator[str]:
    """Yield so many characters of documents, in an order that mixes the packages.

    A document is what a docstring has of paragraphs that are prose and occurred in none before,
    each on a line: without lists of arguments, tables and code, a small model learns to write
    sentences in a minute.

    Raises:
        ShardError: The packages have no source text.
    """
    paths, known, size = sysconfig.get_paths(), set[str](), 0
    roots = [Path(paths["stdlib"]), Path(paths["purelib"])]
    files = {str(file.relative_to(root)): file for root in roots for file in root.rglob("*.py")}
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            source = files[name].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for match in _DOCSTRING.finditer(source):
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", match[2])]
            new = [part for part in paragraphs if is_prose(part) and part not in known]
            known.update(new)
            if text := "\n\n".join(new):
                size += len(text)
                yield text
        if size >= characters:
            return
    if not known:
        raise ShardError(
            f"{roots[1]}: the installed packages have no docstrings (*.py). Name texts with --data."
        )


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph of a hundred characters or more is sentences, without code and tables."""
    of_sentences = sum(char.isalpha() or char in " .,;'()-\"" for char in paragraph)
    return bool(_SENTENCES.fullmatch(paragraph)) and of_sentences >= PROSE * len(paragraph)
