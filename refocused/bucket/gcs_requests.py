"""Requests to Google Cloud Storage, repeated while their fault may pass."""

from __future__ import annotations

import base64
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from refocused.bucket.bucket import BlobInfo, checked_name
from refocused.bucket.gcs_client import GoogleConnection
from refocused.bucket.gcs_errors import (
    Attempts,
    Fault,
    RefusedRequestError,
    RetryPolicy,
    fault_of,
    fault_types,
    refusal,
)

Answer = TypeVar("Answer")

TIMEOUT_S = (10.0, 60.0)  # connect, and silence between two pieces of an answer
# What the library must not do by itself: its retries end 120 s after the call began, ignore
# Retry-After and leave resumed downloads unchecked.
ONCE = {"retry": None, "timeout": TIMEOUT_S}
PIECE_BYTES = 256 * 1024  # the library hands on 8 KiB: half of the processor's time of a download
_DESCRIBED = ("name", "size", "crc32c", "generation")  # what is read of an object's resource
_PAGE_OBJECTS = 1000  # the most that one page of a listing holds
_OK, _PARTIAL = 200, 206
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class GoogleRequests:
    """The requests about the objects below `root`, a prefix that is empty or ends in `/`."""

    def __init__(
        self, bucket_name: str, root: str, *, connection: GoogleConnection, policy: RetryPolicy
    ) -> None:
        self.connection = connection
        self._root = root
        self._policy = policy
        self._address = f"gs://{bucket_name}/{root}"
        self._objects = f"/storage/v1/b/{bucket_name}/o"

    def address(self, name: str) -> str:
        """Return `gs://bucket/prefix/name`."""
        return self._address + name

    def blob(self, name: str) -> Any:
        """Return this thread's `google.cloud.storage.Blob` of a name, without a request."""
        checked_name(name, where=self._address)
        return self.connection.bucket.blob(self._root + name)

    def page(self, prefix: str, token: str | None) -> tuple[list[BlobInfo], str | None]:
        """Return the objects of one page of a listing, and the token of the next page.

        An object that the listing describes in part gets a request of its own; the console's
        "folders", whose names end in `/`, are left out.
        """
        query = self._query(
            prefix=self._root + prefix,
            pageToken=token,
            maxResults=_PAGE_OBJECTS,
            fields=f"items({','.join(_DESCRIBED)}),nextPageToken",
        )

        def ask() -> tuple[list[BlobInfo], str | None]:
            page = self._resource(self._objects, query)
            items = page.get("items", []) if isinstance(page, Mapping) else None
            if not isinstance(page, Mapping) or not isinstance(items, list):
                raise ConnectionError("the store's answer is no listing")
            found = [self._listed(item) for item in items]
            following = page.get("nextPageToken")
            return [one for one in found if one], None if following is None else str(following)

        return self.ask(ask, prefix, permission="storage.objects.list")

    def _listed(self, fields: object) -> BlobInfo | None:
        name = fields.get("name") if isinstance(fields, Mapping) else None
        if not isinstance(name, str) or not name.startswith(self._root):
            raise ConnectionError("the store's listing holds an object without a name")
        if name.endswith("/"):
            return None
        try:
            return self.described(fields)
        except ConnectionError:
            return self.info(name.removeprefix(self._root))

    def described(self, fields: object) -> BlobInfo:
        """Describe an object by its resource in the store's JSON; it may have no checksum.

        Raises:
            ConnectionError: That is no such resource; it is a fault that may pass.
        """
        if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
            raise ConnectionError("the store's answer describes no object")
        return BlobInfo(
            name=fields["name"].removeprefix(self._root),
            size=_number(fields, "size"),
            crc32c=_checksum(fields.get("crc32c")),
            generation=_number(fields, "generation"),
        )

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object, or return None when there is none of that name."""
        path, query = self._path(name), self._query(fields=",".join(_DESCRIBED))

        def ask() -> BlobInfo:
            fields = self._resource(path, query)
            try:
                return self.described(fields)
            except ConnectionError as error:
                if isinstance(fields, Mapping) and fields.get("name") == self._root + name:
                    raise RefusedRequestError(
                        f"{self.address(name)}: {error}. Write the object again, or exclude it."
                    ) from None
                raise

        try:
            return self.ask(ask, name, permission="storage.objects.get")
        except RefusedRequestError as refused:
            if refused.status == 404 and "bucket does not exist" not in str(refused):
                return None
            raise

    def delete(self, name: str) -> None:
        """Remove one object; absent is fine."""
        send = functools.partial(self._answer, "DELETE", self._path(name), self._query())
        try:
            self.ask(send, name, permission="storage.objects.delete")
        except RefusedRequestError as refused:
            if refused.status != 404:
                raise

    def media(
        self, name: str, *, start: int, end: int | None = None, generation: int | None = None
    ) -> Iterator[bytes]:
        """Ask once for the bytes `start` to `end` (inclusive) of an object; yield them.

        See cloud.google.com/storage/docs/json_api/v1/objects/get.

        Raises:
            Exception: One of `fault_types`; what came before it has been yielded.
        """
        from requests import RequestException

        is_part = bool(start) or end is not None
        headers = {"Accept-Encoding": "gzip"}  # an object stored in gzip comes as it is stored
        if is_part:
            headers["Range"] = f"bytes={start}-{'' if end is None else end}"
        with self.connection.session.get(
            f"{_endpoint()}/download{self._path(name)}",
            params=self._query(alt="media", generation=generation),
            headers=headers,
            stream=True,
            timeout=TIMEOUT_S,
        ) as answer:
            if not answer.ok:
                _ = answer.content  # says why, and is read while the connection is there
                answer.raise_for_status()
            if answer.status_code not in (_OK, _PARTIAL):
                raise RequestException(
                    f"HTTP {answer.status_code}, which holds no part of the object"
                )
            if is_part and not _is_from(start, answer):
                raise RequestException("another part of the object was answered than was asked for")
            while piece := answer.raw.read1(PIECE_BYTES, decode_content=False):
                yield piece

    def ask(self, ask: Callable[[], Answer], name: str, *, permission: str) -> Answer:
        """Return the answer of a request about an object or a prefix; `ask` sends it once.

        `permission` is what it needs, such as `storage.objects.get`; named when it is missing.

        Raises:
            RefusedRequestError: It will fail again.
            BucketError: The attempts are spent.
        """
        attempts = self.attempts("asking", name)
        while True:
            try:
                return ask()
            except fault_types() as error:
                attempts.wait_after(self.passing(error, name, permission=permission))

    def attempts(self, doing: str, name: str) -> Attempts:
        """Return a new count of the faults of one operation."""
        return Attempts(self._policy, what=f"{doing} {self.address(name)}")

    def passing(self, error: Exception, name: str, *, permission: str) -> Fault:
        """Return the fault behind one of `fault_types` when it may pass; raise when not."""
        fault = fault_of(error)
        if not fault.transient:
            raise self.refused(fault, name, permission=permission) from error
        return fault

    def refused(self, fault: Fault, name: str, *, permission: str) -> RefusedRequestError:
        """Build the error of a fault that will not pass."""
        address, identity = self.address(name), self.connection.identity
        return refusal(fault, address=address, permission=permission, identity=identity)

    def _path(self, name: str) -> str:
        checked_name(name, where=self._address)
        return f"{self._objects}/{quote(self._root + name, safe='')}"

    def _query(self, **chosen: str | int | None) -> dict[str, str]:
        named = chosen | {"userProject": self.connection.project}
        return {key: str(value) for key, value in named.items() if value is not None}

    def _resource(self, path: str, query: Mapping[str, str]) -> object:
        """Ask once for something that the store describes in JSON."""
        answer = self._answer("GET", path, query)
        if answer.status_code != _OK:
            raise ConnectionError(f"HTTP {answer.status_code}, which describes nothing")
        content: object = answer.json()
        return content

    def _answer(self, method: str, path: str, query: Mapping[str, str]) -> Any:
        answer = self.connection.session.request(
            method, _endpoint() + path, params=query, timeout=ONCE["timeout"]
        )
        answer.raise_for_status()
        return answer


def _endpoint() -> str:
    return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"


def _is_from(start: int, answer: Any) -> bool:
    """Whether an answer begins at a byte; some proxies answer a part with status 200."""
    told = answer.headers.get("Content-Range")
    if told is None:
        return bool(answer.status_code == _PARTIAL)
    found = _RANGE.fullmatch(told)
    return found is not None and found[1].lstrip("0") == str(start).lstrip("0")


def _number(fields: Mapping[str, object], name: str) -> int:
    """Return a count that the store spells in decimal digits."""
    text = str(fields.get(name))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ConnectionError(f"the store describes it with no {name}")
    return int(text)


def crc32c_to_base64(checksum: int) -> str:
    """Spell a checksum as Google Cloud Storage does: base64 of four big-endian bytes."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode("ascii")


def _checksum(text: object) -> int | None:
    if text is None:
        return None
    try:
        content = base64.b64decode(str(text), validate=True)
    except ValueError:
        content = b""
    if len(content) != 4:
        raise ConnectionError("the store describes it with no readable crc32c")
    return int.from_bytes(content, "big")
