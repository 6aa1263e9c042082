"""An object store: requests are retried, transfers verified, and damaged ones begun anew."""

import abc
import base64
import contextlib
import dataclasses
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from refocused.bucket.bucket import (
    ANONYMOUS,
    BlobInfo,
    UndescribedBlob,
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
from refocused.bucket.partial_files import PartFile, disk_errors, require_space
from refocused.bucket.retry import Attempts, Fault, RefusedRequestError, Retry
from refocused.system.errors import BucketError, CorruptObjectError

logger = logging.getLogger(__name__)
Response = TypeVar("Response")
Action = Literal["get", "list", "create", "delete"]

TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
SMALL_BYTES = 5 * 1024 * 1024  # uploaded in one request
CHUNK_BYTES = 16 * 1024 * 1024  # of a larger file, in one request
SHRINK = 4  # chunks that are cut off are divided by this
_RESTARTS = 3  # after bytes that do not match their checksum
_BAD_REQUEST = 400  # the bytes were damaged in transit, or the file changed
_NOT_FOUND = 404
_EXISTS = 412  # an object of that name exists; perhaps ours, if the response was lost
_BEYOND_END = 416  # the object ends before the range
_COMPRESSED = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress"}


# How a store describes an object: `name` (with the prefix), `size`, `crc32c` (in base64), and
# `generation`, as they arrived; `checksum` as in `BlobInfo`.
Resource = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Login:
    """Loaded credentials, and whose they are."""

    credentials: Any  # google-auth's credentials; on S3, the client that has them
    identity: str  # for messages


class Transport(abc.ABC):
    """The requests of one kind of store below a prefix, each sent once; names are below the prefix.

    A request that fails raises one of `fault_types`, or `RefusedRequestError`. Safe to share
    between threads.

    Args:
        bucket_name: The bucket.
        root: The prefix: empty, or ending in `/`.
        key_file: Of a service account; None: the environment's credentials.
        project: Pays for the requests.
    """

    scheme: ClassVar[str]
    unpacks = False  # whether the caller unpacks objects that are stored with Content-Encoding

    def __init__(
        self, bucket_name: str, root: str, *, key_file: Path | None, project: str | None
    ) -> None:
        self.bucket_name, self.root = bucket_name, root
        self.key_file, self.project = key_file, project
        self._login: Login | None = None
        self._is_stale = True
        self._lock = threading.Lock()
        self._thread = threading.local()

    @property
    @abc.abstractmethod
    def endpoint(self) -> str:
        """Address of the store's server."""

    @abc.abstractmethod
    def load(self) -> Login:
        """Load the credentials."""

    @abc.abstractmethod
    def fault_types(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that a failed request may raise."""

    @abc.abstractmethod
    def fault_of(self, error: Exception) -> Fault:
        """Interpret one of `fault_types`."""

    @abc.abstractmethod
    def remedy(self, fault: Fault, action: Action) -> str:
        """Return what to do about a permanent fault."""

    @abc.abstractmethod
    def page(self, prefix: str, token: str | None) -> tuple[list[Any], str | None]:
        """Return the resources of one page of a listing, and the token of the next page."""

    @abc.abstractmethod
    def describe(self, name: str) -> Resource:
        """Return an object's resource, with another `checksum` if the store keeps one."""

    @abc.abstractmethod
    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""

    @abc.abstractmethod
    def media(
        self, name: str, *, start: int, end: int | None = None, generation: str | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes `start` to `end` (inclusive) of an object."""

    @abc.abstractmethod
    def put(self, name: str, content: bytes, *, checksum: int, overwrite: bool | str) -> object:
        """Store a small object, whose CRC-32C the store compares; return its resource, if any."""

    @abc.abstractmethod
    def upload(
        self, store: "Store", name: str, source: Path, *, size: int, checksum: int
    ) -> object:
        """Store a new object in chunks, which `store` retries; return its resource, if any.

        The upload continues after a fault, with smaller chunks if the store kept nothing. Without
        a valid resource, the caller compares what is stored.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Remove one object."""

    def login(self) -> Login:
        """Return the credentials.

        Where they are forgotten and there are none any more, as in an outage of the metadata
        server, the old ones stay.
        """
        with self._lock:
            if self._is_stale or self._login is None:
                self._is_stale = False
                loaded = self.load()
                if self._login is None or loaded.identity != ANONYMOUS:
                    self._login = loaded
            return self._login

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are sent without credentials."""
        return self._login is not None and self._login.identity == ANONYMOUS

    def forget(self) -> None:
        """Load the credentials anew with the next request, since they may have been renewed."""
        self._is_stale, self._thread = True, threading.local()

    @property
    def address(self) -> str:
        """Return `SCHEME://bucket/prefix/`."""
        return f"{self.scheme}://{self.bucket_name}/{self.root}"

    def key(self, name: str) -> str:
        """Return an object's name in the bucket."""
        return self.root + checked_name(name, where=self.address)

    def require_key(self, key: object, name: str) -> None:
        """Raise `ConnectionError` (transient) if a response describes another object."""
        if key != self.root + name:
            text = f"the response is about another object or none: {repr(key)[:80]}"
            raise ConnectionError(text)

    def require_plain(self, name: str, encoding: str | None) -> None:
        """Refuse an object whose bytes are compressed, which its name does not say."""
        packed = _COMPRESSED & set(re.split(r"[,\s]+", (encoding or "").lower()))
        if packed and not self.unpacks and not name.endswith((".gz", ".zst")):
            raise RefusedRequestError(
                f"{self.address}{name}: it is stored with Content-Encoding: {encoding:.40}, so its "
                "bytes are compressed. Unpack it and store it again without, or exclude it."
            )


class Store:
    """The objects below `SCHEME://bucket/prefix`.

    Every request is retried after a transient fault. Attempts count only while no byte arrives,
    so a slow transfer never times out as a whole. Objects whose name ends in `/` (the console's
    "folders") are not listed. Creating the object sends no request.
    """

    _has_md5_etags: bool | None = None  # not known yet

    def __init__(self, url: str, transport: Transport, retry: Retry | None = None) -> None:
        self.url = url
        self.transport = transport
        self._retry = retry or Retry()

    @property
    def endpoint(self) -> str:
        """Address of the store's server."""
        return self.transport.endpoint

    @property
    def identity(self) -> str:
        """Whose credentials are used, for messages."""
        return self.transport.login().identity

    def address(self, name: str) -> str:
        """Return `SCHEME://bucket/prefix/name`."""
        return self.transport.address + name

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name."""
        token = None
        while True:
            items, following = self._page(prefix, token)
            for item in items:
                name = item["name"].removeprefix(self.transport.root)
                is_folder = not name or name.endswith("/")
                try:
                    blob: BlobInfo | None = self._blob(item)
                except ConnectionError:  # it takes a request of its own
                    try:
                        blob = None if is_folder else self.info(name)
                    except RefusedRequestError as error:
                        blob = UndescribedBlob(name, error)
                if blob is not None and name and not (is_folder and not blob.size):
                    yield blob
            if not following:
                return
            if following == token:
                raise BucketError(
                    f"{self.url}: the store's listing does not advance: page {token!r} names "
                    "itself as the next one. Check the store's status, then run again."
                )
            token = following

    def _page(self, prefix: str, token: str | None) -> tuple[Sequence[Resource], str | None]:
        """Return one page of a listing; one with the same invalid entry twice fails."""
        faults = set[str]()

        def send() -> tuple[Sequence[Resource], str | None]:
            items, following = self.transport.page(prefix, token)
            before = "the start"
            for item in items:
                name = item.get("name") if isinstance(item, Mapping) else None
                start = self.transport.root + prefix
                if not (isinstance(name, str) and name and name.startswith(start)):
                    text = "the listing holds an entry without a name of this prefix, after "
                    text = f"{text}{before!r}: {item!r:.100}"
                    if text in faults:
                        fix = "Remove that object, or use another prefix."
                        raise RefusedRequestError(f"{self.address(prefix)}: {text}. {fix}")
                    faults.add(text)
                    raise ConnectionError(text)
                before = name
            return items, following

        return self.send(send, prefix, "list")

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object; None if it does not exist."""

        def send() -> BlobInfo:
            resource = self.transport.describe(name)
            self.transport.require_key(resource.get("name"), name)
            try:
                return self._blob({"checksum": ""} | dict(resource))
            except ConnectionError as error:
                raise RefusedRequestError(
                    f"{self.address(name)}: {error}. Write the object again, or exclude it."
                ) from None

        try:
            return self.send(send, name, "get")
        except RefusedRequestError as refused:
            if refused.status != _NOT_FOUND or "bucket does not exist" in str(refused):
                raise
            return None

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""
        return self.send(lambda: self.transport.age_s(name), name, "get")

    def delete(self, name: str) -> None:
        """Remove one object, if it exists."""
        try:
            self.send(lambda: self.transport.delete(name), name, "delete")
        except RefusedRequestError as refused:
            if refused.status != _NOT_FOUND:
                raise

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
                arrived = len(content), extended_crc32c(0, content)
                if self._is_verified(blob, arrived, [content], received):
                    return content
                if restarts == _RESTARTS:
                    raise self._unverified(blob, received)
            restarts += 1

    def write(self, name: str, content: bytes, *, overwrite: bool | str = False) -> BlobInfo:
        """Store a small object. Other bytes of that name are an error unless `overwrite`."""
        checksum = extended_crc32c(0, content)
        put = functools.partial(
            self.transport.put, name, content, checksum=checksum, overwrite=overwrite
        )
        return self._store(name, (len(content), checksum), lambda: self.send(put, name, "create"))

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
                arrived = part.size, part.crc32c
                if self._is_verified(expected, arrived, blocks_of(part.path), received):
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
            upload = functools.partial(
                self.transport.upload, self, name, source, size=size, checksum=checksum
            )
            return self._store(name, (size, checksum), upload)
        require_checksum(source, found=extended_crc32c(0, content), expected=crc32c)
        return self.write(name, content)

    def _store(self, name: str, here: tuple[int, int], send: Callable[[], object]) -> BlobInfo:
        """Send until the store describes the object with the size and checksum of `here`.

        `send` returns the object's resource, if the store has verified the checksum that was sent
        along and the response is readable.
        """
        for restart in range(_RESTARTS + 1):
            sent = None
            try:
                if isinstance(resource := send(), Mapping):
                    with contextlib.suppress(ConnectionError):
                        self.transport.require_key(resource.get("name"), name)
                        sent = self._blob(resource)
            except RefusedRequestError as refused:
                last = restart == _RESTARTS
                if refused.status != _EXISTS and (refused.status != _BAD_REQUEST or last):
                    raise
            if (stored := sent or self.info(name)) is not None:
                stored_crc32c = stored.crc32c
                if stored_crc32c is None:  # the store keeps none, but has verified what was sent
                    stored_crc32c = here[1] if sent else crc32c_of_bytes(self, name)
                require_same(self.address(name), there=(stored.size, stored_crc32c), here=here)
                return stored
        raise BucketError(
            f"{self.address(name)}: the store confirmed the object, but does not have it. Another "
            "program or a lifecycle rule deletes it: check the bucket's settings, then run again."
        )

    def _read_range(
        self, name: str, *, start: int, length: int | None, generation: str | None = None
    ) -> bytes:
        if length == 0:
            return b""
        require_description(self.address(name), length or 0)
        end = None if length is None else start + length - 1

        def send() -> bytes:
            content = bytearray()
            for piece in self.transport.media(name, start=start, end=end, generation=generation):
                content += piece
                if length is not None and len(content) > length:
                    raise ConnectionError("the response has more bytes than were requested")
            return bytes(content)

        try:
            return self.send(send, name, "get")
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
                for piece in self.transport.media(
                    blob.name, start=before, generation=blob.generation
                ):
                    part.write(piece[: blob.size + 1 - part.size])
                    if part.size > blob.size:
                        return
                fault = Fault(f"the response ended after {part.size:,} bytes", transient=True)
            except self.transport.fault_types() as error:
                fault = self.transport.fault_of(error)
            if part.size > before:
                attempts.progressed()
            if part.size < blob.size:
                self.wait_after(fault, attempts, blob.name, "get")

    def _is_verified(
        self,
        blob: BlobInfo,
        arrived: tuple[int, int],
        blocks: Iterable[bytes],
        received: set[tuple[int, int]],
    ) -> bool:
        """Whether bytes of this size and CRC-32C are an object's; else add these to `received`.

        The first object shows whether the store's ETags are MD5s: they are not if the same bytes,
        which have another one, arrive twice.
        """
        if arrived[0] == blob.size and blob.crc32c in (None, arrived[1]):
            is_etag = (blob.checksum or "").startswith("etag ")
            if has_checksum(blob, blocks):
                self._has_md5_etags = self._has_md5_etags or is_etag
                return True
            if is_etag and self._has_md5_etags is None and arrived in received:
                text = "%s: the ETags of this store are no MD5s: objects without another checksum "
                text += "are verified only by their size."
                logger.warning(text, self.url)
                self._has_md5_etags = False
            if is_etag and self._has_md5_etags is False:
                return True
        received.add(arrived)
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

    def send(self, send: Callable[[], Response], name: str, action: Action) -> Response:
        """Return the response of a request, which `send` sends once, after retries.

        `name` and `action` are for messages. Raises `RefusedRequestError` for a permanent fault,
        and `BucketError` if no attempts are left.
        """
        attempts = self.attempts("request for", name)
        while True:
            try:
                return send()
            except self.transport.fault_types() as error:
                fault = self.transport.fault_of(error)
                self.wait_after(fault, attempts, name, action)

    def attempts(self, operation: str, name: str) -> Attempts:
        """Return a new count of the faults of one operation."""
        return Attempts(self._retry, operation=f"{operation} {self.address(name)}")

    def wait_after(self, fault: Fault, attempts: Attempts, name: str, action: Action) -> None:
        """Wait before the next attempt; raise as `Attempts`, or if the fault is permanent.

        Refused credentials are loaded anew once in an operation, since they may have been renewed
        meanwhile; where a permission is missing, only if nobody had logged in.
        """
        is_login = fault.status == 401 or (fault.status == 403 and self.transport.is_anonymous)
        if is_login and not attempts.is_renewed:
            attempts.is_renewed = True
            self.transport.forget()
        elif not fault.transient:
            text = f"{self.address(name)}: {fault.reason}. {self.transport.remedy(fault, action)}"
            raise RefusedRequestError(text, status=fault.status)
        else:
            attempts.wait_after(fault)

    def _blob(self, resource: Resource) -> BlobInfo:
        """Parse a resource; raise `ConnectionError` (transient) if it is incomplete or invalid."""
        size, generation = resource.get("size"), resource.get("generation")
        if not (str(size).isascii() and str(size).isdecimal() and len(str(size)) < 300):
            raise ConnectionError("the store describes it with no size")
        if not (
            isinstance(generation, str) and generation.isprintable() and 0 < len(generation) < 300
        ):
            raise ConnectionError("the store describes it with no generation")
        crc32c = resource.get("crc32c")
        try:
            content = None if crc32c is None else base64.b64decode(str(crc32c), validate=True)
        except ValueError:
            content = b""
        if content is not None and len(content) != 4:
            raise ConnectionError("the store describes it with no readable crc32c")
        return BlobInfo(
            name=resource["name"].removeprefix(self.transport.root),
            size=int(str(size)),
            crc32c=None if content is None else int.from_bytes(content, "big"),
            generation=generation,
            checksum=resource.get("checksum"),
        )


def crc32c_to_base64(checksum: int) -> str:
    """Encode a checksum as stores do: base64 of four big-endian bytes."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode("ascii")


def read_chunk(source: Path, offset: int, length: int, *, size: int) -> bytes:
    """Return bytes of a file; raise `BucketError` if it no longer has its `size`."""
    with disk_errors(source), source.open("rb") as file:
        content = os.pread(file.fileno(), length, offset)
    if len(content) < length:
        raise BucketError(
            f"{source}: ends at {offset + len(content):,} bytes, {size:,} expected. The file was "
            "truncated during the upload; upload it again when it is complete."
        )
    return content
