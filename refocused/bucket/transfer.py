"""Transfer many objects between a bucket and a folder, in threads and with one error for all."""

import collections
import concurrent.futures
import functools
import queue
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from refocused.bucket.bucket import BlobInfo, Bucket, checked_name
from refocused.bucket.partial_files import disk_errors, part_path, require_space
from refocused.system.errors import BucketError

Item = TypeVar("Item")
Result = TypeVar("Result")

# No further object is started after this many failures: if the bucket is down, each object uses
# up all its attempts, which would take hours.
_MAX_FAILURES = 8
_SHOWN_FAILURES = 3


Progress = Callable[[int, int], None]  # after each object: bytes of complete ones, and in all


def download_many(
    bucket: Bucket,
    blobs: Sequence[BlobInfo],
    folder: Path,
    *,
    threads: int = 8,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Download objects into a folder under their own names; return their CRC-32C.

    Names with `/` become folders. `progress` is called in this thread. Raises `BucketError` if
    names cannot be files or clash, the disk lacks space, or downloads fail; completed files stay.
    """
    targets = object_files((blob.name for blob in blobs), folder, where=bucket.url)
    parts = [part for target in targets.values() if (part := part_path(target)).exists()]
    needed_bytes = sum(blob.size for blob in blobs) - sum(part.stat().st_size for part in parts)
    require_space(folder, needed_bytes=max(0, needed_bytes))
    calls = [functools.partial(bucket.download, blob, targets[blob.name]) for blob in blobs]
    sizes = [blob.size for blob in blobs]
    what = f"downloads from {bucket.url}"
    results = _run_all(calls, sizes, what, threads=threads, progress=progress)
    return {blobs[index].name: checksum for index, checksum in results.items()}


def upload_many(
    bucket: Bucket,
    sources: Mapping[str, Path],
    *,
    threads: int = 8,
    progress: Progress | None = None,
) -> None:
    """Upload the file of each object name.

    `progress` is called in this thread. Raises `BucketError` if a name or a file is invalid (then
    nothing is uploaded) or uploads fail; completed objects stay.
    """
    calls, sizes = [], []
    for name, source in sources.items():
        checked_name(name, where=bucket.url)
        with disk_errors(source):
            sizes.append(source.stat().st_size)
        calls.append(functools.partial(bucket.upload, source, name))
    _run_all(calls, sizes, f"uploads to {bucket.url}", threads=threads, progress=progress)


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    threads: int,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Return a function's results in the order of its arguments; raise its first error.

    `on_result` is called in this thread with each result as it arrives.
    """
    results: dict[int, Result] = {}

    def on_end(index: int, outcome: concurrent.futures.Future[Result]) -> bool:
        results[index] = outcome.result()
        on_result(results[index])
        return True

    calls = [functools.partial(function, item) for item in items]
    _run_in_threads(calls, threads=threads, on_end=on_end)
    return [results[index] for index in range(len(items))]


def _run_in_threads(
    calls: Sequence[Callable[[], Result]],
    *,
    threads: int,
    on_end: Callable[[int, concurrent.futures.Future[Result]], bool],
) -> None:
    """Run calls in threads and wait for them, but not after Ctrl+C.

    A stalled transfer would delay an interrupt by its whole time-out; the threads are daemons, so
    that the process can exit. `on_end` is called in this thread with the index and the outcome of
    each finished call. Once it returns False, no further call is started or reported.
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
    try:
        for worker in workers:
            worker.start()
        for _ in calls:
            if not on_end(*outcomes.get()):
                break
    finally:
        waiting.clear()
        for worker in workers:
            if worker.is_alive() and not isinstance(sys.exception(), KeyboardInterrupt):
                worker.join()


def _run_all(
    calls: Sequence[Callable[[], Result]],
    sizes: Sequence[int],
    what: str,
    *,
    threads: int,
    progress: Progress | None,
) -> dict[int, Result]:
    """Return the results of all calls by index; raise one error for all failures."""
    results: dict[int, Result] = {}
    done, done_bytes, total_bytes = 0, 0, sum(sizes)
    failures: list[BucketError] = []

    def on_end(index: int, outcome: concurrent.futures.Future[Result]) -> bool:
        nonlocal done, done_bytes
        try:
            results[index] = outcome.result()
        except BucketError as error:
            failures.append(error)
            return len(failures) < _MAX_FAILURES
        done, done_bytes = done + 1, done_bytes + sizes[index]
        if progress is not None:
            progress(done_bytes, total_bytes)
        return True

    _run_in_threads(calls, threads=threads, on_end=on_end)
    if not failures:
        return results
    if len(calls) == 1:
        raise failures[0]
    untried, more = len(calls) - done - len(failures), len(failures) - _SHOWN_FAILURES
    raise BucketError(
        f"{len(failures)} of {len(calls)} {what} failed"
        + (f" ({untried} more were not started or not completed)" if untried else "")
        + ":"
        + "".join(f"\n  {error}" for error in failures[:_SHOWN_FAILURES])
        + (f"\n  and {more} more" if more > 0 else "")
    )


def object_files(names: Iterable[str], folder: Path, *, where: str) -> dict[str, Path]:
    """Return each object's file below a folder, which need not exist; `a//b` becomes `a/b`.

    Raises `BucketError` if a name cannot be a file's, or two objects would be one file or one a
    folder of the other. Names that only case or Unicode form tells apart are refused everywhere,
    since some file systems ignore these.
    """
    paths = {name: PurePosixPath(checked_name(name, where=where)) for name in names}
    owners = {_form(path): name for name, path in paths.items()}
    for name, path in paths.items():
        for ancestor in (path, *path.parents[:-1]):
            if (other := owners.get(_form(ancestor), name)) != name:
                raise BucketError(
                    f"{where}: the objects {name!r} and {other!r} cannot both be files below "
                    f"{folder}: they would be one file, or one a folder of the other, where case "
                    "is ignored. Rename one of them in the bucket, or exclude it."
                )
    return {name: folder / path for name, path in paths.items()}


def _form(path: PurePosixPath) -> str:
    """Return what a file system that ignores case and Unicode form compares."""
    return unicodedata.normalize("NFC", str(path)).casefold()
