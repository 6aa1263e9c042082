"""A prefix of a Google Cloud Storage bucket: resumed, verified, patient with passing faults."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from refocused.bucket.bucket import (
    BlobInfo,
    checked_name,
    crc32c_of,
    extended_crc32c,
    require_checksum,
    require_same,
)
from refocused.bucket.gcs_client import GoogleConnection
from refocused.bucket.gcs_errors import Fault, RefusedRequestError, RetryPolicy, fault_types
from refocused.bucket.gcs_requests import ONCE, GoogleRequests
from refocused.bucket.gcs_upload import CREATE, ResumableUpload, new_blob
from refocused.bucket.partial_files import PartFile, disk_errors, require_space
from refocused.bucket.stored import crc32c_of_bytes, with_checksum
from refocused.system.errors import BucketError

SMALL_BYTES = 8 * 1024 * 1024  # uploaded in one request
_FRESH_STARTS = 3  # after bytes that do not match their checksum
_BAD_REQUEST = 400  # the bytes were damaged on the way, or the file changed
_EXISTS = 412  # an object of that name is there: another's, or ours whose answer was lost
_READ = "storage.objects.get"
_ADDRESS = re.compile(r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(/(?P<prefix>.*))?")


class GcsBucket(GoogleRequests):
    """The objects below `gs://bucket/prefix`.

    No request is sent before the first use. Every request is retried while its fault may pass;
    attempts are counted only while no byte arrives, so a slow transfer never times out as a whole.
    Objects whose name ends in `/` (the console's "folders") are not listed.

    Without the key file of a service account requests are anonymous where STORAGE_EMULATOR_HOST is
    set; else the application default credentials are used, else public buckets are read.

    Raises:
        BucketError: The address names no valid bucket.
    """

    def __init__(
        self,
        url: str,
        *,
        credentials_file: Path | None = None,
        project: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        address = _ADDRESS.fullmatch(url)
        if address is None:
            raise BucketError(
                f"{url!r} is not the address of a bucket. Write gs://bucket/prefix; a bucket's "
                "name has 3 to 222 lower-case letters, digits, dashes, dots and underscores."
            )
        name, prefix = address["bucket"], (address["prefix"] or "").strip("/")
        self.url = url.rstrip("/")
        connection = GoogleConnection(name, credentials_file=credentials_file, project=project)
        root = f"{prefix}/" if prefix else ""
        super().__init__(name, root, connection=connection, policy=retry or RetryPolicy())

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
                    f"{self.url}: the store's listing does not go on: its page {token!r} names "
                    "itself as the next one. See the store's status, then run again."
                )
            token = following

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`; fewer when the object ends before.

        A whole object is checked against its checksum, or its size where the store keeps none. A
        part cannot be checked: the store keeps one checksum for all of it.
        """
        if start or length is not None:
            return self._read_range(name, start=start, length=length)
        blob = self.info(name)
        if blob is None:
            raise BucketError(
                f"{self.address(name)}: there is no such object. "
                f"List the bucket to see what it holds: gcloud storage ls {self.url}"
            )
        for _ in range(_FRESH_STARTS + 1):
            content = self._read_range(name, start=0, length=blob.size, generation=blob.generation)
            found = extended_crc32c(0, content)
            if len(content) == blob.size and blob.crc32c in (None, found):
                return content
        raise self._corrupt(blob, found)

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        """Store a small object; an existing one stays as it is unless `overwrite`."""
        checksum = extended_crc32c(0, content)

        def send() -> BlobInfo:
            blob = new_blob(self, name, checksum)
            match = None if overwrite else 0
            blob.upload_from_string(
                content, content_type=None, if_generation_match=match, checksum=None, **ONCE
            )
            return self.described(blob._properties)

        ask = functools.partial(self.ask, send, name, permission=CREATE)
        return self._store(name, (len(content), checksum), ask)

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Fetch a whole object through a temporary file, resumed after faults; return its CRC-32C.

        The bytes are those of the generation that `blob` describes, and the checksum is computed
        here over the whole file: the client library checks nothing once a download was resumed.
        Where the store keeps no checksum (customer-supplied keys), only the size is compared.
        """
        checked_name(blob.name, where=self.url)
        wanted = with_checksum(self, blob)
        with PartFile(target, total_bytes=wanted.size, resume=True) as part:
            require_space(target.parent, needed_bytes=wanted.size - part.size)
            for _ in range(_FRESH_STARTS + 1):
                self._receive(wanted, part)
                if part.size == wanted.size and wanted.crc32c in (None, part.crc32c):
                    part.publish()
                    return part.crc32c
                is_longer, found = part.size > wanted.size, part.crc32c
                part.restart()
            part.discard()
        if is_longer:
            raise BucketError(
                f"{self.address(wanted.name)}: {_FRESH_STARTS + 1} times over, more than "
                f"the {wanted.size:,} bytes that were listed came. Something on the way changes "
                "the answers (a proxy?): use another network, or exclude the object."
            )
        raise self._corrupt(wanted, found)

    def local_file(self, blob: BlobInfo) -> None:
        """Return None: no object of Google Cloud Storage is a file here."""

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; done already when the same bytes are there."""
        checked_name(name, where=self.url)
        with disk_errors(source):
            size = source.stat().st_size
            content = source.read_bytes() if size <= SMALL_BYTES else None
            checksum = crc32c_of(source) if content is None and crc32c is None else crc32c
        if content is None:
            assert checksum is not None
            upload = ResumableUpload(self, name, source, size=size, checksum=checksum)
            return self._store(name, (size, checksum), upload.send)
        require_checksum(source, found=extended_crc32c(0, content), expected=crc32c)
        return self.write(name, content)

    def _store(
        self, name: str, here: tuple[int, int], send: Callable[[], BlobInfo | None]
    ) -> BlobInfo:
        """Send until the store has described the object with our size and checksum.

        `send` makes one attempt and returns the store's description, where that is readable. The
        store compares what arrives with the checksum that goes along.
        """
        address = self.address(name)
        for start in range(_FRESH_STARTS + 1):
            sent = None
            try:
                sent = send()
            except RefusedRequestError as refused:
                last = start == _FRESH_STARTS
                if refused.status != _EXISTS and (refused.status != _BAD_REQUEST or last):
                    raise
            if (stored := sent or self.info(name)) is not None:
                found = stored.crc32c
                if found is None:  # the store keeps none, but it has compared what was sent
                    found = here[1] if sent else crc32c_of_bytes(self, name)
                require_same(address, there=(stored.size, found), here=here)
                return stored
        raise BucketError(
            f"{address}: the store said that it has it, and does not. Another program deletes "
            "there, or a lifecycle rule does: see the bucket's settings, then run again."
        )

    def _read_range(
        self, name: str, *, start: int, length: int | None, generation: int | None = None
    ) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else start + length - 1

        def ask() -> bytes:
            content = bytearray()
            for piece in self.media(name, start=start, end=end, generation=generation):
                content += piece
                if length is not None and len(content) > length:
                    raise ConnectionError("more bytes were answered than were asked for")
            return bytes(content)

        try:
            return self.ask(ask, name, permission=_READ)
        except RefusedRequestError as refused:
            if refused.status == 416:  # the object ends before `start`
                return b""
            raise

    def _receive(self, blob: BlobInfo, part: PartFile) -> None:
        """Append to `part` until it has the object's size, over as many requests as it takes.

        Of an answer that is longer, one byte is kept: enough to tell it by.
        """
        attempts = self.attempts("downloading", blob.name)
        while part.size < blob.size:
            before = part.size
            try:
                for piece in self.media(blob.name, start=before, generation=blob.generation):
                    part.write(piece[: blob.size + 1 - part.size])
                    if part.size > blob.size:
                        return
                fault = Fault(f"the answer ended after {part.size:,} bytes", transient=True)
            except fault_types() as error:
                fault = self.passing(error, blob.name, permission=_READ)
            if part.size > before:
                attempts.progressed()
            if part.size < blob.size:
                attempts.wait_after(fault)

    def _corrupt(self, blob: BlobInfo, found: int) -> BucketError:
        expected = f"{blob.size:,} bytes" if blob.crc32c is None else f"{blob.crc32c:#010x}"
        return BucketError(
            f"{self.address(blob.name)}: crc32c {found:#010x} received "
            f"{_FRESH_STARTS + 1} times over, {expected} expected. The object or the way to it is "
            "damaged: restore the object, or exclude it."
        )
