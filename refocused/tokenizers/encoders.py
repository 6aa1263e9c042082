"""From text to token ids: GPT-2's byte pairs, any file of the `tokenizers` library, or bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from refocused.config.data import DataConfig
from refocused.system.errors import ShardError
from refocused.system.strict_json import parse_json_object

Ids = npt.NDArray[Any]

BYTES = "bytes"
BYTES_END_OF_TEXT = 256
BYTES_VOCABULARY = 257
GPT2 = "gpt2"
VOCABULARIES = {BYTES: BYTES_VOCABULARY, GPT2: 50_257}  # of the tokenizers known by name
HUB = "hub:"
BPE_FILES = ("vocab.bpe", "encoder.json")
END_OF_TEXT = "<|endoftext|>"
# The two files as they were published with GPT-2, which the hub has under other names.
_GPT2_URL = "https://huggingface.co/openai-community/gpt2/resolve/main"
_GPT2_NAMES_THERE = ("merges.txt", "vocab.json")
_GPT2_DIGESTS = (
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)
# What the `tokenizers` files of the field call it, the most usual first.
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """Turns text into ids."""

    name: str  # in manifests
    vocabulary: int  # one more than the largest id
    end_of_text_id: int  # put before each document; text never encodes to it
    # Whether text that is cut before a lone space, between two characters that are no white space,
    # encodes to the same ids as uncut text.
    cuts_at_spaces: bool

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, `(tokens,)` of an unsigned type; nothing is put around it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """Which tokenizer is meant; small, so that it can be sent to other processes."""

    # `gpt2`, `bytes`, the path of a file of the `tokenizers` library (`.json`), or `hub:` and the
    # name of a model of the Hugging Face hub that has such a file
    name: str
    bpe_folder: Path | None = None  # folder of `vocab.bpe` and `encoder.json`, for `gpt2`
    # token that separates documents, for a file that has several or an unusual one
    end_of_text: str | None = None

    @classmethod
    def of_data(cls, data: DataConfig) -> TokenizerChoice:
        """Return the tokenizer that a run's data section names."""
        folder = None if data.bpe_folder is None else Path(data.bpe_folder).expanduser()
        return cls(data.tokenizer, bpe_folder=folder)

    @property
    def is_known_by_name(self) -> bool:
        """Whether its name alone says what it is: bytes, and GPT-2's own without files."""
        return self.name == BYTES or (self.name == GPT2 and self.bpe_folder is None)


def open_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build a tokenizer; only one of the hub is fetched, and only once.

    Raises `ShardError` if its files are missing or damaged, or it is none of the known kinds.
    """
    if choice.name == BYTES:
        return BytesTokenizer()
    if choice.name == GPT2:
        return GptTokenizer(bpe_folder(choice))
    return FileTokenizer(tokenizers_file(choice), end_of_text=choice.end_of_text)


def vocabulary_of(choice: TokenizerChoice) -> int:
    """Return one more than a tokenizer's largest id; raises as `open_tokenizer`."""
    if choice.is_known_by_name:
        return VOCABULARIES[choice.name]
    if choice.name == GPT2:
        return GptTokenizer(bpe_folder(choice)).vocabulary
    file = tokenizers_file(choice)
    return _size(load_content(_content(file), where=file))


def identity_of(choice: TokenizerChoice) -> str:
    """Return the name under which the manifest of its data knows a tokenizer.

    A file's is that of its content, so that it may lie anywhere. Raises as `open_tokenizer`.
    """
    if choice.is_known_by_name:
        return choice.name
    if choice.name == GPT2:
        return GptTokenizer(bpe_folder(choice)).name
    return _file_identity(_content(tokenizers_file(choice)))


def tokenizers_file(choice: TokenizerChoice) -> Path:
    """Return the file of the `tokenizers` library, from the hub if need be; or raise."""
    name = choice.name
    if not name.startswith(HUB):
        file = Path(name).expanduser()
        if file.is_file():
            return file
        raise ShardError(
            f"tokenizer {name!r}: there is no such file, and it is neither {GPT2} nor {BYTES}. "
            f"Name one of the two, a tokenizer.json of the tokenizers library, or {HUB}MODEL."
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = functools.partial(
        huggingface_hub.hf_hub_download, name.removeprefix(HUB), "tokenizer.json"
    )
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(fetch(local_files_only=True))
        return Path(fetch())
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ShardError(
            f"tokenizer {name!r}: the hub gave no tokenizer.json ({reason}). Check the name and "
            "the connection, or put the file here and name its path."
        ) from None


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255."""

    name = BYTES
    vocabulary = BYTES_VOCABULARY
    end_of_text_id = BYTES_END_OF_TEXT
    cuts_at_spaces = True

    def encode(self, text: str) -> Ids:
        """Return the text's UTF-8 bytes."""
        return np.frombuffer(text.encode(), np.uint8)


class GptTokenizer:
    """tiktoken's GPT-2 encoding out of local `vocab.bpe` and `encoder.json`.

    Other files of that form make another encoding of the same kind; its name holds their digest,
    so that it is never taken for GPT-2's.
    """

    cuts_at_spaces = True

    def __init__(self, folder: Path) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        contents = [_content(folder / name) for name in BPE_FILES]
        digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
        self.name = GPT2 if digests == _GPT2_DIGESTS else f"bpe-{digests[0][:8]}"
        try:
            # tiktoken's own reader keeps a copy of each file in the temporary folder.
            spelt = spelt_bytes()
            ranks = {bytes([byte]): rank for rank, byte in enumerate(spelt.values())}
            for line in contents[0].decode().splitlines()[1:]:
                first, second = line.split()
                ranks.setdefault(bytes(spelt[letter] for letter in first + second), len(ranks))
            encoder = parse_json_object(contents[1])
            self.end_of_text_id = int(encoder[END_OF_TEXT])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"{folder}: {' and '.join(BPE_FILES)} are not those of a GPT-2 encoding "
                f"({type(error).__name__}: {error}). {_how_to_get_files(folder)}"
            ) from None
        if len(encoder) != len(ranks) + 1 or self.end_of_text_id != len(ranks):
            raise ShardError(
                f"{folder}: encoder.json has {len(encoder):,} tokens and vocab.bpe makes "
                f"{len(ranks):,} and {END_OF_TEXT}; they are not of one encoding. "
                f"{_how_to_get_files(folder)}"
            )
        self.vocabulary = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text_id},
        )

    def encode(self, text: str) -> Ids:
        """Return the ids; the end-of-text token's own spelling is text like any other."""
        # 10 % faster than encode_ordinary, which makes a list of Python integers.
        return self._encoding.encode_to_numpy(text, disallowed_special=())


class FileTokenizer:
    """A tokenizer saved by the `tokenizers` library, which transformers use too."""

    # Normalisers may change the start of a text, and words need not end at spaces.
    cuts_at_spaces = False

    def __init__(self, file: Path, *, end_of_text: str | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallel part
        self._file = file
        content = _content(file)
        self.name = _file_identity(content)
        self._tokenizer = load_content(content, where=file)
        # A file may carry the truncation and the special-token rules of its last use.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocabulary = _size(self._tokenizer)
        wanted = USUAL_ENDS if end_of_text is None else (end_of_text,)
        found = map(self._tokenizer.token_to_id, wanted)
        end_of_text_id = next((one for one in found if one is not None), None)
        if end_of_text_id is None:
            problem = f"it has none of the usual end-of-text tokens ({', '.join(USUAL_ENDS)})"
            if end_of_text is not None:
                problem = f"it has no token {end_of_text!r}"
            raise ShardError(
                f"{file}: {problem}. Name the token that separates documents by --end-of-text."
            )
        self.end_of_text_id: int = end_of_text_id

    def encode(self, text: str) -> Ids:
        """Return the ids; special tokens are neither added nor recognised in the text."""
        with tokenizer_faults(self._file):
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoded.ids, np.uint32)


def spelt_bytes() -> dict[str, int]:
    """Return the byte that each character means in files of byte pairs, in GPT-2's order.

    Bytes that are no printable characters are spelt by characters from 256 on (openai/gpt-2,
    src/encoder.py, bytes_to_unicode).
    """
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in plain]
    spelt = {chr(byte): byte for byte in plain}
    return spelt | {chr(256 + number): byte for number, byte in enumerate(others)}


def bpe_folder(choice: TokenizerChoice) -> Path:
    """Return the folder of GPT-2's two files; raise `ShardError` if they are not there."""
    folder = choice.bpe_folder
    if folder is None or not all((folder / name).is_file() for name in BPE_FILES):
        where = "no folder was named" if folder is None else f"{folder} does not have them"
        raise ShardError(
            f"tokenizer {GPT2}: it is built from {' and '.join(BPE_FILES)}, and {where}. "
            f"{_how_to_get_files(folder or Path('bpe'))}"
        )
    return folder


def load_content(content: bytes, *, where: object) -> Any:
    """Return the tokenizer in a `tokenizers` file's content; raise `ShardError` if it is none."""
    from tokenizers import Tokenizer as LibraryTokenizer

    with tokenizer_faults(where):
        return LibraryTokenizer.from_str(content.decode())


@contextlib.contextmanager
def tokenizer_faults(where: object) -> Iterator[None]:
    """Turn what the library raises into a `ShardError`, panics of its Rust code included."""
    try:
        yield
    except BaseException as error:  # a panic is one, of a class that cannot be imported
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ShardError(
            f"{where}: this is no file of the tokenizers library, or one that it cannot use "
            f"({' '.join(str(error).split()):.200}). Name one that Tokenizer.save wrote."
        ) from None


def _how_to_get_files(folder: Path) -> str:
    files = " ".join(
        f"-o {shlex.quote(str(folder / name))} {_GPT2_URL}/{there}"
        for name, there in zip(BPE_FILES, _GPT2_NAMES_THERE, strict=True)
    )
    return (
        f"Download the two files that were published with GPT-2:\ncurl -L --create-dirs {files}\n"
        f"and name their folder: --bpe-folder {shlex.quote(str(folder))}, or data.bpe_folder in a "
        "run file."
    )


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ShardError(f"{file}: {error.strerror}. Check its permissions.") from None


def _file_identity(content: bytes) -> str:
    return f"tokenizer-{hashlib.sha256(content).hexdigest()[:8]}"


def _size(tokenizer: Any) -> int:
    """Return one more than the largest id; ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
