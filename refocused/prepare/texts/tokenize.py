"""Tokenize text to shards with a pool of processes, resumable after a kill at any time."""

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Literal

import numpy as np

from refocused.bucket.bucket import Bucket
from refocused.bucket.partial_files import disk_errors
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.formats.token_layout import element_type
from refocused.data.manifest.shard_manifest import Manifest
from refocused.prepare.texts.task_pools import Pool, SharedTasks, local_pool, ray_pool, shared_pool
from refocused.prepare.texts.text_documents import sampled_texts
from refocused.prepare.texts.text_inputs import Task, TextFile, plan_tasks
from refocused.prepare.texts.tokenize_worker import (
    SPLITS,
    Split,
    TaskResult,
    TokenizeRequest,
    read_result,
    remove_ids,
    task_file,
)
from refocused.prepare.write_shards import (
    Journal,
    PackResult,
    ShardPacker,
    pack_once,
    packed_sources,
    recipe_difference,
)
from refocused.system.errors import ShardError
from refocused.tokenizers.encoders import FileTokenizer, Tokenizer, open_tokenizer

READ_IDS = 1 << 20
SAMPLED_TASKS, SAMPLE_BYTES = 16, 1 << 19  # whose round trip is measured
START_SECONDS = 600.0  # that a helping process waits for the packing one
Executor = Literal["local", "ray", "slurm"]
POOLS = {"local": local_pool, "ray": ray_pool, "slurm": shared_pool}

_log = logging.getLogger(__name__)


# Bytes of text done, by earlier calls too, and in all, approximately; tokens packed by this call;
# shards finished by all calls.
Progress = Callable[[int, int, int, int], None]


def tokenize(
    inputs: Sequence[TextFile],
    bucket: Bucket,
    *,
    work: Path,
    request: TokenizeRequest,
    workers: int,
    progress: Progress,
    executor: Executor = "local",
) -> PackResult:
    """Tokenize files to shards of one size, and then write a manifest.

    The end-of-text id precedes each document. After a kill, the same call continues: finished
    shards are verified and kept, and finished tasks are not repeated. The bytes do not depend on
    the number of workers or the executor.

    Args:
        inputs: The text files, from `find_inputs`.
        bucket: Receives the shards; empty, or from an earlier call with the same request.
        work: Local folder for unfinished files; removed at the end.
        request: Settings of the shards.
        workers: Number of processes; Ray uses those of its cluster.
        progress: Called in this thread at the start and after each task.
        executor: `ray` runs the tasks on a Ray cluster whose hosts read `inputs` at these paths.

    Raises:
        ShardError: A file cannot be used, the bucket holds other data, another process works in
            the folder, or a worker died.
        BucketError: The bucket cannot be read or written, or the disk is full.
    """
    tokenizer = open_tokenizer(request.tokenizer)
    notes = _checked_round_trip(inputs, request, tokenizer)
    dtype, counts = element_type(tokenizer.vocabulary), Counter[str]()
    kept: int | None = None  # shards; None: all were finished
    new_tokens = 0

    def add(packer: ShardPacker, number: int, split: Split, result: TaskResult) -> None:
        """Add the rest of a task's split."""
        nonlocal new_tokens
        new_tokens += result[split].tokens - packer.start
        counts["empty"] += result[split].empty
        path = task_file(work, number, split)
        with disk_errors(path), path.open("rb") as file:
            file.seek(packer.start * dtype.itemsize)
            while len(ids := np.fromfile(file, dtype, READ_IDS)):
                packer.add(ids)
        packer.end_source()

    def pack(journal: Journal) -> Manifest:
        nonlocal kept
        tasks, packers = plan_tasks(inputs), dict[Split, ShardPacker]()
        for split in SPLITS:
            name = f"{request.name}_{split}"
            packers[split] = ShardPacker(
                bucket,
                journal,
                split,
                folder=work,
                name=name,
                shard_name=lambda number, name=name: f"{name}_{number:06d}.npy",  # type: ignore[misc]
                shard_tokens=request.shard_tokens,
                begin_id=tokenizer.end_of_text_id,
                best_fit=request.best_fit,
            )
        kept = sum(packer.kept for packer in packers.values())
        first = min(packer.source for packer in packers.values())
        for split, packer in packers.items():
            remove_ids(work, split, range(packer.cursor[0]))
        sizes = [0, *itertools.accumulate(task.bytes for task in tasks)]
        progress(sizes[first], sizes[-1], 0, kept)
        pool = POOLS[executor](request, work, workers)
        for number, result in _results(pool, work, tasks, packers):
            for split, packer in packers.items():
                begun = packer.cursor[0]
                if packer.source <= number:
                    add(packer, number, split, result)
                remove_ids(work, split, range(begun, packer.cursor[0]))  # in a finished shard
            shards = sum(packer.shards for packer in packers.values())
            progress(sizes[number + 1], sizes[-1], new_tokens, shards)
        for packer in packers.values():
            packer.end_shard()
            packer.close()
            counts.update(packer.counts)
        finished = [shard for split in SPLITS for shard in journal.shards(split)]  # in name order
        if not finished:
            raise ShardError(
                "There is no text in the files: every document is empty. Choose other files."
            )
        return Manifest(
            tuple(finished),
            tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            end_of_text_id=tokenizer.end_of_text_id,
            notes=notes,
        )

    recipe = _recipe(inputs, request, tokenizer)
    manifest = pack_once(bucket, work, recipe, pack, dtype=dtype)
    return PackResult(manifest, counts, len(manifest.shards) if kept is None else kept, new_tokens)


def _checked_round_trip(
    inputs: Sequence[TextFile], request: TokenizeRequest, tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Return notes on the tokenizer; raise `ShardError` if it loses much of a sample of texts."""
    notes = [f"each document begins with {tokenizer.end_of_text} (id {tokenizer.end_of_text_id})"]
    if not isinstance(tokenizer, FileTokenizer):
        return tuple(notes)  # bytes come back
    tasks, others = plan_tasks(inputs), list[str]()
    tasks = tasks[:: -(-len(tasks) // SAMPLED_TASKS) or 1]
    sample = sampled_texts(
        tasks, request.reading, most_bytes=SAMPLE_BYTES, held_out=others, progress=lambda *_: None
    )
    share, findings = tokenizer.round_trip([*sample, *others])
    name = f"tokenizer {request.tokenizer.name}"
    if share > request.max_loss:
        raise ShardError(
            f"{name}: {findings[0]}. Use a tokenizer that has them, such as one of bytes "
            "(`prepare_data train-tokenizer` makes one), or accept the loss: "
            f"--max-loss {math.ceil(share * 100) / 100:g}"
        )
    for finding in findings:
        _log.warning("%s: %s", name, finding)
    return (*notes, *findings)


def help_tokenize(
    inputs: Sequence[TextFile], bucket: Bucket, *, work: Path, request: TokenizeRequest
) -> None:
    """Run tasks of the same `tokenize` in another process of a SLURM step.

    Both see the folder `work`. Raises as `tokenize` does, but for errors in single files.
    """
    until = time.monotonic() + START_SECONDS
    recipe = _recipe(inputs, request, open_tokenizer(request.tokenizer))
    # Until the other process has begun the data set, perhaps anew.
    while (difference := recipe_difference(bucket, recipe)) is not None:
        if time.monotonic() > until:
            raise ShardError(
                f"{bucket.url}: the process that packs has not begun in {START_SECONDS:.0f} s "
                f"({difference or 'no recipe'}). See its output, and run the same command again."
            )
        time.sleep(1)
    if bucket.info(MANIFEST_NAME) is None:
        first = packed_sources(work, SPLITS)
        SharedTasks(request, work).help(plan_tasks(inputs), first=first)


def _recipe(
    inputs: Sequence[TextFile], request: TokenizeRequest, tokenizer: Tokenizer
) -> dict[str, object]:
    settings = ("shard_tokens", "validation_ratio", "name", "best_fit")
    return {
        "made by": "tokenize",
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text_id": tokenizer.end_of_text_id,
        **{name: getattr(request, name) for name in settings},
        **{name: getattr(request.reading, name) for name in ("field", "separator", "bad_text")},
        "inputs": [[file.path.name, file.size, file.edges] for file in inputs],
    }


def _results(
    pool: Pool, work: Path, tasks: Sequence[Task], packers: Mapping[Split, ShardPacker]
) -> Iterator[tuple[int, TaskResult]]:
    """Yield the results of tasks in order; twice as many as workers are submitted ahead."""
    numbers = range(min(packer.source for packer in packers.values()), len(tasks))
    with pool as (submit, workers):

        def start(number: int) -> Callable[[], TaskResult]:
            needed = [split for split, packer in packers.items() if packer.cursor[0] <= number]
            known = read_result(work, number, needed)
            if known is not None:
                return lambda: known
            return submit(number, tasks[number].spans)

        ahead = 2 * workers
        waiting = [start(number) for number in numbers[:ahead]]
        for number in numbers:
            if number + ahead < len(tasks):
                waiting.append(start(number + ahead))
            result = waiting.pop(0)
            try:
                yield number, result()
            except BrokenProcessPool:
                raise ShardError(
                    "A worker process died, most likely killed for lack of memory. Run the "
                    "same command with fewer --workers: it continues from here."
                ) from None
