"""Read the documents of text files, in pieces of bounded size."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from refocused.prepare.text_inputs import Span, column_texts, most_unpacked, unpacks_too_far
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json

BLOCK_BYTES = 256 * 1024
PIECE_CHARACTERS = 256 * 1024
LONGEST_LINE_BYTES = 256 * 1024 * 1024
SHORTEST_LINE_BYTES = 64  # that a line of a packed file counts for: each takes some microseconds
LONGEST_DOCUMENT_CHARACTERS = 64 * 1024 * 1024
LONGEST_PACKED_CHARACTERS = 4 * 1024 * 1024  # of a document; a token may take 150 bytes of memory

BadText = Literal["refuse", "replace"]

_REPLACE = "Correct the file, or put the replacement character in its place by --bad-text replace."


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document, at least one character; `begins`: the first of its document."""

    text: str
    begins: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How files become documents."""

    field: str = "text"  # where `.jsonl` and `.parquet` keep the text
    separator: str | None = None  # line between the documents of a `.txt`; None: there is one
    bad_text: BadText = "refuse"  # what to do with invalid Unicode
    cuts_at_spaces: bool = True  # long documents may be cut before a lone space

    @property
    def codec_errors(self) -> str:
        """The error handler of a decoder."""
        return "strict" if self.bad_text == "refuse" else "replace"


def pieces(span: Span, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of a span in order, without empty ones.

    Raises `ShardError` if the file is damaged, a line is not JSON or lacks the field, the text is
    not Unicode, or a document that may not be cut is too long.
    """
    name = span.path.name
    if name.endswith(".txt"):
        yield from _cut(_fragments(span.path, reading), reading, path=span.path)
        return
    if name.endswith(".parquet"):
        texts = column_texts(span, field=reading.field)
    else:
        texts = _line_texts(span, reading)
    if name.endswith((".parquet", ".gz")):
        texts = _not_unpacked_too_far(texts, span.path)
    for text in texts:
        if text:
            yield Piece(text, begins=True)


def _not_unpacked_too_far(texts: Iterable[str | None], path: Path) -> Iterator[str | None]:
    """Pass on the texts of a packed file until they are far more than text unpacks to."""
    size = path.stat().st_size
    left, longest = most_unpacked(size), LONGEST_PACKED_CHARACTERS + size
    for text in texts:
        characters = len(text or "") + 1
        left -= characters
        if left < 0 or characters > longest:
            raise unpacks_too_far(path)
        yield text


def _cut(fragments: Iterable[str | None], reading: Reading, *, path: Path) -> Iterator[Piece]:
    """Join fragments of documents, None between them, into pieces."""
    gathered: list[str] = []
    size, begins = 0, True
    for fragment in fragments:
        if fragment is None:
            if size:
                yield Piece("".join(gathered), begins)
            gathered, size, begins = [], 0, True
            continue
        gathered.append(fragment)
        size += len(fragment)
        if size >= PIECE_CHARACTERS and reading.cuts_at_spaces:
            text = "".join(gathered)
            place = _last_place_to_cut(text)
            if place:
                yield Piece(text[:place], begins)
                text, begins = text[place:], False
            gathered, size = [text], len(text)
        if size > LONGEST_DOCUMENT_CHARACTERS:
            raise ShardError(
                f"{path}: a document has over {LONGEST_DOCUMENT_CHARACTERS:,} characters, and this "
                "tokenizer needs it whole. Name the line between documents by --separator, or "
                "cut the file."
            )
    if size:
        yield Piece("".join(gathered), begins)


def _last_place_to_cut(text: str) -> int:
    """Return the last single space between characters that are not white space; 0: there is none.

    No match of GPT-2's pattern extends over such a place, and the next one begins with the space,
    so that both sides have the tokens that they have together.
    """
    place = text.rfind(" ", 1, -1)
    while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind(" ", 1, place)
    return max(place, 0)


def _fragments(path: Path, reading: Reading) -> Iterator[str | None]:
    if reading.separator is None:
        yield from _decoded(path, reading)
        return
    rest = ""
    for block in _decoded(path, reading):
        *lines, rest = (rest + block).split("\n")
        for line in lines:
            yield None if line.rstrip("\r") == reading.separator else f"{line}\n"
        if len(rest) > LONGEST_DOCUMENT_CHARACTERS:
            raise ShardError(
                f"{path}: a line has over {LONGEST_DOCUMENT_CHARACTERS:,} characters, so it has no "
                "lines to separate documents. Leave out --separator."
            )
    if rest and rest.rstrip("\r") != reading.separator:
        yield rest


def _decoded(path: Path, reading: Reading) -> Iterator[str]:
    """Yield a UTF-8 file's text block by block, without a byte order mark."""
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, BLOCK_BYTES), b"")
        try:
            yield from codecs.iterdecode(blocks, "utf-8-sig", reading.codec_errors)
        except UnicodeDecodeError as error:
            place = file.tell() - len(error.object) + error.start
            raise ShardError(
                f"{path}: the text is no UTF-8 at byte {place:,}. {_REPLACE}"
            ) from None


def _line_texts(span: Span, reading: Reading) -> Iterator[str]:
    """Yield the texts of the lines that begin in a span of a `.jsonl` file."""
    packed = span.path.name.endswith(".gz")
    try:
        most = most_unpacked(span.path.stat().st_size) if packed else None
        with gzip.open(span.path) if packed else span.path.open("rb") as file:
            for place, line in _lines(file, span, most=most):
                yield _text_of(line, reading, where=f"{span.path}, the line at byte {place:,}")
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(
            f"{span.path}: it cannot be read to its end ({error}). Fetch it again, or leave it out."
        ) from None


def _lines(
    file: BinaryIO | gzip.GzipFile, span: Span, *, most: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield each line that begins in the span, with its offset.

    A packed file may unpack to `most` bytes.
    """
    place = span.start
    spent = 0
    longest = LONGEST_LINE_BYTES if most is None else min(LONGEST_LINE_BYTES, most)
    if place:
        file.seek(place - 1)
        place += len(file.readline(LONGEST_LINE_BYTES)) - 1
    while span.end is None or place < span.end:
        line = file.readline(longest)
        spent += max(len(line), SHORTEST_LINE_BYTES)
        if most is not None and spent >= most:
            raise unpacks_too_far(span.path)
        if len(line) == LONGEST_LINE_BYTES:
            raise ShardError(
                f"{span.path}: the line at byte {place:,} has over {LONGEST_LINE_BYTES:,} bytes. "
                "Is it JSON with one object a line? Cut it, or leave the file out."
            )
        if not line:
            return
        if not line.isspace():
            yield place, line
        place += len(line)


def _text_of(line: bytes, reading: Reading, *, where: str) -> str:
    try:
        text = line.decode("utf-8", reading.codec_errors)
        content = parse_json(text, half_characters=True)
    except UnicodeDecodeError as error:
        raise ShardError(f"{where}: its byte {error.start:,} is no UTF-8. {_REPLACE}") from None
    except MalformedError as error:
        raise ShardError(
            f"{where}: it is no JSON ({error}). A .jsonl file holds one object a line: write it "
            "again, or leave it out."
        ) from None
    found = content.get(reading.field) if isinstance(content, dict) else None
    if not isinstance(found, str):
        keys = ", ".join(content) if isinstance(content, dict) else "no names"
        raise ShardError(
            f"{where}: it has no text under {reading.field!r}; it has {keys:.200}. Name where "
            "the text is by --field."
        )
    if found.isascii():
        return found
    try:
        found.encode()
    except UnicodeEncodeError as error:  # half a character, which JSON can spell
        if reading.bad_text == "refuse":
            raise ShardError(
                f"{where}: its text has half a character at {error.start:,}. {_REPLACE}"
            ) from None
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return found
