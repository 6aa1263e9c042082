"""The documents of text files, in pieces of bounded size."""

from __future__ import annotations

import codecs
import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document.

    Attributes:
        text: At least one character.
        begins: Whether the document begins with it.
    """

    text: str
    begins: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How files become documents.

    Attributes:
        field: Where `.jsonl` and `.parquet` keep the text.
        separator: Line of a `.txt` file that stands between documents, without its line end; None:
            the file is one document.
        bad_text: What to do with text that is no Unicode.
        cuts_at_spaces: Whether long documents may be cut before a lone space.
    """

    field: str = "text"
    separator: str | None = None
    bad_text: BadText = "refuse"
    cuts_at_spaces: bool = True


def pieces(span: Span, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of a span in order; empty ones are passed over.

    Raises:
        ShardError: The file is damaged, a line is no JSON or lacks the field, the text is no
            Unicode, or a document that may not be cut is too long.
    """
    name = span.path.name
    if name.endswith(".txt"):
        yield from _cut(_fragments(span.path, reading), reading, path=span.path)
        return
    if name.endswith(".parquet"):
        texts = column_texts(span.path, field=reading.field, start=span.start, end=span.end)
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
    """Return the last lone space between characters that are no white space; 0 when none.

    No piece of GPT-2's pattern reaches over such a place from the left, and the one that follows
    begins with the space, so that both sides are tokenised as if they were still together.
    """
    place = text.rfind(" ", 1, -1)
    while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind(" ", 1, place)
    return max(place, 0)


def _fragments(path: Path, reading: Reading) -> Iterator[str | None]:
    if reading.separator is None:
        yield from _decoded(path, reading.bad_text)
        return
    rest = ""
    for block in _decoded(path, reading.bad_text):
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


def _decoded(path: Path, bad_text: BadText) -> Iterator[str]:
    """Yield a UTF-8 file's text block by block, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(_codec_errors(bad_text))
    read = 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _no_unicode(path, read - waiting + error.start) from None
            read += len(block)
            if text:
                yield text
            if not block:
                return


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

    Args:
        file: Of lines.
        span: Which of them.
        most: Bytes that a packed file may unpack to; None: it is not packed.
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
        text = line.decode("utf-8", _codec_errors(reading.bad_text))
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
    return _whole_characters(found, reading.bad_text, where=where)


def _whole_characters(text: str, bad_text: BadText, *, where: str) -> str:
    """Deal with halves of characters (lone surrogates): JSON can spell them, Unicode cannot."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if bad_text == "refuse":
            raise ShardError(
                f"{where}: its text has half a character at {error.start:,}. {_REPLACE}"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_REPLACE = "Correct the file, or put the replacement character in its place by --bad-text replace."


def _no_unicode(path: Path, place: int) -> ShardError:
    return ShardError(f"{path}: the text is no UTF-8 at byte {place:,}. {_REPLACE}")


def _codec_errors(bad_text: BadText) -> str:
    return "strict" if bad_text == "refuse" else "replace"
