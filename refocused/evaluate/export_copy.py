"""An exported model in a bucket: sent there whole, and brought from there whole and verified."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import pydantic

from refocused.bucket.bucket import BlobInfo, Bucket, crc32c_of
from refocused.bucket.partial_files import disk_errors
from refocused.bucket.stored import with_checksum
from refocused.bucket.transfer import Progress, download_many, upload_many
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.system.atomic_files import fsync_directories, replace_folder
from refocused.system.errors import CheckpointError
from refocused.system.locks import FileLock

FOLDER = "final_model"  # what a finished run becomes, here and in its mirror
ORIGIN = "origin.json"  # in that folder: of which save it is
CONFIG = "config.json"  # every folder of transformers' form has it

logger = logging.getLogger(__name__)


class _File(pydantic.BaseModel):
    """One file of a model.

    Attributes:
        bytes: Its size.
        crc32c: CRC-32C of its content; None: nobody knows it.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    bytes: Annotated[int, pydantic.Field(ge=0)]
    crc32c: Annotated[int, pydantic.Field(ge=0, lt=2**32)] | None

    def is_at(self, path: Path) -> bool:
        """Whether a file has this content."""
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        return self.crc32c is None or crc32c_of(path) == self.crc32c


_MARKER = pydantic.TypeAdapter(dict[str, _File])


def upload_folder(folder: Path, bucket: Bucket, prefix: str) -> None:
    """Make a prefix of a bucket the copy of a folder; `COMMITTED` is there when all of it is.

    The marker of another content goes first, so that no reader takes a mixture for a model.

    Raises:
        BucketError: The bucket cannot be read or written.
    """
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    described = {
        name: {"bytes": path.stat().st_size, "crc32c": crc32c_of(path)}
        for name, path in files.items()
    }
    content = json.dumps(described, indent=1).encode()
    marker = f"{prefix}/{COMMITTED}"
    if bucket.info(marker) is not None and bucket.read(marker) == content:
        return
    bucket.delete(marker)
    for blob in list(bucket.list(f"{prefix}/")):
        known = described.get(blob.name.removeprefix(f"{prefix}/"))
        if known is None or with_checksum(bucket, blob).crc32c != known["crc32c"]:
            bucket.delete(blob.name)
    upload_many(bucket, {f"{prefix}/{name}": path for name, path in files.items()})
    bucket.write(marker, content)


def fetch_folder(
    bucket: Bucket, folder: Path, *, progress: Callable[[Progress], None] | None = None
) -> Path:
    """Make a folder the copy of a model in a bucket; return it.

    Every byte of it is compared with the bucket's checksums, and with those of the marker. It gets
    its name when it is whole; what an interrupted fetch has brought is used by the next one.

    Args:
        bucket: Where the model is, at the bucket's own prefix.
        folder: Where it goes, in place of an older copy that may be there.
        progress: Told how far the download is.

    Raises:
        CheckpointError: The model is not whole there, or another process is fetching it.
        BucketError: The bucket cannot be read, or the disk has no room.
    """
    blobs = {blob.name: blob for blob in bucket.list() if "/" not in blob.name}
    files = _files(bucket, blobs)
    with disk_errors(folder):
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        if not lock.acquire():
            raise CheckpointError(
                f"Another process is fetching {bucket.url} to {folder}. Wait until it is done."
            )
        try:
            if _strangers(folder, files) or _lacking(folder, files):
                stage = folder.with_name(f".{folder.name}.fetch")
                _fill(stage, bucket, blobs, files, progress=progress)
                replace_folder(stage, folder)
        finally:
            lock.release()
    return folder


def _files(bucket: Bucket, blobs: Mapping[str, BlobInfo]) -> dict[str, _File]:
    """Return the files that make the model, by what its marker says, else by the listing alone."""
    if COMMITTED not in blobs:
        return _listed(bucket, blobs)
    content = bucket.read(COMMITTED)
    try:
        files = _MARKER.validate_json(content)
    except pydantic.ValidationError:
        raise _broken(bucket, f"{COMMITTED} holds {content[:80]!r}, which is no marker") from None
    for name, file in files.items():
        blob = blobs.get(name)
        if blob is None or blob.size != file.bytes or blob.crc32c not in (None, file.crc32c):
            what = "is missing" if blob is None else f"is not the file that {COMMITTED} tells of"
            raise _broken(bucket, f"{name} {what}")
    return files


def _listed(bucket: Bucket, blobs: Mapping[str, BlobInfo]) -> dict[str, _File]:
    """Return the files of a folder that somebody else put there, which has no marker."""
    if CONFIG not in blobs or ORIGIN in blobs or bucket.url.rstrip("/").endswith(f"/{FOLDER}"):
        raise CheckpointError(
            f"{bucket.url} has no {COMMITTED} object: no model is there, or its upload never "
            "finished. The command that trained the run finishes it; a folder that was copied "
            "there by other means can be copied to the disk, and named there."
        )
    logger.warning(
        "%s has no %s object: whether its upload was finished is not known", bucket.url, COMMITTED
    )
    return {name: _File(bytes=blob.size, crc32c=blob.crc32c) for name, blob in blobs.items()}


def _fill(
    stage: Path,
    bucket: Bucket,
    blobs: Mapping[str, BlobInfo],
    files: Mapping[str, _File],
    *,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Bring a model's files into a folder that may hold some of them."""
    wanted = [blobs[name] for name in _lacking(stage, files)]
    download_many(bucket, wanted, stage, progress=progress)
    for path in _strangers(stage, files):
        path.unlink()
    damaged = _lacking(stage, files)
    if damaged:
        for name in damaged:
            (stage / name).unlink(missing_ok=True)
        raise _broken(bucket, f"{damaged[0]} is not the file that {COMMITTED} tells of")
    fsync_directories(stage)


def _lacking(folder: Path, files: Mapping[str, _File]) -> list[str]:
    return [name for name, file in files.items() if not file.is_at(folder / name)]


def _strangers(folder: Path, names: Collection[str]) -> list[Path]:
    """Return files that are none of the model's: weights among them would be taken for its."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if path.is_file() and path.name not in names]


def _broken(bucket: Bucket, what: str) -> CheckpointError:
    return CheckpointError(
        f"{bucket.url} is damaged: {what}. Remove {COMMITTED} there, and run the command that "
        "trained the run again: it uploads the model anew."
    )
