"""Read the documents of text files, in pieces of bounded size; train a tokenizer on them."""

import codecs
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from refocused.data.formats.object_names import text_kind
from refocused.prepare.texts import text_inputs
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json
from refocused.tokenizers.encoders import END_OF_TEXT

BLOCK_BYTES = 256 * 1024
PIECE_CHARACTERS = 256 * 1024
SLICE_CHARACTERS = 16 * 1024  # of a sample
HELD_OUT_EVERY = 50
MAX_LINE_BYTES = 256 * 1024 * 1024
MIN_LINE_BYTES = 64  # charged for each line of a compressed file, since it takes some microseconds
MAX_DOCUMENT_CHARACTERS = 64 * 1024 * 1024
MAX_PACKED_CHARACTERS = 4 * 1024 * 1024  # of a document; a token may take 150 bytes of memory

# Tokens cross none of these borders. After tiktoken's cl100k_base; but digits form pairs, since
# numbers of three digits take a thousand ids of a small vocabulary, and words keep their accents.
SPLIT_PATTERN = (
    r"'(?i:[dmst]|ll|re|ve)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # a word, with the space or sign before it
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs, with the end of their line
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # of several spaces, the last goes with the word
)

BadText = Literal["refuse", "replace"]

_GAP = re.compile(r"[\s,]*")
_SCANNER = json.JSONDecoder()  # finds the ends of values, which `parse_json` reads
_REPLACE = "Correct the file, or use --bad-text replace to insert the replacement character."


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """At least one character of a document; `begins` marks the first piece."""

    text: str
    begins: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TextReading:
    """How files are read as documents."""

    field: str = "text"  # key of the text in JSON, or its column
    separator: str | None = None  # line between the documents of a `.txt`; None: one document
    bad_text: BadText = "refuse"  # what to do with invalid Unicode
    cuts_at_spaces: bool = True  # long documents may be split before a single space

    @property
    def codec_errors(self) -> str:
        """The error handler of a decoder."""
        return "strict" if self.bad_text == "refuse" else "replace"


def pieces(
    span: text_inputs.Span, reading: TextReading, counts: Counter[str] | None = None
) -> Iterator[Piece]:
    """Yield the non-empty documents of a span in order; `counts` counts the `empty` ones.

    Raises `ShardError` if the file is damaged, a line is not JSON or lacks the field, the text is
    not Unicode, or a document that may not be split is too long.
    """
    texts: Iterable[str | None]
    kind = text_kind(span.path.name)
    if kind in (".txt", ".md"):
        yield from _split(_fragments(span.path, reading), reading, path=span.path)
        return
    if kind in (".parquet", ".arrow"):
        texts = text_inputs.column_texts(span, field=reading.field)
    elif kind == ".json":
        texts = _json_texts(span.path, reading)
    else:
        texts = _line_texts(span, reading)
    left: float = math.inf
    longest = left
    if kind in (".parquet", ".arrow") or span.path.name.lower().endswith((".gz", ".zst")):
        size = text_inputs.size_of(span.path)
        left, longest = text_inputs.most_unpacked(size), MAX_PACKED_CHARACTERS + size
    for text in texts:
        characters = len(text or "") + 1
        left -= characters
        if left < 0 or characters > longest:
            raise text_inputs.unpacks_too_far(span.path)
        if text:
            yield Piece(text, begins=True)
        elif counts is not None:
            counts["empty"] += 1


def sampled_texts(
    tasks: Sequence[text_inputs.Task],
    reading: TextReading,
    *,
    most_bytes: int,
    held_out: list[str],
    progress: Callable[[int, int], object],
) -> Iterator[str]:
    """Yield up to `most_bytes` of text, as much from the beginning of each task as its size says.

    Every 50th text is appended to `held_out` instead. Long documents come in slices, which bounds
    the memory. Raises as `pieces`, and if there is no text.
    """
    total, planned, taken, number = sum(task.bytes for task in tasks), 0, 0, 0
    for task in tasks:
        planned += task.bytes
        slices = (
            piece.text[at : at + SLICE_CHARACTERS]
            for span in task.spans
            for piece in pieces(span, reading)
            for at in range(0, len(piece.text), SLICE_CHARACTERS)
        )
        while taken < most_bytes * planned // max(total, 1) and (text := next(slices, None)):
            taken, number = taken + len(text.encode()), number + 1
            progress(taken, min(most_bytes, total))
            if number % HELD_OUT_EVERY:
                yield text
            else:
                held_out.append(text)
    if not taken:
        raise ShardError("There is no text in the files: every document is empty.")


def _split(
    fragments: Iterable[str | None], reading: TextReading, *, path: text_inputs.TextPath
) -> Iterator[Piece]:
    """Join fragments into pieces; None separates the fragments of two documents."""
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
            # GPT-2's pattern never matches across a single space between characters that are not
            # white space, so both sides can be encoded separately.
            space = text.rfind(" ", 1, -1)
            while space > 0 and (text[space - 1].isspace() or text[space + 1].isspace()):
                space = text.rfind(" ", 1, space)
            if space > 0:
                yield Piece(text[:space], begins)
                text, begins = text[space:], False
            gathered, size = [text], len(text)
        if size > MAX_DOCUMENT_CHARACTERS:
            raise ShardError(
                f"{path}: a document has over {MAX_DOCUMENT_CHARACTERS:,} characters, and this "
                "tokenizer cannot split it. Give the line between documents with --separator, or "
                "split the file."
            )
    if size:
        yield Piece("".join(gathered), begins)


def _fragments(path: text_inputs.TextPath, reading: TextReading) -> Iterator[str | None]:
    if reading.separator is None:
        yield from _decoded(path, reading)
        return
    rest = ""
    for block in _decoded(path, reading):
        *lines, rest = (rest + block).split("\n")
        for line in lines:
            yield None if line.rstrip("\r") == reading.separator else f"{line}\n"
        if len(rest) > MAX_DOCUMENT_CHARACTERS:
            raise ShardError(
                f"{path}: a line has over {MAX_DOCUMENT_CHARACTERS:,} characters, so lines cannot "
                "separate documents. Leave out --separator."
            )
    if rest and rest.rstrip("\r") != reading.separator:
        yield rest


@contextlib.contextmanager
def _unpacked(path: text_inputs.TextPath, *, start: int = 0) -> Iterator[tuple[Any, int | None]]:
    """Open a file, decompressed, and yield the most bytes that it may unpack to, if it is packed.

    One that is read from a later `start` on is not. Raises `ShardError` if it is damaged.
    """
    try:
        with path.open("rb") as raw:
            kind = "" if start else text_inputs.compression(raw)
            most = text_inputs.most_unpacked(text_inputs.size_of(path)) if kind else None
            if kind == ".gz":
                with gzip.open(raw) as file:
                    yield file, most
            elif kind == ".zst":
                unpacked = text_inputs.import_pyarrow(path).CompressedInputStream(raw, "zstd")
                yield io.BufferedReader(unpacked, BLOCK_BYTES), most
            else:
                yield raw, most
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(
            f"{path}: it cannot be read completely ({error}). Download it again, or leave it out."
        ) from None


def _decoded(path: text_inputs.TextPath, reading: TextReading) -> Iterator[str]:
    """Yield a UTF-8 file's text in blocks, without a byte order mark."""
    offset = 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")(reading.codec_errors)
    with _unpacked(path) as (file, most):
        try:
            while block := file.read(BLOCK_BYTES):
                offset += len(block)
                if most is not None and offset > most:
                    raise text_inputs.unpacks_too_far(path)
                yield decoder.decode(block)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            offset += error.start - len(error.object)
            raise ShardError(
                f"{path}: the text is not UTF-8 at byte {offset:,}. {_REPLACE}"
            ) from None


def _json_texts(path: text_inputs.TextPath, reading: TextReading) -> Iterator[str | None]:
    """Yield the texts of a `.json`: of a list's objects, or of objects one after another."""
    text, at, place, enough, end = "", 0, 0, 1, None
    for block in itertools.chain(filter(None, _decoded(path, reading)), [""]):
        text += block
        if block and len(text) < enough:
            continue
        if end is None:
            begin = _GAP.match(text).end()  # type: ignore[union-attr]  # it matches everywhere
            end = "]" if text[begin : begin + 1] == "[" else ""
            at = begin + len(end)
        while True:
            begin = _GAP.match(text, at).end()  # type: ignore[union-attr]
            where = f"{path}, the value at character {place + begin:,}"
            if not text[begin:] or text[begin] == end:
                break
            try:
                _, at = _SCANNER.raw_decode(text, begin)
            except (ValueError, RecursionError) as error:
                if block and len(text) - begin < MAX_LINE_BYTES:
                    break  # it may end in the next block
                raise ShardError(
                    f"{where}: it is not JSON ({error}). Write a list of objects, or one object a "
                    "line; or leave the file out."
                ) from None
            yield _text_of(text[begin:at], reading, where=where)
        # The next attempt is made with twice the text, so that long values take linear time.
        text, place, at = text[at:], place + at, 0
        enough = 2 * len(text)
    if text.strip(" \t\r\n,") != end:
        raise ShardError(f"{path}: the list has no end: it was truncated. Download it again.")


def _line_texts(span: text_inputs.Span, reading: TextReading) -> Iterator[str | None]:
    """Yield the texts of the lines that start in a span of a file of JSON lines."""
    path, offset, spent = span.path, span.start, 0
    with _unpacked(path, start=offset) as (file, most):
        longest = MAX_LINE_BYTES if most is None else min(MAX_LINE_BYTES, most)
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline(MAX_LINE_BYTES)) - 1
        while span.end is None or offset < span.end:
            line = file.readline(longest)
            spent += max(len(line), MIN_LINE_BYTES)
            if most is not None and spent >= most:
                raise text_inputs.unpacks_too_far(path)
            if len(line) == MAX_LINE_BYTES:
                raise ShardError(
                    f"{path}: the line at byte {offset:,} has over {MAX_LINE_BYTES:,} bytes. A "
                    ".jsonl file holds one object per line: split the line, or leave the file out."
                )
            if not line:
                return
            if not line.isspace():
                text = line if offset else line.removeprefix(codecs.BOM_UTF8)
                yield _text_of(text, reading, where=f"{path}, the line at byte {offset:,}")
            offset += len(line)


def _text_of(line: bytes | str, reading: TextReading, *, where: str) -> str | None:
    """Return the text of an object; None if it is null."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8", reading.codec_errors)
        content = parse_json(text, lone_surrogates=True)
    except UnicodeDecodeError as error:
        raise ShardError(f"{where}: its byte {error.start:,} is not UTF-8. {_REPLACE}") from None
    except MalformedError as error:
        raise ShardError(
            f"{where}: it is not JSON ({error}). A .jsonl file holds one object per line: write it "
            "again, or leave it out."
        ) from None
    names = content if isinstance(content, dict) else {}
    value = names.get(reading.field)
    if value is None and reading.field in names:
        return None
    if not isinstance(value, str):
        there = f"it has {', '.join(names) or 'no names':.200}"
        if value is not None:
            there = f"but {json.dumps(value):.40}, which is none"
        raise ShardError(
            f"{where}: it has no text under {reading.field!r}; {there}. Give the text's key with "
            "--field."
        )
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if reading.bad_text == "refuse":
            raise ShardError(
                f"{where}: its text has a lone surrogate at character {error.start:,}. {_REPLACE}"
            ) from None
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def train_byte_pairs(
    texts: Iterable[str], *, vocabulary: int, special_tokens: Sequence[str] = ()
) -> bytes:
    """Train a byte-level BPE, and return it as the content of a `tokenizer.json`.

    The same texts give the same bytes, in any order. `END_OF_TEXT` and the other special tokens
    have the first ids. There are fewer than `vocabulary` if no pair of tokens occurs twice any
    more. Raises `ShardError` if the bytes alone exceed it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys([END_OF_TEXT, *special_tokens]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(special) + len(alphabet)
    if vocabulary < least or not {"", *alphabet}.isdisjoint(special):
        raise ShardError(
            f"--vocabulary {vocabulary}: give at least {least}, for the bytes and the special "
            f"tokens ({', '.join(special)}), which have two characters or more."
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
    )
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str()
    return text.encode()
