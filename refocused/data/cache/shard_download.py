"""Download one shard and convert it to its local form."""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from refocused.bucket.bucket import BlobInfo, crc32c_of
from refocused.config.data import DataConfig
from refocused.data.cache.local_shards import (
    LocalShards,
    check_vocabulary,
    has_local_form,
    local_dtype,
)
from refocused.data.formats.token_blocks import Ids, token_blocks
from refocused.data.formats.token_layout import read_layout, suspicion
from refocused.data.manifest.shard_manifest import Shard, wrong_type
from refocused.system.atomic_files import start_write_back
from refocused.system.errors import BucketError, CorruptObjectError, ShardError

MIN_RANGE_BYTES = 1 << 20  # for smaller ranges, latency dominates
MAX_RANGE_BYTES = 1 << 23

_log = logging.getLogger(__name__)


class ShardDownload:
    """The download of one shard: its owner calls `start`, `run`, `finish`; others may `help`.

    `changed` guards the jobs, and is notified when one ends.
    """

    def __init__(self, local: LocalShards, index: int, *, changed: threading.Condition) -> None:
        self.index = index
        self._bucket = local.buckets[index]
        self._local = local
        self._shard = local.manifest.shards[index]
        # A mixture's names start with that of the source; those in its bucket do not.
        source = local.sources[index]
        self._prefix = f"{source}/" if source else ""
        self._folder = folder = local.unfinished
        self._paths = [folder / f"{index}.{i}.object" for i in range(len(self._shard.files))]
        self._ranged = folder / f"{index}.ranges"
        self._changed = changed
        self.jobs: deque[Callable[[], None]] = deque()  # left to help with
        self._running = 0
        self._failure: Exception | None = None

    def start(self, *, ranges: int) -> None:
        """Divide the work into jobs, for any thread and in any order.

        A large single file is split into `ranges`; other files are downloaded whole. Files of an
        earlier attempt are reused.
        """
        shard = self._shard
        files, size = shard.files, shard.size
        divisible = len(files) == 1 and shard.crc32c is not None
        if divisible and ranges > 1 and size >= 2 * MIN_RANGE_BYTES:
            length = min(max(-(-size // ranges), MIN_RANGE_BYTES), MAX_RANGE_BYTES)
            with self._ranged.open("wb") as file:
                file.truncate(size)
            for start in range(0, size, length):
                here = min(length, size - start)
                self.jobs.append(functools.partial(self._download_range, start, here))
            return
        for part, path in zip(files, self._paths, strict=True):
            if not path.exists() and self._in_place(part) is None:
                self.jobs.append(functools.partial(self._download, part, path))

    def help(self) -> bool:
        """Do the next job, if any; its failure is raised in the owner's thread."""
        with self._changed:
            if not self.jobs:
                return False
            job = self.jobs.popleft()
            self._running += 1
        failure = None
        try:
            job()
        except Exception as error:  # a thread's edge: `run` raises it
            failure = error
        with self._changed:
            self._running -= 1
            if failure is not None:
                self.jobs.clear()
                self._failure = self._failure or failure
            self._changed.notify_all()
        return True

    def run(self) -> None:
        """Do jobs until none is left or running; raise the first failure."""
        while self.help():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self._failure is not None:
            raise self._failure

    def cancel(self, reason: Exception) -> None:
        """Drop the jobs that have not started; without any, the download is left to finish."""
        if self.jobs:
            self.jobs.clear()
            self._failure = self._failure or reason

    def finish(self) -> None:
        """Write and publish the local form.

        Raises `ShardError` if the object certainly changed, is corrupt, or does not fit the run;
        and `BucketError` or `OSError` for trouble of the bucket or the disk, which may pass.
        """
        finished = self._folder / f"{self.index}.npy"
        # Ranges are not verified one by one, and may come from different versions of the object.
        if self._ranged.exists() and crc32c_of(self._ranged) == self._shard.crc32c:
            self._ranged.replace(self._paths[0])
        elif self._ranged.exists():
            self._ranged.unlink()
            self._download(self._shard, self._paths[0])
        sources = self._sources()
        try:
            max_id = write_local_form(
                sources,
                finished,
                shard=self._shard,
                data=self._local.data[self.index],
                vocabulary=self._local.vocabulary,
            )
            for file, before, now in zip(self._shard.files, sources, self._sources(), strict=True):
                if now != before:
                    self._explain(file, BucketError("it changed while it was read."))
            for path in self._paths:  # before publishing, since removal may wait for the disk
                path.unlink(missing_ok=True)
            self._local.publish(self.index, finished, max_id=max_id)
        finally:
            for path in (finished, *self._paths):
                path.unlink(missing_ok=True)

    def _sources(self) -> list[Path]:
        """Return the shard's files, downloaded or in place."""
        return [
            path if path.exists() else self._in_place(file) or path
            for file, path in zip(self._shard.files, self._paths, strict=True)
        ]

    def _in_place(self, file: Shard) -> Path | None:
        """Return a file of a folder that can be converted without a copy.

        One that has the local form already is copied, and the copy becomes that.
        """
        if has_local_form(file, self._local.bytes[self.index]):
            return None
        return self._bucket.local_file(self._blob(file))

    def _blob(self, file: Shard) -> BlobInfo:
        """Return a file's object, under its name in the bucket."""
        return file.renamed(lambda name: name.removeprefix(self._prefix)).blob

    def _download_range(self, start: int, length: int) -> None:
        try:
            name = self._blob(self._shard).name
            content = self._bucket.read(name, start=start, length=length)
        except BucketError as error:
            self._explain(self._shard, error)
        with self._ranged.open("r+b") as file:
            file.seek(start)
            file.write(content)
            file.flush()
            start_write_back(file.fileno(), start, len(content))

    def _download(self, file: Shard, target: Path) -> None:
        try:
            self._bucket.download(self._blob(file), target)
        except BucketError as error:
            self._explain(file, error)

    def _explain(self, file: Shard, error: BucketError) -> NoReturn:
        """Raise `ShardError` if the object is proven wrong, and otherwise the failure itself."""
        url, name = self._bucket.url, self._blob(file).name
        now = self._bucket.info(name)
        if now is None:
            if any(blob.name == name for blob in self._bucket.list(name)):
                raise error  # a proxy may answer all requests with 404 for a while
            raise ShardError(
                f"{file.name}: the object is gone from {url}. Upload it again, or put its name in "
                "data.skip."
            ) from None
        known = now.crc32c is not None and file.crc32c is not None
        if now.size != file.size or (known and now.crc32c != file.crc32c):
            raise ShardError(
                f"{file.name}: the object in {url} changed since it was listed: {now.size:,} "
                f"bytes, not {file.size:,}, or other content. Start again to list the bucket anew."
            ) from None
        if isinstance(error, CorruptObjectError):
            raise ShardError(
                f"{file.name}: it is corrupt. {error} Or put its name in data.skip."
            ) from None
        raise error


def write_local_form(
    sources: Sequence[Path], target: Path, *, shard: Shard, data: DataConfig, vocabulary: int
) -> int:
    """Convert the downloaded `shard.files` to the local form; return the largest id.

    A single file that has the form already is moved; otherwise `sources` stay. On an error,
    `target` may be incomplete. Raises `ShardError` if a file is unsupported or corrupt, differs
    from the manifest in its number of tokens or its row settings, or holds an id outside the
    vocabulary.
    """
    dtype = np.dtype(local_dtype(shard, vocabulary=vocabulary)).newbyteorder("<")
    max_id, is_moved = 0, False
    with target.open("wb") as out:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (shard.tokens,)}
        np.lib.format.write_array_header_1_0(out, header)
        for source, part in zip(sources, shard.files, strict=True):
            with source.open("rb") as file:
                layout = read_layout(file, name=part.name, data=data)
                counted = (part.pad_id, part.separator_id)
                ids = (layout.pad_id, layout.separator_id)
                if counted != ids:  # a manifest of another program
                    raise ShardError(
                        f"{part.name}: its rows are read with the padding and separator ids {ids}, "
                        f"but the manifest counted them with {counted}. Write the manifest again: "
                        "refocused prepare_data manifest --write"
                    )
                is_stream = layout.kind == "npy" and len(layout.ids.shape) == 1
                is_moved = is_stream and layout.ids.dtype == dtype
                blocks = token_blocks(file, layout, name=part.name)
                copied = _copy(blocks, None if is_moved else out, dtype, shard=part)
            check_vocabulary(part, copied, vocabulary=vocabulary)
            if copied > np.iinfo(dtype).max:  # a wrong row of another program's manifest
                raise ShardError(wrong_type(part, copied))
            max_id = max(max_id, copied)
    if is_moved:  # a single .npy: the parts of packs are .pt files
        sources[0].replace(target)
    return max_id


def _copy(
    blocks: Iterator[Ids], out: BinaryIO | None, dtype: np.dtype[Any], *, shard: Shard
) -> int:
    """Write a file's ids to `out`, if given; return the largest."""
    tokens, max_id = 0, 0
    for block in blocks:
        if not tokens and (problem := suspicion(block)) is not None:
            _log.warning("%s: %s.", shard.name, problem)
        tokens += len(block)
        if tokens > shard.tokens:  # beyond the space that was checked
            break
        if block.size:
            max_id = max(max_id, int(block.max()))
        if out is not None:
            # An id too large for the type wraps here; the caller rejects the file.
            out.write(block.astype(dtype, copy=False).data)
    if tokens != shard.tokens:
        raise ShardError(
            f"{shard.name}: it holds {tokens:,} tokens, but the manifest says "
            f"{shard.tokens:,}. Prepare the data again, or put its name in data.skip."
        )
    return max_id
