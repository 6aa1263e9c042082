"""Many objects at once, between a bucket and a folder: threads, progress, one error for all."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from refocused.bucket.bucket import BlobInfo, Bucket, checked_name
from refocused.bucket.object_files import object_files
from refocused.bucket.partial_files import disk_errors, part_path, require_space
from refocused.system.errors import BucketError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Failures after which the objects not yet begun are left: a bucket that is down fails each of
# them after all its attempts, which would take hours.
_MOST_FAILURES = 8
_NAMED_FAILURES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is; bytes count when their object is whole."""

    done_bytes: int
    total_bytes: int
    done_objects: int
    total_objects: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    name: str
    size: int


def download_many(
    bucket: Bucket,
    blobs: Sequence[BlobInfo],
    folder: Path,
    *,
    threads: int = 8,
    progress: Callable[[Progress], None] | None = None,
) -> list[Path]:
    """Fetch objects below a folder under their own names; return the files in the same order.

    Args:
        bucket: Where they are.
        blobs: What to fetch; names with `/` become folders.
        folder: Where they go; made when missing.
        threads: Objects at once.
        progress: Called in this thread after each object.

    Raises:
        BucketError: Names cannot be files, or two would be one file; the disk cannot hold all of
            it; or objects failed: the first are named and all counted; those that arrived stay.
    """
    targets = object_files((blob.name for blob in blobs), folder, where=bucket.url)
    kept_bytes = sum(_part_bytes(target) for target in targets.values())
    total_bytes = sum(blob.size for blob in blobs)
    require_space(folder, needed_bytes=max(0, total_bytes - kept_bytes))
    work = {
        _Job(name=blob.name, size=blob.size): _download_call(bucket, blob, targets[blob.name])
        for blob in blobs
    }
    _run_all(work, f"downloads from {bucket.url}", threads=threads, progress=progress)
    return [targets[blob.name] for blob in blobs]


def upload_many(
    bucket: Bucket,
    sources: Mapping[str, Path],
    *,
    threads: int = 8,
    progress: Callable[[Progress], None] | None = None,
) -> list[BlobInfo]:
    """Store files; return what the bucket then has, in the same order.

    Args:
        bucket: Where they go.
        sources: The file of each object name.
        threads: Objects at once.
        progress: Called in this thread after each object.

    Raises:
        BucketError: A name or a file is wrong (nothing is sent then), or objects failed: the
            first are named and all counted; those that were stored stay.
    """
    work: dict[_Job, Callable[[], BlobInfo]] = {}
    for name, source in sources.items():
        checked_name(name, where=bucket.url)
        with disk_errors(source):
            job = _Job(name=name, size=source.stat().st_size)
        work[job] = _upload_call(bucket, source, name)
    stored = _run_all(work, f"uploads to {bucket.url}", threads=threads, progress=progress)
    return [stored[name] for name in sources]


def _part_bytes(target: Path) -> int:
    part = part_path(target)
    return part.stat().st_size if part.exists() else 0


def _download_call(bucket: Bucket, blob: BlobInfo, target: Path) -> Callable[[], int]:
    return lambda: bucket.download(blob, target)


def _upload_call(bucket: Bucket, source: Path, name: str) -> Callable[[], BlobInfo]:
    return lambda: bucket.upload(source, name)


def run_in_threads(
    calls: Sequence[Callable[[], Result]],
    *,
    threads: int,
    ended: Callable[[int, concurrent.futures.Future[Result]], bool],
) -> None:
    """Run calls in threads, several at once, and wait for them.

    After Ctrl+C nothing is waited for: a transfer may be silent for its whole time-out. The
    threads are daemons, so that the process can exit; what they were receiving stays resumable.

    Args:
        calls: What is run, in this order.
        threads: How many at once.
        ended: Called in this thread with the index of each call that has ended and its outcome;
            after it returned False no further call is begun or reported.
    """
    waiting = collections.deque(enumerate(calls))
    outcomes: queue.SimpleQueue[tuple[int, concurrent.futures.Future[Result]]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, call = waiting.popleft()
            except IndexError:
                return
            outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)
            outcomes.put((index, outcome))

    workers = [
        threading.Thread(target=work, name=f"transfer-{number}", daemon=True)
        for number in range(min(threads, len(calls)))
    ]
    is_interrupted = False
    try:
        for worker in workers:
            worker.start()
        for _ in calls:
            if not ended(*outcomes.get()):
                break
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        waiting.clear()
        for worker in workers:
            if worker.is_alive() and not is_interrupted:
                worker.join()


def map_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], *, threads: int
) -> list[Result]:
    """Return the results of a function in the order of its arguments; raise its first error."""
    results: dict[int, Result] = {}

    def ended(index: int, outcome: concurrent.futures.Future[Result]) -> bool:
        results[index] = outcome.result()
        return True

    calls = [functools.partial(function, item) for item in items]
    run_in_threads(calls, threads=threads, ended=ended)
    return [results[index] for index in range(len(items))]


def _run_all(
    work: Mapping[_Job, Callable[[], Result]],
    what: str,
    *,
    threads: int,
    progress: Callable[[Progress], None] | None,
) -> dict[str, Result]:
    """Run every job; return the results by object name, or raise one error for all failures."""
    jobs = list(work)
    total_bytes = sum(job.size for job in jobs)
    done_bytes = 0
    results: dict[str, Result] = {}
    failures: list[BucketError] = []

    def ended(index: int, outcome: concurrent.futures.Future[Result]) -> bool:
        nonlocal done_bytes
        job = jobs[index]
        try:
            results[job.name] = outcome.result()
        except BucketError as error:
            failures.append(error)
            return len(failures) < _MOST_FAILURES
        done_bytes += job.size
        if progress is not None:
            progress(Progress(done_bytes, total_bytes, len(results), len(jobs)))
        return True

    run_in_threads(list(work.values()), threads=threads, ended=ended)
    if failures:
        raise _combined(failures, what, total=len(work), done=len(results))
    return results


def _combined(failures: Sequence[BucketError], what: str, *, total: int, done: int) -> BucketError:
    if total == 1:
        return failures[0]
    named = "\n".join(f"  {error}" for error in failures[:_NAMED_FAILURES])
    more = len(failures) - _NAMED_FAILURES
    untried = total - done - len(failures)
    return BucketError(
        f"{len(failures)} of {total} {what} failed"
        + (f" ({untried} more were not begun or not waited for)" if untried else "")
        + f":\n{named}"
        + (f"\n  and {more} more" if more > 0 else "")
    )
