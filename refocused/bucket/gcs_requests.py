"""One request to Google Cloud Storage, asked again while its fault may pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from refocused.bucket.bucket import BlobInfo, checked_name, crc32c_from_base64
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
_DESCRIBED = ("name", "size", "crc32c", "generation")  # what is read of an object's resource
_OK = 200
_STORE = "https://storage.googleapis.com"


class GoogleRequests:
    """What every operation on the objects below one prefix needs.

    Args:
        bucket_name: The bucket.
        root: Prefix of every object's name, empty or ending in `/`.
        connection: Who asks.
        policy: How often and how long a fault is waited out.
    """

    def __init__(
        self, bucket_name: str, root: str, *, connection: GoogleConnection, policy: RetryPolicy
    ) -> None:
        self.root = root
        self.connection = connection
        self._policy = policy
        self._address = f"gs://{bucket_name}/{root}"
        self._objects = f"/storage/v1/b/{bucket_name}/o"

    def address(self, name: str) -> str:
        """Return `gs://bucket/prefix/name`."""
        return self._address + name

    def blob(self, name: str, *, generation: int | None = None) -> Any:
        """Return this thread's `google.cloud.storage.Blob` of a name; nothing is asked.

        Raises:
            BucketError: The name would leave its folder once it is downloaded.
        """
        checked_name(name, where=self._address)
        return self.connection.bucket.blob(self.root + name, generation=generation)

    def media_url(self, name: str) -> str:
        """Return the URL of an object's bytes; raises as `blob` does."""
        return f"{_endpoint()}/download{self._path(name)}"

    def parameters(self, **chosen: str | int | None) -> dict[str, str]:
        """Return a query: what is not None, and the project that pays."""
        named = chosen | {"userProject": self.connection.project}
        return {key: str(value) for key, value in named.items() if value is not None}

    def page(self, prefix: str, token: str | None, *, objects: int) -> tuple[list[object], object]:
        """Ask once for a page of a listing; return its objects' resources, and the next token.

        Raises:
            Exception: One of `fault_types`.
        """
        query = self.parameters(
            prefix=self.root + prefix,
            pageToken=token,
            maxResults=objects,
            fields=f"items({','.join(_DESCRIBED)}),nextPageToken",
        )
        page = self._resource(self._objects, query)
        items = page.get("items", []) if isinstance(page, Mapping) else None
        if not isinstance(page, Mapping) or not isinstance(items, list):
            raise ConnectionError("the store's answer is no listing")
        return items, page.get("nextPageToken")

    def listed(self, fields: object) -> BlobInfo | None:
        """Describe an object of a listing; None when it is gone, or is the console's "folder".

        One that the listing describes in part is asked for by itself.

        Raises:
            ConnectionError: It has no name.
            BucketError: Its own description is not whole either.
        """
        name = fields.get("name") if isinstance(fields, Mapping) else None
        if not isinstance(name, str) or not name.startswith(self.root):
            raise ConnectionError("the store's listing holds an object without a name")
        if name.endswith("/"):
            return None
        try:
            return self.described_in(fields)
        except ConnectionError:
            return self.info(name.removeprefix(self.root))

    def described(self, blob: Any) -> BlobInfo:
        """Describe a blob by the metadata that were received; errors are `described_in`'s."""
        try:
            return self.described_in({field: getattr(blob, field) for field in _DESCRIBED})
        except (AttributeError, TypeError, ValueError):
            raise ConnectionError("the store's answer describes no object") from None

    def described_in(self, fields: object) -> BlobInfo:
        """Describe an object by its resource in the store's JSON; it may have no checksum.

        Raises:
            ConnectionError: That is no such resource; it is a fault that may pass.
        """
        if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
            raise ConnectionError("the store's answer describes no object")
        return BlobInfo(
            name=fields["name"].removeprefix(self.root),
            size=_number(fields, "size"),
            crc32c=_checksum(fields.get("crc32c")),
            generation=_number(fields, "generation"),
        )

    def info(self, name: str) -> BlobInfo | None:
        """Ask for an object's description; None when there is none of that name.

        Raises:
            BucketError: The store describes it without a size or a generation.
        """

        def ask() -> BlobInfo:
            fields = self._resource(self._path(name), self.parameters(fields=",".join(_DESCRIBED)))
            try:
                return self.described_in(fields)
            except ConnectionError as error:
                if isinstance(fields, Mapping) and fields.get("name") == self.root + name:
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
        """Remove an object; absent is fine."""
        path, query = self._path(name), self.parameters()
        try:
            self.ask(
                lambda: self._answer("DELETE", path, query),
                name,
                permission="storage.objects.delete",
            )
        except RefusedRequestError as refused:
            if refused.status != 404:
                raise

    def ask(self, ask: Callable[[], Answer], name: str, *, permission: str) -> Answer:
        """Return a request's answer.

        Args:
            ask: Sends the request once.
            name: The object it is about, or the prefix.
            permission: What it needs, such as `storage.objects.get`; named when it is missing.

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
        return refusal(
            fault,
            address=self.address(name),
            permission=permission,
            identity=self.connection.identity,
        )

    def _path(self, name: str) -> str:
        checked_name(name, where=self._address)
        return f"{self._objects}/{quote(self.root + name, safe='')}"

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
    return os.environ.get("STORAGE_EMULATOR_HOST") or _STORE


def _number(fields: Mapping[str, object], name: str) -> int:
    """Return a count that the store spells in decimal digits."""
    text = str(fields.get(name))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ConnectionError(f"the store describes it with no {name}")
    return int(text)


def _checksum(text: object) -> int | None:
    if text is None:
        return None
    try:
        return crc32c_from_base64(str(text))
    except ValueError:
        raise ConnectionError("the store describes it with no readable crc32c") from None
