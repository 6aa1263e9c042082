"""A prefix of a Google Cloud Storage bucket: verified transfers that resume after faults."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from refocused.bucket.bucket import (
    BlobInfo,
    blocks_of,
    checked_name,
    crc32c_of,
    crc32c_of_bytes,
    extended_crc32c,
    has_checksum,
    require_checksum,
    require_description,
    require_same,
    size_and_checksum,
    with_checksum,
)
from refocused.bucket.gcs_errors import Fault, RefusedRequestError
from refocused.bucket.gcs_requests import ONCE, GoogleRequests
from refocused.bucket.gcs_upload import CREATE, ResumableUpload, new_blob
from refocused.bucket.partial_files import PartFile, disk_errors, require_space
from refocused.system.errors import BucketError, CorruptObjectError

logger = logging.getLogger(__name__)

SMALL_BYTES = 5 * 1024 * 1024  # uploaded in one request
_RESTARTS = 3  # after bytes that do not match their checksum
_BAD_REQUEST = 400  # the bytes were damaged in transit, or the file changed
_NOT_FOUND = 404
_EXISTS = 412  # an object of that name exists; perhaps ours, if the response was lost
_BEYOND_END = 416  # the object ends before the range
_READ = "storage.objects.get"


class GcsBucket(GoogleRequests):
    """The objects below `gs://bucket/prefix`.

    Every request is retried after a transient fault. Attempts count only while no byte arrives,
    so a slow transfer never times out as a whole. Objects whose name ends in `/` (the console's
    "folders") are not listed. Creating the object sends no request.

    Without a service account's key file, the application default credentials are used. If there
    are none, or STORAGE_EMULATOR_HOST is set, requests are anonymous. Raises `BucketError` if the
    address is not that of a bucket.
    """

    upload_type = ResumableUpload
    _has_md5_etags: bool | None = None  # not known yet

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name."""
        token = None
        while True:
            blobs, following = self.page(prefix, token)
            yield from blobs
            if not following:
                return
            if following == token:
                raise BucketError(
                    f"{self.url}: the store's listing does not advance: page {token!r} names "
                    "itself as the next one. Check the store's status, then run again."
                )
            token = following

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`, fewer at the object's end.

        A whole object is verified by its checksum, or its size where the store keeps none, and
        read again if it was overwritten meanwhile. A range cannot be verified.
        """
        if start or length is not None:
            return self._read_range(name, start=start, length=length)
        restarts, received = 0, set[tuple[int, int]]()
        while True:
            blob = self.info(name)
            if blob is None:
                text = f"there is no such object. Check the name against a listing of {self.url}."
                raise BucketError(f"{self.address(name)}: {text}")
            try:
                content = self._read_range(
                    name, start=0, length=blob.size, generation=blob.generation
                )
            except RefusedRequestError as refused:
                if refused.status != _NOT_FOUND or restarts == _RESTARTS:
                    raise
            else:
                found = len(content), extended_crc32c(0, content)
                if self._is_verified(blob, found, [content], received):
                    return content
                if restarts == _RESTARTS:
                    raise self._unverified(blob, received)
            restarts += 1

    def write(self, name: str, content: bytes, *, overwrite: bool | int = False) -> BlobInfo:
        """Store a small object. Other bytes of that name are an error unless `overwrite`."""
        checksum = extended_crc32c(0, content)

        def send_once() -> BlobInfo:
            blob = new_blob(self, name, checksum)
            match = None if overwrite is True else int(overwrite)
            blob.upload_from_string(
                content, content_type=None, if_generation_match=match, checksum=None, **ONCE
            )
            self._require_name(blob._properties, name)
            return self.blob_info(blob._properties)

        send = functools.partial(self.send, send_once, name, permission=CREATE)
        return self._store(name, (len(content), checksum), send)

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Download the listed generation of an object, with resumption; return its CRC-32C.

        The checksum is computed here over the whole file: the client library verifies nothing
        once a download was resumed. Where the store keeps no checksum of the whole object, only the
        size is compared.
        """
        checked_name(blob.name, where=self.url)
        expected = with_checksum(self, blob)
        received = set[tuple[int, int]]()
        with PartFile(target, total_bytes=expected.size, resume=True) as part:
            require_space(target.parent, needed_bytes=expected.size - part.size)
            for _ in range(_RESTARTS + 1):
                self._receive(expected, part)
                found = part.size, part.crc32c
                if self._is_verified(expected, found, blocks_of(part.path), received):
                    part.publish()
                    return part.crc32c
                part.restart()
            part.discard()
        raise self._unverified(expected, received)

    def local_file(self, blob: BlobInfo) -> None:
        """Return None: the objects are not local files."""

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; no-op if the object already has the same bytes."""
        checked_name(name, where=self.url)
        with disk_errors(source):
            size = source.stat().st_size
            content = source.read_bytes() if size <= SMALL_BYTES else None
            checksum = crc32c_of(source) if content is None and crc32c is None else crc32c
        if content is None:
            assert checksum is not None
            upload = self.upload_type(self, name, source, size=size, checksum=checksum)
            return self._store(name, (size, checksum), upload.send)
        require_checksum(source, found=extended_crc32c(0, content), expected=crc32c)
        return self.write(name, content)

    def _store(
        self, name: str, here: tuple[int, int], send: Callable[[], BlobInfo | None]
    ) -> BlobInfo:
        """Send until the store describes the object with the size and checksum of `here`.

        `send` returns the store's description if its response is readable. The store compares
        what arrives with the checksum that is sent along.
        """
        for restart in range(_RESTARTS + 1):
            sent = None
            try:
                sent = send()
            except RefusedRequestError as refused:
                last = restart == _RESTARTS
                if refused.status != _EXISTS and (refused.status != _BAD_REQUEST or last):
                    raise
            if (stored := sent or self.info(name)) is not None:
                found = stored.crc32c
                if found is None:  # the store keeps none, but has verified what was sent
                    found = here[1] if sent else crc32c_of_bytes(self, name)
                require_same(self.address(name), there=(stored.size, found), here=here)
                return stored
        raise BucketError(
            f"{self.address(name)}: the store confirmed the object, but does not have it. Another "
            "program or a lifecycle rule deletes it: check the bucket's settings, then run again."
        )

    def _read_range(
        self, name: str, *, start: int, length: int | None, generation: int | None = None
    ) -> bytes:
        if length == 0:
            return b""
        require_description(self.address(name), length or 0)
        end = None if length is None else start + length - 1

        def send() -> bytes:
            content = bytearray()
            for piece in self.media(name, start=start, end=end, generation=generation):
                content += piece
                if length is not None and len(content) > length:
                    raise ConnectionError("the response has more bytes than were requested")
            return bytes(content)

        try:
            return self.send(send, name, permission=_READ)
        except RefusedRequestError as refused:
            if refused.status == _BEYOND_END:
                return b""
            raise

    def _receive(self, blob: BlobInfo, part: PartFile) -> None:
        """Append to `part` until it has the object's size, in as many requests as needed.

        One byte beyond the size is kept, so that the caller sees a response that is too long.
        """
        attempts = self.attempts("downloading", blob.name)
        while part.size < blob.size:
            before = part.size
            try:
                for piece in self.media(blob.name, start=before, generation=blob.generation):
                    part.write(piece[: blob.size + 1 - part.size])
                    if part.size > blob.size:
                        return
                fault = Fault(f"the response ended after {part.size:,} bytes", transient=True)
            except self.fault_types() as error:
                fault = self.fault_of(error)
            if part.size > before:
                attempts.progressed()
            if part.size < blob.size:
                self.wait_after(fault, attempts, blob.name, permission=_READ)

    def _is_verified(
        self,
        blob: BlobInfo,
        found: tuple[int, int],
        blocks: Iterable[bytes],
        received: set[tuple[int, int]],
    ) -> bool:
        """Whether bytes of this size and CRC-32C are an object's; else add these to `received`.

        The first object shows whether the store's ETags are MD5s: they are not if the same bytes,
        which have another one, arrive twice.
        """
        if found[0] == blob.size and blob.crc32c in (None, found[1]):
            is_etag = (blob.checksum or "").startswith("etag ")
            if has_checksum(blob, blocks):
                self._has_md5_etags = self._has_md5_etags or is_etag
                return True
            if is_etag and self._has_md5_etags is None and found in received:
                text = "%s: the ETags of this store are no MD5s: objects without another checksum "
                text += "are verified only by their size."
                logger.warning(text, self.url)
                self._has_md5_etags = False
            if is_etag and self._has_md5_etags is False:
                return True
        received.add(found)
        return False

    def _unverified(self, blob: BlobInfo, received: set[tuple[int, int]]) -> BucketError:
        """Return the error of an object that arrived with wrong sizes or checksums.

        A damaged object arrives with the same wrong checksum each time. A page of a proxy has
        another size, and bytes that are altered on the way have other checksums.
        """
        size, crc32c = received.pop()
        kind = BucketError if received or size != blob.size else CorruptObjectError
        other = f", {blob.checksum}" if blob.checksum else ""
        return kind(
            f"{self.address(blob.name)}: {size_and_checksum(size, crc32c)} "
            f"{'and others ' if received else ''}received {_RESTARTS + 1} times in a row, "
            f"{size_and_checksum(blob.size, blob.crc32c)}{other} expected. The object is damaged, "
            "or something in between alters the responses (a proxy?): restore or exclude the "
            "object, or use another network."
        )
