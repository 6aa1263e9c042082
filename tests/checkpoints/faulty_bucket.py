"""A folder as a run's bucket, with faults that a test chooses."""

from collections.abc import Iterator
from pathlib import Path

from checkpoints.step_samples import PREFIX

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.system.errors import BucketError


class FaultyBucket(DirectoryBucket):
    """Records uploads and reads; can be down for some requests or all, or lose an object."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        super().__init__(path)
        self.steps = path / PREFIX
        self.sent: list[str] = []
        self.reads: list[str] = []
        self.is_down = False
        self.failing = 0  # of the next requests
        self.lost: str | None = None  # right after its upload

    def _request(self) -> None:
        if self.is_down or self.failing > 0:
            self.failing -= 1
            raise BucketError("the bucket is down.")

    def _path(self, name: str) -> Path:
        self._request()
        return super()._path(name)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self._request()
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
