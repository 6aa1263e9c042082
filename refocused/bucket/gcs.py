"""A prefix of a Google Cloud Storage bucket: resumed, verified, patient with passing faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, checked_name, extended_crc32c
from refocused.bucket.gcs_client import GoogleConnection
from refocused.bucket.gcs_errors import Fault, RefusedRequestError, RetryPolicy, fault_types
from refocused.bucket.gcs_requests import GoogleRequests
from refocused.bucket.google_upload import Content, bytes_content, file_content, store
from refocused.bucket.media import read_media, stream_media
from refocused.bucket.partial_files import PartFile, require_space
from refocused.bucket.stored import crc32c_of_bytes, with_checksum
from refocused.system.errors import BucketError

_PAGE_OBJECTS = 1000  # the most that one page of a listing holds
_FRESH_STARTS = 3  # after bytes that do not match their checksum
_READ = "storage.objects.get"
_ADDRESS = re.compile(r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(/(?P<prefix>.*))?")


@dataclasses.dataclass(frozen=True, slots=True)
class _Page:
    blobs: tuple[BlobInfo, ...]
    next_token: str | None


class GcsBucket:
    """The objects below `gs://bucket/prefix`.

    Nothing is asked before the first use. Every request is tried again while its fault may pass;
    attempts are counted only while no byte arrives, so a slow transfer never times out as a whole.
    Objects whose name ends in `/` (the console's "folders") are not listed.

    Args:
        url: `gs://bucket` or `gs://bucket/prefix`.
        credentials_file: Service account key; None: STORAGE_EMULATOR_HOST (anonymous), else the
            application default credentials, else anonymous reads of public buckets.
        project: Project that pays for the requests to a requester-pays bucket.
        retry: How often and how long a fault is waited out.

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
        prefix = (address["prefix"] or "").strip("/")
        self.url = url.rstrip("/")
        self._requests = GoogleRequests(
            address["bucket"],
            f"{prefix}/" if prefix else "",
            connection=GoogleConnection(
                address["bucket"], credentials_file=credentials_file, project=project
            ),
            policy=retry or RetryPolicy(),
        )

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name.

        `prefix` is plain text: `step_5` also yields `step_50/...`; end it with `/` to mean a
        folder.
        """
        token = None
        while True:
            page = self._page(prefix, token)
            yield from page.blobs
            if not page.next_token:
                return
            if page.next_token == token:
                raise BucketError(
                    f"{self.url}: the store's listing does not go on: its page {token!r} names "
                    "itself as the next one. See the store's status, then run again."
                )
            token = page.next_token

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object, or return None when there is none of that name."""
        return self._requests.info(name)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`; fewer when the object ends before.

        A whole object is checked against its checksum, or its size where the store keeps none. A
        part cannot be checked: the store keeps one checksum for all of it.
        """
        if start or length is not None:
            return self._read_range(name, start=start, length=length)
        blob = self._existing(name)
        for _ in range(_FRESH_STARTS + 1):
            content = self._read_range(name, start=0, length=blob.size, generation=blob.generation)
            if len(content) == blob.size and _agrees(extended_crc32c(0, content), blob):
                return content
        raise self._corrupt(blob, extended_crc32c(0, content))

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        """Store a small object; an existing one stays as it is unless `overwrite`."""
        return self._store(name, bytes_content(self._requests, name, content, overwrite=overwrite))

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Fetch a whole object through a temporary file, resumed after faults; return its CRC-32C.

        The bytes are those of the generation that `blob` describes, and the checksum is computed
        here over the whole file: the client library checks nothing once a download was resumed.
        Where the store keeps no checksum (customer-supplied keys), only the size is compared.

        Raises:
            BucketError: Gone, refused, still not matching its checksum after three fresh starts,
                out of attempts, or the disk is full.
        """
        checked_name(blob.name, where=self.url)
        wanted = with_checksum(self, blob)
        with PartFile(target, total_bytes=wanted.size, resume=True) as part:
            require_space(target.parent, needed_bytes=wanted.size - part.size)
            for _ in range(_FRESH_STARTS + 1):
                self._receive(wanted, part)
                if part.size == wanted.size and _agrees(part.crc32c, wanted):
                    part.publish()
                    return part.crc32c
                is_longer, found = part.size > wanted.size, part.crc32c
                part.restart()
            part.discard()
        if is_longer:
            raise BucketError(
                f"{self._requests.address(wanted.name)}: {_FRESH_STARTS + 1} times over, more than "
                f"the {wanted.size:,} bytes that were listed came. Something on the way changes "
                "the answers (a proxy?): use another network, or exclude the object."
            )
        raise self._corrupt(wanted, found)

    def local_file(self, blob: BlobInfo) -> None:
        """Return None: no object of Google Cloud Storage is a file here."""

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; done already when the same bytes are there.

        Args:
            source: The file; it must not change meanwhile.
            name: Its name in the bucket.
            crc32c: Its checksum where that is known, which saves reading it twice.
        """
        checked_name(name, where=self.url)
        content = file_content(self._requests, name, source, crc32c=crc32c)
        return self._store(name, content)

    def delete(self, name: str) -> None:
        """Remove one object; absent is fine."""
        self._requests.delete(name)

    def _store(self, name: str, content: Content) -> BlobInfo:
        return store(
            self._requests, name, content, stored_crc32c=lambda: crc32c_of_bytes(self, name)
        )

    def _existing(self, name: str) -> BlobInfo:
        blob = self.info(name)
        if blob is None:
            raise BucketError(
                f"{self._requests.address(name)}: there is no such object. "
                f"List the bucket to see what it holds: gcloud storage ls {self.url}"
            )
        return blob

    def _page(self, prefix: str, token: str | None) -> _Page:
        def ask() -> _Page:
            items, following = self._requests.page(prefix, token, objects=_PAGE_OBJECTS)
            blobs = [self._requests.listed(item) for item in items]
            return _Page(
                blobs=tuple(blob for blob in blobs if blob is not None),
                next_token=None if following is None else str(following),
            )

        return self._requests.ask(ask, prefix, permission="storage.objects.list")

    def _read_range(
        self, name: str, *, start: int, length: int | None, generation: int | None = None
    ) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else start + length - 1

        def ask() -> bytes:
            return read_media(self._requests, name, start=start, end=end, generation=generation)

        try:
            return self._requests.ask(ask, name, permission=_READ)
        except RefusedRequestError as refused:
            if refused.status == 416:  # the object ends before `start`
                return b""
            raise

    def _receive(self, blob: BlobInfo, part: PartFile) -> None:
        """Append to `part` until it has the object's size, over as many requests as it takes.

        Of an answer that is longer, one byte is kept: enough to tell it by.
        """
        attempts = self._requests.attempts("downloading", blob.name)
        while part.size < blob.size:
            before = part.size
            try:
                for piece in stream_media(
                    self._requests, blob.name, start=before, generation=blob.generation
                ):
                    part.write(piece[: blob.size + 1 - part.size])
                    if part.size > blob.size:
                        return
                fault = Fault(f"the answer ended after {part.size:,} bytes", transient=True)
            except fault_types() as error:
                fault = self._requests.passing(error, blob.name, permission=_READ)
            if part.size > before:
                attempts.progressed()
            if part.size < blob.size:
                attempts.wait_after(fault)

    def _corrupt(self, blob: BlobInfo, found: int) -> BucketError:
        expected = f"{blob.size:,} bytes" if blob.crc32c is None else f"{blob.crc32c:#010x}"
        return BucketError(
            f"{self._requests.address(blob.name)}: crc32c {found:#010x} received "
            f"{_FRESH_STARTS + 1} times over, {expected} expected. The object or the way to it is "
            "damaged: restore the object, or exclude it."
        )


def _agrees(found: int, blob: BlobInfo) -> bool:
    """Whether bytes have an object's checksum, or it has none."""
    return blob.crc32c in (None, found)
