"""Tokenize text to shards: tasks over a pool of processes, packed in order, kept after any kill."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.data.formats.token_layout import element_type
from refocused.data.manifest.shard_manifest import Manifest
from refocused.prepare.packing_state import Journal, manifest_of, pack_once
from refocused.prepare.shard_packer import ShardPacker
from refocused.prepare.text_inputs import Task, TextFile, plan_tasks
from refocused.prepare.tokenize_worker import (
    SPLITS,
    Split,
    TaskResult,
    TokenizeRequest,
    read_result,
    remove_result,
    run_task,
    split_path,
    start_worker,
)
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import Tokenizer, open_tokenizer

READ_IDS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeProgress:
    """How far it is; bytes are of text, approximately."""

    done_bytes: int  # with those of earlier starts
    total_bytes: int
    tokens: int  # packed by this start
    shards: int  # finished, by all starts


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeResult:
    """What there is now."""

    manifest: Manifest
    kept_shards: int  # finished by earlier starts
    new_tokens: int  # packed by this start


def tokenize(
    inputs: Sequence[TextFile],
    bucket: Bucket,
    *,
    work: Path,
    request: TokenizeRequest,
    workers: int,
    progress: Callable[[TokenizeProgress], None],
) -> TokenizeResult:
    """Tokenize files to shards of one size and a manifest, which is written last.

    The end-of-text id precedes each document. After a kill at any moment, the same call goes on:
    finished shards are verified and kept, and finished tasks are not repeated. The bytes do not
    depend on the number of workers.

    Args:
        bucket: Where shards go; empty, or of an earlier call with the same request.
        work: Local folder for what is unfinished; removed at the end.
        workers: Processes.
        progress: Called in this thread at the start and after each task.

    Raises:
        ShardError: A file cannot be used, the bucket holds something else, another process is
            packing there, or a worker died.
        BucketError: The bucket cannot be read or written, or the disk is full.
    """
    tokenizer = open_tokenizer(request.tokenizer)
    making = _Making(inputs, bucket, work, request, tokenizer, workers, progress)
    named = ("shard_tokens", "validation_ratio", "name", "field", "separator", "bad_text")
    recipe = {
        "made by": "tokenize",
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text_id": tokenizer.end_of_text_id,
        **{name: getattr(request, name) for name in named},
        "inputs": [[file.path.name, file.size, file.edges] for file in inputs],
    }
    manifest = pack_once(bucket, work, recipe, making.pack, dtype=making.dtype)
    kept = len(manifest.shards) if making.kept is None else making.kept
    return TokenizeResult(manifest, kept, making.new_tokens)


@dataclasses.dataclass
class _Making:
    inputs: Sequence[TextFile]
    bucket: Bucket
    work: Path
    request: TokenizeRequest
    tokenizer: Tokenizer
    workers: int
    progress: Callable[[TokenizeProgress], None]
    kept: int | None = None  # shards; None: all were finished
    new_tokens: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        return element_type(self.tokenizer.vocabulary)

    def pack(self, journal: Journal) -> Manifest:
        tasks = plan_tasks(self.inputs)
        packers = {split: self._packer(journal, split) for split in SPLITS}
        self.kept = sum(packer.kept for packer in packers.values())
        first = min(packer.cursor.source for packer in packers.values())
        for number in range(first):
            remove_result(self.work, number)
        sizes = [0, *itertools.accumulate(task.bytes for task in tasks)]
        self.progress(TokenizeProgress(sizes[first], sizes[-1], 0, self.kept))
        for number, result in self._results(tasks, first):
            for split, packer in packers.items():
                self._pack(packer, number, split, result)
            remove_result(self.work, number)
            shards = sum(packer.cursor.shard for packer in packers.values())
            done = sizes[number + 1]
            self.progress(TokenizeProgress(done, sizes[-1], self.new_tokens, shards))
        for packer in packers.values():
            packer.end_shard()
            packer.close()
        found = [shard for split in SPLITS for shard in journal.shards(split)]
        if not found:
            raise ShardError(
                "There is no text in the files: every document is empty. Name other files."
            )
        name, vocabulary = self.tokenizer.name, self.tokenizer.vocabulary
        return manifest_of(found, tokenizer=name, vocabulary=vocabulary)

    def _packer(self, journal: Journal, split: Split) -> ShardPacker:
        name = f"{self.request.name}_{split}"
        return ShardPacker(
            self.bucket,
            journal,
            split,
            folder=self.work,
            name=name,
            shard_name=lambda number: f"{name}_{number:06d}.npy",
            shard_tokens=self.request.shard_tokens,
            begin_id=self.tokenizer.end_of_text_id,
        )

    def _results(self, tasks: Sequence[Task], first: int) -> Iterator[tuple[int, TaskResult]]:
        """Yield the results of tasks in order; a few more than the workers are in progress."""
        numbers = range(first, len(tasks))
        ahead = 2 * self.workers
        with self._pool() as pool:

            def begun(number: int) -> Future[TaskResult] | TaskResult:
                known = read_result(self.work, number)
                return known or pool.submit(run_task, number, tasks[number].spans)

            waiting = [begun(number) for number in numbers[:ahead]]
            for number in numbers:
                if number + ahead < len(tasks):
                    waiting.append(begun(number + ahead))
                result = waiting.pop(0)
                try:
                    yield number, result.result() if isinstance(result, Future) else result
                except BrokenProcessPool:
                    raise ShardError(
                        "A worker process ended by itself, most likely killed for its memory. Name "
                        "fewer --workers, and run the same command again: it goes on from here."
                    ) from None

    @contextlib.contextmanager
    def _pool(self) -> Iterator[ProcessPoolExecutor]:
        """Start processes; an error ends them after the document they are at."""
        # Forked processes would inherit threads and the bucket's connections.
        context = multiprocessing.get_context("spawn")
        stopping = context.Event()
        pool = ProcessPoolExecutor(
            self.workers,
            context,
            initializer=start_worker,
            initargs=(self.request, self.work, stopping),
        )
        try:
            yield pool
        finally:
            stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _pack(self, packer: ShardPacker, number: int, split: Split, result: TaskResult) -> None:
        """Pack what is left of a task's split."""
        if packer.cursor.source > number:
            return
        self.new_tokens += result[split].tokens - packer.cursor.offset
        path = split_path(self.work, number, split)
        with disk_errors(path), path.open("rb") as file:
            file.seek(packer.cursor.offset * self.dtype.itemsize)
            while len(ids := np.fromfile(file, self.dtype, READ_IDS)):
                packer.add(ids)
        packer.end_source()
