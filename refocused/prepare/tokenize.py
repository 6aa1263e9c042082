"""Text to shards: tasks over a pool of processes, packed in order, kept through any kill."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.data.formats.token_layout import element_type
from refocused.data.manifest.shard_manifest import Manifest, write_manifest
from refocused.prepare.packing_state import (
    Journal,
    check_recipe,
    finished_manifest,
    keep_whole_shards,
    manifest_of,
    remove_leftovers,
)
from refocused.prepare.shard_packer import ShardPacker, is_open_shard_whole
from refocused.prepare.text_documents import BadText, Reading
from refocused.prepare.text_inputs import Task, TextFile, plan_tasks
from refocused.prepare.tokenize_worker import (
    SPLITS,
    Split,
    TaskResult,
    TaskSettings,
    read_result,
    remove_result,
    run_task,
    split_path,
    start_worker,
)
from refocused.system.errors import ShardError
from refocused.system.locks import exclusive_folder
from refocused.tokenizers.encoders import Tokenizer, TokenizerChoice, open_tokenizer

READ_IDS = 1 << 20

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What is wanted; the same request over the same files gives the same bytes.

    Attributes:
        tokenizer: Which one.
        shard_tokens: Ids of a full shard; the last of each split is shorter.
        validation_ratio: Share of the documents for validation, 0 to 1.
        name: Start of the shards' names.
        field: Where `.jsonl` and `.parquet` keep the text.
        separator: Line between the documents of a `.txt`; None: each file is one document.
        bad_text: What to do with text that is no Unicode.
    """

    tokenizer: TokenizerChoice
    shard_tokens: int
    validation_ratio: float
    name: str = "tokens"
    field: str = "text"
    separator: str | None = None
    bad_text: BadText = "refuse"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeProgress:
    """How far it is.

    Attributes:
        done_bytes: Of text, roughly; what earlier starts did is in it.
        total_bytes: Of text, roughly.
        tokens: Ids packed by this start.
        shards: Shards finished, by all starts.
    """

    done_bytes: int
    total_bytes: int
    tokens: int
    shards: int


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeResult:
    """What there is now.

    Attributes:
        manifest: All shards.
        kept_shards: Shards that earlier starts had finished.
        new_tokens: Ids that this start packed.
    """

    manifest: Manifest
    kept_shards: int
    new_tokens: int


def tokenize(
    inputs: Sequence[TextFile],
    bucket: Bucket,
    *,
    work: Path,
    request: TokenizeRequest,
    workers: int,
    progress: Callable[[TokenizeProgress], None],
) -> TokenizeResult:
    """Tokenise files into shards of one size and a manifest, which is written last.

    The end-of-text id stands before each document. Killed at any moment, the same call goes on:
    finished shards are verified and kept, and finished tasks are not done again. The bytes do not
    depend on the number of workers.

    Args:
        inputs: The files, in order.
        bucket: Where shards go; empty, or of an earlier call with the same request.
        work: Local folder for what is unfinished; removed at the end.
        request: What is wanted.
        workers: Processes.
        progress: Called in this thread at the start and after each task.

    Raises:
        ShardError: A file cannot be used, the bucket holds something else, another process is at
            it, or a worker died.
        BucketError: The bucket cannot be read or written, or the disk is full.
    """
    tokenizer = open_tokenizer(request.tokenizer)
    with exclusive_folder(work):
        remove_leftovers(bucket, work)
        check_recipe(bucket, _recipe(inputs, request, tokenizer))
        finished = finished_manifest(bucket)
        if finished is not None:
            result = TokenizeResult(finished, len(finished.shards), 0)
        else:
            with Journal(work / "journal.jsonl") as journal:
                made = _Making(
                    bucket, work, request, tokenizer, journal, plan_tasks(inputs), progress
                )
                result = made.run(workers)
        shutil.rmtree(work)
    return result


@dataclasses.dataclass
class _Making:
    """One start of tokenising."""

    bucket: Bucket
    work: Path
    request: TokenizeRequest
    tokenizer: Tokenizer
    journal: Journal
    tasks: Sequence[Task]
    progress: Callable[[TokenizeProgress], None]

    def run(self, workers: int) -> TokenizeResult:
        kept = sum(self._kept_shards(split) for split in SPLITS)
        packers = {split: self._packer(split) for split in SPLITS}
        first = min(packer.cursor.source for packer in packers.values())
        for number in range(first):
            remove_result(self.work, number)
        sizes = list(itertools.accumulate(task.bytes for task in self.tasks))
        new_tokens = 0
        self.progress(TokenizeProgress([0, *sizes][first], sizes[-1], 0, kept))
        for number, result in self._results(first, workers):
            new_tokens += sum(self._pack(packers[s], number, s, result) for s in SPLITS)
            remove_result(self.work, number)
            shards = sum(packer.cursor.shard for packer in packers.values())
            self.progress(TokenizeProgress(sizes[number], sizes[-1], new_tokens, shards))
        for packer in packers.values():
            packer.end_shard()
            packer.close()
        rows = [row for split in SPLITS for row in self.journal.rows(split)]
        if not rows:
            raise ShardError(
                "There is no text in the files: every document is empty. Name other files."
            )
        manifest = manifest_of(
            rows,
            dtype=self._dtype.name,
            tokenizer=self.tokenizer.name,
            vocabulary=self.tokenizer.vocabulary,
        )
        write_manifest(self.bucket, manifest)
        return TokenizeResult(manifest, kept, new_tokens)

    @property
    def _dtype(self) -> np.dtype[np.generic]:
        return element_type(self.tokenizer.vocabulary)

    def _name(self, split: Split) -> str:
        return f"{self.request.name}_{split}"

    def _kept_shards(self, split: Split) -> int:
        kept = keep_whole_shards(self.journal, split, self.bucket)
        cursor = self.journal.cursor(split)
        if not is_open_shard_whole(self.work, self._name(split), cursor, dtype=self._dtype):
            _log.warning("%s: the unfinished shard is damaged, and made again", self._name(split))
            self.journal.rewind(split, shards=kept)
        return kept

    def _packer(self, split: Split) -> ShardPacker:
        return ShardPacker(
            self.bucket,
            folder=self.work,
            name=self._name(split),
            shard_name=lambda number: f"{self._name(split)}_{number:06d}.npy",
            shard_tokens=self.request.shard_tokens,
            dtype=self._dtype,
            begin_id=self.tokenizer.end_of_text_id,
            cursor=self.journal.cursor(split),
            note=lambda cursor, row: self.journal.note(split, cursor, row),
        )

    def _results(self, first: int, workers: int) -> Iterator[tuple[int, TaskResult]]:
        """Yield the results of tasks in order; a few more than the workers are under way."""
        numbers = range(first, len(self.tasks))
        ahead = 2 * workers
        with _pool(self._settings(), workers) as pool:
            waiting = [self._begun(pool, number) for number in numbers[:ahead]]
            for number in numbers:
                if number + ahead < len(self.tasks):
                    waiting.append(self._begun(pool, number + ahead))
                yield number, _awaited(waiting.pop(0))

    def _begun(self, pool: ProcessPoolExecutor, number: int) -> Future[TaskResult] | TaskResult:
        known = read_result(self.work, number)
        return known or pool.submit(run_task, number, self.tasks[number].spans)

    def _settings(self) -> TaskSettings:
        return TaskSettings(
            tokenizer=self.request.tokenizer,
            reading=Reading(
                field=self.request.field,
                separator=self.request.separator,
                bad_text=self.request.bad_text,
                cuts_at_spaces=self.tokenizer.cuts_at_spaces,
            ),
            validation_ratio=self.request.validation_ratio,
            folder=self.work,
        )

    def _pack(self, packer: ShardPacker, number: int, split: Split, result: TaskResult) -> int:
        """Pack what is left of a task's split; return how many ids that was."""
        if packer.cursor.source > number:
            return 0
        left = result.of(split).tokens - packer.cursor.offset
        path = split_path(self.work, number, split)
        with disk_errors(path), path.open("rb") as file:
            file.seek(packer.cursor.offset * self._dtype.itemsize)
            while len(ids := np.fromfile(file, self._dtype, READ_IDS)):
                packer.add(ids)
        packer.end_source()
        return left


@contextlib.contextmanager
def _pool(settings: TaskSettings, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes; an error ends them after the document they are at."""
    # Forked processes would inherit threads and the bucket's connections.
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=start_worker, initargs=(settings, stopping)
    )
    try:
        yield pool
    finally:
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _awaited(result: Future[TaskResult] | TaskResult) -> TaskResult:
    if isinstance(result, TaskResult):
        return result
    try:
        return result.result()
    except BrokenProcessPool:
        raise ShardError(
            "A worker process ended by itself, most likely killed for its memory. Name fewer "
            "--workers, and run the same command again: it goes on from here."
        ) from None


def _recipe(
    inputs: Sequence[TextFile], request: TokenizeRequest, tokenizer: Tokenizer
) -> dict[str, object]:
    return {
        "made by": "tokenize",
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text_id": tokenizer.end_of_text_id,
        "shard_tokens": request.shard_tokens,
        "validation_ratio": request.validation_ratio,
        "name": request.name,
        "field": request.field,
        "separator": request.separator,
        "bad_text": request.bad_text,
        "inputs": [[file.path.name, file.size, file.edges] for file in inputs],
    }
