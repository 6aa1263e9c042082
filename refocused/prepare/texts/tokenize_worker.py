"""Tokenize one task in a worker process: spans of text to one file of ids per split."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from multiprocessing import parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

import numpy as np

from refocused.bucket.bucket import crc32c_of, extended_crc32c
from refocused.data.formats.token_layout import element_type
from refocused.prepare.texts.text_documents import TextReading, pieces
from refocused.prepare.texts.text_inputs import Span
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.strict_json import MalformedError, parse_json_object
from refocused.tokenizers.encoders import Ids, TokenizerChoice, open_tokenizer

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
RESULT = "json"
_HASHED_CHARACTERS = 4096
_BUFFERED_IDS = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Settings of a tokenization; the same request gives the same bytes."""

    tokenizer: TokenizerChoice
    shard_tokens: int  # of a full shard; the last of each split is shorter
    validation_ratio: float  # share of the documents for validation, 0 to 1
    name: str = "tokens"  # prefix of the shards' names
    reading: TextReading = dataclasses.field(default_factory=TextReading)
    max_loss: float = 0.01  # share of a sample's characters that the tokenizer may lose
    best_fit: int | None = None  # sequence length to pack documents for; None: a plain stream


@dataclasses.dataclass(frozen=True, slots=True)
class SplitFile:
    """Number and checksum of a task's ids of one split, raw and little-endian."""

    tokens: int
    crc32c: int
    empty: int = 0  # texts of the task that are null or empty; they count for training


TaskResult = dict[Split, SplitFile]  # of a finished task


def is_validation(text: str, *, ratio: float) -> bool:
    """Whether a document is for validation, by a hash of its beginning.

    Equal documents are always in the same split.
    """
    start = text[:_HASHED_CHARACTERS].encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(start, digest_size=8).digest()
    return int.from_bytes(digest, "big") < ratio * 2.0**64


def task_file(folder: Path, number: int, kind: str) -> Path:
    """Return the file of a task's ids of a split, or `RESULT`, which is written last."""
    return folder / f"task_{number:06d}.{kind}"


def task_files(folder: Path, number: int) -> list[Path]:
    """Return the paths of a task's files; that of its result is last."""
    return [task_file(folder, number, kind) for kind in (*SPLITS, RESULT)]


def read_result(folder: Path, number: int, needed: Iterable[Split] = SPLITS) -> TaskResult | None:
    """Return the result of a finished task if its files of the `needed` splits are intact."""
    try:
        content = parse_json_object(task_file(folder, number, RESULT).read_bytes())
        result = {split: SplitFile(**content[split]) for split in SPLITS}
    except (FileNotFoundError, MalformedError, LookupError, TypeError):
        return None
    for split in needed:
        path = task_file(folder, number, split)
        if not path.exists() or crc32c_of(path) != result[split].crc32c:
            return None
    return result


def remove_ids(folder: Path, split: Split, numbers: Iterable[int]) -> None:
    """Remove the ids of tasks that are in finished shards; their results are small, and stay."""
    for number in numbers:
        task_file(folder, number, split).unlink(missing_ok=True)


class _SplitWriter:
    """Writes the ids of a split in blocks, under a temporary name of this process."""

    def __init__(self, target: Path, dtype: np.dtype[Any]) -> None:
        self._target = target
        self._path = target.with_name(f"{target.name}.{os.urandom(8).hex()}.part")
        self._file = self._path.open("wb")
        self._dtype = dtype
        self._waiting: list[Ids] = []
        self._waiting_ids = self._tokens = self._crc32c = 0

    def add(self, ids: Ids) -> None:
        self._waiting.append(ids)
        self._waiting_ids += len(ids)
        if self._waiting_ids >= _BUFFERED_IDS:
            self._flush()

    def publish(self) -> SplitFile:
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.replace(self._target)
        return SplitFile(self._tokens, self._crc32c)

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._waiting:
            return
        content = np.concatenate(self._waiting, dtype=self._dtype, casting="same_kind").tobytes()
        self._file.write(content)
        self._crc32c = extended_crc32c(self._crc32c, content)
        self._tokens += self._waiting_ids
        self._waiting, self._waiting_ids = [], 0


class Worker:
    """State of a worker process between tasks."""

    def __init__(
        self, request: TokenizeRequest, folder: Path, stopping: Event | None = None
    ) -> None:
        """Open the tokenizer; the main process sets `stopping` to end tasks early."""
        self._request = request
        self._folder = folder
        self._stopping = stopping
        self._tokenizer = open_tokenizer(request.tokenizer)
        cuts = self._tokenizer.cuts_at_spaces
        self._reading = dataclasses.replace(request.reading, cuts_at_spaces=cuts)

    def run(self, number: int, spans: Iterable[Span]) -> TaskResult:
        """Tokenize spans; raise `ShardError` if a file or the disk cannot be used."""
        folder, tokenizer = self._folder, self._tokenizer
        dtype, ratio = element_type(tokenizer.vocabulary), self._request.validation_ratio
        begin, counts = np.array([tokenizer.end_of_text_id], dtype), Counter[str]()
        try:
            with (
                contextlib.closing(
                    _SplitWriter(task_file(folder, number, "train"), dtype)
                ) as train,
                contextlib.closing(_SplitWriter(task_file(folder, number, "val"), dtype)) as val,
            ):
                writer = train
                for span in spans:
                    for piece in pieces(span, self._reading, counts):
                        if piece.begins:
                            if self._stopping is not None and self._stopping.is_set():
                                raise RuntimeError("the main process is stopping")
                            writer = val if is_validation(piece.text, ratio=ratio) else train
                            writer.add(begin)
                        writer.add(tokenizer.encode(piece.text))
                trained = dataclasses.replace(train.publish(), empty=counts["empty"])
                result: TaskResult = {"train": trained, "val": val.publish()}
            text = json.dumps({split: dataclasses.asdict(made) for split, made in result.items()})
            replace_file(task_file(folder, number, RESULT), text.encode(), concurrent=True)
            return result
        except OSError as error:
            raise ShardError(
                f"{folder}: {error.strerror or error}, while writing task {number}. Free some "
                "space, and run the same command again: it continues from here."
            ) from None


def start_worker(request: TokenizeRequest, folder: Path, stopping: Event) -> None:
    """Prepare a process of the pool: it ends with its parent, which handles Ctrl+C."""
    global _worker

    def end_with_parent() -> None:
        # A pool's processes hold both ends of its queues, so they would wait forever.
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker = Worker(request, folder, stopping)


def run_task(number: int, spans: tuple[Span, ...]) -> TaskResult:
    """Run a task in a process that `start_worker` prepared."""
    assert _worker is not None
    return _worker.run(number, spans)


_worker: Worker | None = None  # of this process
