"""Encode text as token ids: GPT-2's byte pairs, a file of the `tokenizers` library, or bytes."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
import shlex
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from refocused.config.data import DataConfig
from refocused.system.atomic_files import read_regular
from refocused.system.errors import ShardError, local_path, tokenizer_errors
from refocused.system.strict_json import MalformedError, parse_json_object

Ids = npt.NDArray[Any]

BYTES = "bytes"
BYTES_END_OF_TEXT = 256
BYTES_VOCABULARY = 257
GPT2 = "gpt2"
VOCABULARIES = {BYTES: BYTES_VOCABULARY, GPT2: 50_257}  # of the built-in tokenizers
HUB = "hub:"
TOKENIZER_CONFIG = "tokenizer_config.json"  # transformers' settings, beside a `tokenizer.json`
# The entries that name the end-of-text token, in the files beside a `tokenizer.json`: a model of
# chats may generate until one of several.
END_OF_TEXT_ENTRIES = {
    TOKENIZER_CONFIG: "eos_token",
    "special_tokens_map.json": "eos_token",
    "generation_config.json": "eos_token_id",
}
BPE_FILES = ("vocab.bpe", "encoder.json")
END_OF_TEXT = "<|endoftext|>"
# The two files as published with GPT-2; the hub has them under other names.
_GPT2_URL = "https://huggingface.co/openai-community/gpt2/resolve/main"
_GPT2_HUB_NAMES = ("merges.txt", "vocab.json")
_GPT2_DIGESTS = (
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
_NAME_IT = (
    "Name the token that separates documents: with --end-of-text, data.document_id of a run, or "
    f'{{"eos_token": "<name>"}} in a {TOKENIZER_CONFIG} beside the file.'
)
# Common names of the end-of-text token, most frequent first.
END_OF_TEXT_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")

# Characters of all scripts, and every byte of UTF-8: a vocabulary lacks one, or becomes no unknown.
_CHANGED = "changed by its normalization"
_CODES = (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x800))
_MANY_CHARACTERS = " ".join(map(chr, _CODES))


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """Selects a tokenizer; small, so that it can be sent to other processes."""

    # `gpt2`, `bytes`, the path of a `tokenizers` file (`.json`), or `hub:` and the name of a model
    # of the Hugging Face hub that has such a file
    name: str
    bpe_folder: Path | None = None  # of `vocab.bpe` and `encoder.json`, for `gpt2`
    end_of_text: str | None = None  # token that separates documents, if not one of the common ones

    @classmethod
    def of_data(cls, data: DataConfig) -> Self:
        """Return the tokenizer of a run's data section."""
        folder = None if data.bpe_folder is None else Path(data.bpe_folder)
        return cls(data.tokenizer, bpe_folder=folder)


def open_tokenizer(choice: TokenizerChoice) -> "Tokenizer":
    """Build a tokenizer; raise `ShardError` if its files are missing or damaged."""
    if choice.name == BYTES:
        return BytesTokenizer()
    if choice.name == GPT2:
        return GptTokenizer(bpe_folder(choice))
    return FileTokenizer(tokenizers_file(choice), end_of_text=choice.end_of_text)


def described(choice: TokenizerChoice) -> tuple[str, int]:
    """Return a tokenizer's name in manifests (of a file, a digest), and its largest id + 1.

    Raises as `open_tokenizer`, but needs no end-of-text token.
    """
    if choice.name == BYTES or (choice.name == GPT2 and choice.bpe_folder is None):
        return choice.name, VOCABULARIES[choice.name]
    if choice.name == GPT2:
        tokenizer = GptTokenizer(bpe_folder(choice))
        return tokenizer.name, tokenizer.vocabulary
    file = tokenizers_file(choice)
    content = _content(file)
    return _file_identity(content), _size(load_content(content, where=file))


def tokenizers_file(choice: TokenizerChoice) -> Path:
    """Return a tokenizer's `tokenizers` file, downloaded from the hub on first use; or raise."""
    name = choice.name
    if not name.startswith(HUB):
        file = local_path(name)
        if file.is_file():
            return file
        raise ShardError(
            f"tokenizer {name!r}: there is no such file, and it is neither {GPT2} nor {BYTES}. "
            f"Use one of the two, the path of a tokenizer.json, or {HUB}MODEL."
        )
    import huggingface_hub
    from huggingface_hub import errors

    model, wanted = name.removeprefix(HUB), "tokenizer.json"
    fetch = functools.partial(huggingface_hub.hf_hub_download, model)
    try:
        try:
            file = Path(fetch(wanted, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            file = Path(fetch(wanted))
        at, cache = {"revision": file.parent.name}, file.parents[3]  # of the same commit
        for wanted in END_OF_TEXT_ENTRIES:
            if huggingface_hub.try_to_load_from_cache(model, wanted, cache_dir=cache, **at) is None:
                with contextlib.suppress(errors.RemoteEntryNotFoundError):  # which is remembered
                    fetch(wanted, **at)
        return file
    except (OSError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ShardError(
            f"tokenizer {name!r}: {wanted} cannot be downloaded from the hub ({reason}). "
            "Check the name and the connection, or copy the file here and use its path."
        ) from None


def settings_file(choice: TokenizerChoice) -> Path | None:
    """Return the file beside which a tokenizer's settings are; None for one that is built in."""
    return None if choice.name in VOCABULARIES else tokenizers_file(choice)


# The three tokenizers have in common:
# - `name`: in manifests
# - `vocabulary`: largest id + 1
# - `end_of_text`, `end_of_text_id`: the token that precedes each document; text never encodes to it
# - `cuts_at_spaces`: whether text may be encoded in pieces, split before a single space between two
#   characters that are not white space, with the same ids
# - `encode`: returns the ids of a text, `(tokens,)` of an unsigned type, without special tokens


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255."""

    name = BYTES
    vocabulary = BYTES_VOCABULARY
    end_of_text = END_OF_TEXT
    end_of_text_id = BYTES_END_OF_TEXT
    cuts_at_spaces = True

    def encode(self, text: str) -> Ids:
        """Return the text's UTF-8 bytes."""
        return np.frombuffer(text.encode(), np.uint8)


class GptTokenizer:
    """tiktoken's GPT-2 encoding, built from local `vocab.bpe` and `encoder.json`.

    Files other than GPT-2's make another encoding, whose name contains their digest.
    """

    cuts_at_spaces = True
    end_of_text = END_OF_TEXT

    def __init__(self, folder: Path) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        contents = [_content(folder / name) for name in BPE_FILES]
        digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
        self.name = GPT2 if digests == _GPT2_DIGESTS else f"bpe-{digests[0][:8]}"
        try:
            # tiktoken's own reader caches a copy of each file in the temporary folder.
            byte_of = bytes_by_character()
            ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
            for line in contents[0].decode().splitlines()[1:]:
                first, second = line.split()
                ranks.setdefault(bytes(byte_of[letter] for letter in first + second), len(ranks))
            encoder = parse_json_object(contents[1])
            self.end_of_text_id = int(encoder[END_OF_TEXT])
            if not len(encoder) - 1 == self.end_of_text_id == len(ranks):
                raise ValueError(
                    f"encoder.json has {len(encoder):,} tokens, vocab.bpe yields {len(ranks):,} "
                    f"and {END_OF_TEXT}"
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{folder}: {' and '.join(BPE_FILES)} are not those of a GPT-2 encoding "
                f"({type(error).__name__}: {error}). {_download_advice(folder)}"
            ) from None
        self.vocabulary = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text_id},
        )

    def encode(self, text: str) -> Ids:
        """Return the ids; `<|endoftext|>` in the text is encoded as ordinary text."""
        # 10 % faster than encode_ordinary, which builds a list of Python integers.
        return self._encoding.encode_to_numpy(text, disallowed_special=())


class FileTokenizer:
    """A tokenizer saved by the `tokenizers` library, as transformers uses it."""

    # Normalizers may change the start of a text, and words need not end at spaces.
    cuts_at_spaces = False

    def __init__(self, file: Path, *, end_of_text: str | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism is by processes
        self._file = file
        content = _content(file)
        self.name = _file_identity(content)
        tokenizer = load_content(content, where=file)
        self.vocabulary = _size(tokenizer)
        token = found_end_of_text(tokenizer, file) if end_of_text is None else end_of_text
        if token is None or tokenizer.token_to_id(token) is None:
            listed = ", ".join(END_OF_TEXT_TOKENS) if token is None else token
            raise ShardError(f"{file}: it has no end-of-text token ({listed:.80}). {_NAME_IT}")
        self.end_of_text, self.end_of_text_id = token, int(tokenizer.token_to_id(token))
        self._tokenizer = _with_unwritable(token, tokenizer, where=file)
        self._tokenizer.encode_special_tokens = True
        ids = list(tokenizer.get_vocab(with_added_tokens=True).values())
        spelt = f"{token} {token}a{token}{token}\n{token} {_MANY_CHARACTERS}"
        if ids.count(self.end_of_text_id) > 1 or self.end_of_text_id in self.encode(spelt):
            raise ShardError(
                f"{file}: other tokens, or characters that it does not know become its end-of-text "
                f"token {token!r}, so they would end documents. {_NAME_IT}"
            )

    def encode(self, text: str) -> Ids:
        """Return the ids; special tokens are neither added nor recognized in the text."""
        with tokenizer_errors(self._file):
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoded.ids, np.uint32)

    def round_trip(self, texts: Sequence[str]) -> tuple[float, tuple[str, ...]]:
        """Return which share of the texts' characters is lost, and what a person should know of it.

        Lost are characters that become the unknown token or vanish. Normalizers change others on
        purpose; these are only named.
        """
        inner, lost, changed = self._tokenizer, Counter[str](), Counter[str]()
        counts, normalizer, split = Counter("".join(texts)), inner.normalizer, inner.pre_tokenizer
        with tokenizer_errors(self._file):
            added, unknown = inner.get_added_tokens_decoder().keys(), unknown_id(inner)
            encodings = inner.encode_batch(list(texts), add_special_tokens=False)
            for text, encoded in zip(texts, encodings, strict=True):
                for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
                    lost.update(text[start:end] if number == unknown else ())
            for letter in counts:
                encoded = inner.encode(letter, add_special_tokens=False)
                normal = normalizer.normalize_str(letter) if normalizer else letter
                parts = split.pre_tokenize_str(normal) if split else [(normal, None)]
                back = inner.decode(encoded.ids) if inner.decoder else normal
                # Byte pairs without an unknown token drop the characters that they lack.
                is_short = sum(map(len, encoded.tokens)) < sum(len(part) for part, _ in parts)
                is_text = letter.isprintable() and not unicodedata.combining(letter)
                if unknown in encoded.ids:
                    continue
                is_gone = is_text and letter != " " and not encoded.ids
                if is_gone or (is_short and added.isdisjoint(encoded.ids)):
                    lost[letter] += counts[letter]
                elif back.strip(" \u2581") != letter.strip(" \u2581"):
                    changed[letter] += counts[letter]
        notes, total = [], max(counts.total(), 1)
        for counted, what in ((lost, "lost: they vanish or become unknown"), (changed, _CHANGED)):
            some = ", ".join(f"{letter!r} ({n:,} times)" for letter, n in counted.most_common(5))
            if counted:
                share = f"{counted.total() / total:.2%} of the characters of a sample"
                notes.append(f"{share} are {what}, such as {some}")
        return lost.total() / total, tuple(notes)


Tokenizer = BytesTokenizer | GptTokenizer | FileTokenizer


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id that a `tokenizers` tokenizer gives to text that it does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    number: int | None = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    return number


def found_end_of_text(tokenizer: Any, file: Path | None) -> str | None:
    """Return the token that ends a document: that of the settings beside `file`, or the common one.

    Of the common ones that a `tokenizers` tokenizer has, special tokens come first: `</s>` may be a
    tag of HTML. None: it has none. Raises `ShardError` if two candidates stand.
    """
    ids, tokens = tokenizer.get_vocab(with_added_tokens=True), list[str]()
    for name, key in END_OF_TEXT_ENTRIES.items() if file else ():
        if tokens or not (where := Path(file or "").with_name(name)).is_file():
            continue
        try:
            entry = parse_json_object(_content(where)).get(key)
        except MalformedError as error:
            raise ShardError(f"{where}: it is not a JSON object ({error}). {_NAME_IT}") from None
        # A token may come with its settings.
        entry = entry.get("content") if isinstance(entry, dict) else entry
        for named_end in entry if isinstance(entry, list) else [entry]:
            named = [token for token, number in ids.items() if named_end in (token, number)]
            if named_end is not None and not named:
                raise ShardError(
                    f"{where}: the tokenizer has no token {named_end!r:.80}. {_NAME_IT}"
                )
            tokens += named
    if not tokens:
        added = tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        tokens = [token for token in END_OF_TEXT_TOKENS if token in ids]
        tokens = [token for token in tokens if token in special] or tokens
    if len(set(tokens)) > 1:
        listed = ", ".join(tokens)
        raise ShardError(
            f"{file or 'the tokenizer'}: several tokens may end a text ({listed}). {_NAME_IT}"
        )
    return tokens[0] if tokens else None


def _with_unwritable(token: str, tokenizer: Any, *, where: object) -> Any:
    """Return the tokenizer with the same ids, but without a text that encodes to `token`.

    Text encodes to a token that is not marked as special, or that is a word or a piece of the
    model's own vocabulary. That token gets a random name, which occurs in no text.
    """
    added = tokenizer.get_added_tokens_decoder().get(tokenizer.token_to_id(token))
    if added and added.special and token not in tokenizer.get_vocab(with_added_tokens=False):
        return tokenizer
    content = json.loads(tokenizer.to_str())  # as the library writes it, so it is no foreign text
    model, name = content["model"], f"{token}{secrets.token_hex(16)}"
    for row in content["added_tokens"]:
        if row["content"] == token:
            row |= {"content": name, "special": True}
    if isinstance(model["vocab"], list):  # of Unigram: pieces with their scores
        model["vocab"] = [
            [name if word == token else word, score] for word, score in model["vocab"]
        ]
    else:
        model["vocab"] = {name if word == token else word: n for word, n in model["vocab"].items()}
    if model.get("merges"):
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            (a, b) for a, b in model["merges"] if token not in (a, b, a + b[prefix:])
        ]
    if model.get("unk_token") == token:
        model["unk_token"] = name
    return load_content(json.dumps(content).encode(), where=where)


def bytes_by_character() -> dict[str, int]:
    """Return the byte that each character stands for in files of byte pairs, in GPT-2's order.

    Bytes that are not printable are represented by characters from 256 on (openai/gpt-2,
    src/encoder.py, bytes_to_unicode).
    """
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {chr(byte): byte for byte in plain}
    return characters | {chr(256 + number): byte for number, byte in enumerate(others)}


def bpe_folder(choice: TokenizerChoice) -> Path:
    """Return the folder of GPT-2's two files; raise `ShardError` if they are missing."""
    folder = choice.bpe_folder
    if folder is None or not all((folder / name).is_file() for name in BPE_FILES):
        where = "no folder was given" if folder is None else f"{folder} does not have them"
        raise ShardError(
            f"tokenizer {GPT2}: it is built from {' and '.join(BPE_FILES)}, but {where}. "
            f"{_download_advice(folder or Path('bpe'))}"
        )
    return folder


def load_content(content: bytes, *, where: object) -> Any:
    """Load the content of a `tokenizers` file; raise `ShardError` if it is not one.

    A file may contain the truncation, padding and dropout of its last use; they are turned off.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    # A panic prints by itself, before it becomes an error: then without 8 kB of addresses.
    os.environ["RUST_BACKTRACE"] = "0"
    with tokenizer_errors(where):
        tokenizer = LibraryTokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    turn_off_sampling(tokenizer)
    return tokenizer


def turn_off_sampling(tokenizer: Any) -> None:
    """Make a `tokenizers` tokenizer encode equal texts alike: no dropout of BPE or of Unigram."""
    for name in {"dropout", "alpha", "nbest_size"} & set(dir(tokenizer.model)):
        setattr(tokenizer.model, name, None)


def _download_advice(folder: Path) -> str:
    files = " ".join(
        f"-o {shlex.quote(str(folder / name))} {_GPT2_URL}/{hub_name}"
        for name, hub_name in zip(BPE_FILES, _GPT2_HUB_NAMES, strict=True)
    )
    return (
        f"Download the two files that were published with GPT-2:\ncurl -L --create-dirs {files}\n"
        f"and give their folder: --bpe-folder {shlex.quote(str(folder))}, or data.bpe_folder in a "
        "run file."
    )


def _content(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        raise ShardError(f"{file}: {error.strerror}. Check its permissions.") from None


def _file_identity(content: bytes) -> str:
    return f"tokenizer-{hashlib.sha256(content).hexdigest()[:8]}"


def _size(tokenizer: Any) -> int:
    """Return the largest id + 1; ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
