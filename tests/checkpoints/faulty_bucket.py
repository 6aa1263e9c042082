"""A folder as a run's bucket, with faults that a test chooses."""

from collections.abc import Iterator
from pathlib import Path

from checkpoints.step_samples import PREFIX

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.system.errors import BucketError


class FaultyBucket(DirectoryBucket):
    """Records uploads and reads; can be down, lose an object, or fail after some removals."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        super().__init__(path)
        self.steps = path / PREFIX
        self.sent: list[str] = []
        self.reads: list[str] = []
        self.is_down = False
        self.lost: str | None = None  # right after its upload
        self.removals_left: int | None = None

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if self.is_down:
            raise BucketError("the bucket is down.")
        return super().list(prefix)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(name)
        return super().read(name, start=start, length=length)

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        self.sent.append(Path(name).name)
        stored = super().upload(source, name, crc32c=crc32c)
        if self.lost is not None and name.endswith(self.lost):
            self.delete(name)
        return stored

    def delete(self, name: str) -> None:
        if self.removals_left is not None:
            if not self.removals_left:
                raise BucketError("killed")
            self.removals_left -= 1
        super().delete(name)
