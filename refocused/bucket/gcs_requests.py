"""Requests to Google Cloud Storage, retried after transient faults."""

import base64
import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from refocused.bucket.bucket import BlobInfo, UndescribedBlob, checked_name
from refocused.bucket.gcs_client import GoogleConnection
from refocused.bucket.gcs_errors import (
    Attempts,
    Fault,
    RefusedRequestError,
    RetryPolicy,
    fault_of,
    fault_types,
)
from refocused.system.errors import BucketError

Response = TypeVar("Response")

TIMEOUT_S = (10.0, 60.0)  # to connect, and between two reads
# No retries by the library: its own end 120 s after the call began, ignore Retry-After, and leave
# resumed downloads unverified.
ONCE = {"retry": None, "timeout": TIMEOUT_S}
READ_BYTES = 256 * 1024  # the library's 8 KiB take half of a download's processor time
_ROLES = {  # cloud.google.com/storage/docs/access-control/iam-roles
    "storage.objects.get": "roles/storage.objectViewer",
    "storage.objects.list": "roles/storage.objectViewer",
    "serviceusage.services.use": "roles/serviceusage.serviceUsageConsumer",
}
_PERMISSION = re.compile(r"\b(?:storage|serviceusage)\.\w+\.\w+")
_FIELDS = "name,size,crc32c,generation"
_PAGE_OBJECTS = 1000  # the store's maximum
_OK, _PARTIAL = 200, 206
_COMPRESSED = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress"}
_ADDRESS = re.compile(r"://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.*))?")
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class GoogleRequests:
    """Requests about the objects below the prefix of an address, which may be empty."""

    scheme, connection_type = "gs", GoogleConnection
    fault_types, fault_of = staticmethod(fault_types), staticmethod(fault_of)
    unpacks = False  # whether the caller unpacks objects that are stored with Content-Encoding

    def __init__(
        self,
        url: str,
        *,
        credentials_file: Path | None = None,
        project: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        found = _ADDRESS.fullmatch(url.removeprefix(self.scheme))
        if found is None:
            raise BucketError(
                f"{url!r} is not the address of a bucket. Write {self.scheme}://bucket/prefix; a "
                "name has 3 to 222 lower-case letters, digits, dashes, dots and underscores."
            )
        name, prefix = found[1], (found[2] or "").strip("/")
        self.url = url.rstrip("/")
        self.connection = self.connection_type(
            name, credentials_file=credentials_file, project=project
        )
        self._root = f"{prefix}/" if prefix else ""
        self._policy = retry or RetryPolicy()
        self._address = f"{self.scheme}://{name}/{self._root}"
        self._objects = f"/storage/v1/b/{name}/o"

    @property
    def endpoint(self) -> str:
        """Address of the store's server."""
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"

    def address(self, name: str) -> str:
        """Return `SCHEME://bucket/prefix/name`."""
        return self._address + name

    def blob(self, name: str) -> Any:
        """Return this thread's `google.cloud.storage.Blob` of a name, without a request."""
        checked_name(name, where=self._address)
        return self.connection.bucket.blob(self._root + name)

    def page(self, prefix: str, token: str | None) -> tuple[list[BlobInfo], str | None]:
        """Return the objects of one page of a listing, and the token of the next page.

        An object with missing fields takes a request of its own. Empty ones whose names end in `/`
        (the console's "folders") are left out. A page with the same invalid entry twice fails.
        """
        faults = set[str]()
        chosen = {"prefix": self._root + prefix, "pageToken": token, "maxResults": _PAGE_OBJECTS}

        def send() -> tuple[list[BlobInfo], str | None]:
            page = self.resource(None, **chosen)
            items = page.get("items", []) if isinstance(page, Mapping) else None
            if not isinstance(page, Mapping) or not isinstance(items, list):
                raise ConnectionError("the store's response is not a listing")
            before = "the start"
            for item in items:
                name = item.get("name") if isinstance(item, Mapping) else None
                if not (isinstance(name, str) and name and name.startswith(self._root + prefix)):
                    text = "the listing holds an entry without a name of this prefix, after "
                    text = f"{text}{before!r}: {item!r:.100}"
                    if text in faults:
                        fix = "Remove that object, or use another prefix."
                        raise RefusedRequestError(f"{self.address(prefix)}: {text}. {fix}")
                    faults.add(text)
                    raise ConnectionError(text)
                before = name
            found = [self._listed(item) for item in items]
            following = page.get("nextPageToken")
            return [one for one in found if one], None if following is None else str(following)

        return self.send(send, prefix, permission="storage.objects.list")

    def resource(self, name: str | None, **chosen: str | int | None) -> object:
        """Request the JSON resource of an object once; None: of a page of a listing."""
        path, fields = self._objects, f"items({_FIELDS}),nextPageToken"
        if name is not None:
            path, fields = self._path(name), _FIELDS
        response = self._request("GET", path, self._query(**chosen, fields=fields))
        if response.status_code != _OK:
            raise ConnectionError(f"HTTP {response.status_code}, which describes nothing")
        content: object = response.json()
        return content

    def _listed(self, fields: Mapping[str, Any]) -> BlobInfo | None:
        name = fields["name"].removeprefix(self._root)
        is_folder = not name or name.endswith("/")
        try:
            blob = self.blob_info(fields)
        except ConnectionError:
            try:
                return None if is_folder else self.info(name)
            except RefusedRequestError as error:
                return UndescribedBlob(name, error)
        return None if not name or (is_folder and not blob.size) else blob

    def blob_info(self, fields: object) -> BlobInfo:
        """Parse the JSON resource of an object; raise `ConnectionError` (transient) if invalid."""
        if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
            raise ConnectionError("the store's response describes no object")
        return BlobInfo(
            name=fields["name"].removeprefix(self._root),
            size=_number(fields, "size"),
            crc32c=_checksum(fields.get("crc32c")),
            generation=_number(fields, "generation"),
            checksum=fields.get("checksum"),
        )

    def _require_name(self, fields: object, name: str) -> None:
        """Raise `ConnectionError` (transient) if a response describes another object."""
        named = fields.get("name") if isinstance(fields, Mapping) else None
        if named != self._root + name:
            text = repr(named)[:80]
            raise ConnectionError(f"the response is about another object or none: {text}")

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object; None if it does not exist."""

        def send() -> BlobInfo:
            fields = self.resource(name)
            self._require_name(fields, name)
            try:
                blob = self.blob_info(fields)
                return dataclasses.replace(blob, checksum=blob.checksum or "")
            except ConnectionError as error:
                raise RefusedRequestError(
                    f"{self.address(name)}: {error}. Write the object again, or exclude it."
                ) from None

        try:
            return self.send(send, name, permission="storage.objects.get")
        except RefusedRequestError as refused:
            if refused.status != 404 or "bucket does not exist" in str(refused):
                raise
            return None

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""

        def send() -> float:
            query = self._query(fields="name,updated")
            response = self._request("GET", self._path(name), query)
            fields = response.json()
            self._require_name(fields, name)
            written = fields.get("updated")
            now = parsedate_to_datetime(response.headers.get("Date", ""))
            return (now - datetime.datetime.fromisoformat(str(written))).total_seconds()

        return self.send(send, name, permission="storage.objects.get")

    def delete(self, name: str) -> None:
        """Remove one object, if it exists."""
        send = functools.partial(self._request, "DELETE", self._path(name), self._query())
        try:
            self.send(send, name, permission="storage.objects.delete")
        except RefusedRequestError as refused:
            if refused.status != 404:
                raise

    def media(
        self, name: str, *, start: int, end: int | None = None, generation: int | None = None
    ) -> Iterator[bytes]:
        """Request the bytes `start` to `end` (inclusive) of an object once, and yield them.

        See cloud.google.com/storage/docs/json_api/v1/objects/get. Raises one of `fault_types`.
        """
        from requests import RequestException

        is_range = bool(start) or end is not None
        headers = {"Accept-Encoding": "gzip"}  # no decompression of objects stored in gzip
        if is_range:
            headers["Range"] = f"bytes={start}-{'' if end is None else end}"
        with self.connection.session.get(
            f"{self.endpoint}/download{self._path(name)}",
            params=self._query(alt="media", generation=generation),
            headers=headers,
            stream=True,
            timeout=TIMEOUT_S,
        ) as response:
            if not response.ok:
                _ = response.content  # the error's message: read it while the connection is open
                response.raise_for_status()
            if response.status_code not in (_OK, _PARTIAL):
                raise RequestException(
                    f"HTTP {response.status_code}, which holds no part of the object"
                )
            self.require_plain(name, response.headers.get("Content-Encoding"))
            sent = response.headers.get("x-goog-generation")
            if None not in (sent, generation) and sent != str(generation):
                raise RequestException(f"the response holds generation {sent[:40]}, another one")
            if is_range and not _starts_at(start, response):
                raise RequestException("the response holds another range than was requested")
            while piece := response.raw.read1(READ_BYTES, decode_content=False):
                yield piece

    def require_plain(self, name: str, encoding: str | None) -> None:
        """Refuse an object whose bytes are compressed, which its name does not say."""
        packed = _COMPRESSED & set(re.split(r"[,\s]+", (encoding or "").lower()))
        if packed and not self.unpacks and not name.endswith((".gz", ".zst")):
            raise RefusedRequestError(
                f"{self.address(name)}: it is stored with Content-Encoding: {encoding:.40}, so its "
                "bytes are compressed. Unpack it and store it again without, or exclude it."
            )

    def send(self, send: Callable[[], Response], name: str, *, permission: str) -> Response:
        """Return the response of a request, which `send` sends once, after retries.

        `name` and `permission` (such as `storage.objects.get`) are for messages. Raises
        `RefusedRequestError` for a permanent fault, and `BucketError` if no attempts are left.
        """
        attempts = self.attempts("request for", name)
        while True:
            try:
                return send()
            except self.fault_types() as error:
                fault = self.fault_of(error)
                self.wait_after(fault, attempts, name, permission=permission)

    def attempts(self, operation: str, name: str) -> Attempts:
        """Return a new count of the faults of one operation."""
        return Attempts(self._policy, operation=f"{operation} {self.address(name)}")

    def wait_after(self, fault: Fault, attempts: Attempts, name: str, *, permission: str) -> None:
        """Wait before the next attempt; raise as `Attempts`, or if the fault is permanent.

        Refused credentials are loaded anew once in an operation, since they may have been renewed
        meanwhile; where a permission is missing, only if nobody had logged in.
        """
        is_login = fault.status == 401 or (fault.status == 403 and self.connection.is_anonymous)
        if is_login and not attempts.is_renewed:
            attempts.is_renewed = True
            self.connection.forget()
        elif not fault.transient:
            raise self.refused(fault, name, permission=permission)
        else:
            attempts.wait_after(fault)

    def refused(self, fault: Fault, name: str, *, permission: str) -> RefusedRequestError:
        """Build the error of a permanent fault."""
        address, identity = self.address(name), self.connection.identity
        bucket = "/".join(address.split("/")[:3])
        named, place = _PERMISSION.search(fault.reason), f"storage buckets {{}} {bucket}"
        missing = named.group() if named else permission
        role = _ROLES.get(missing, "roles/storage.objectUser")
        if missing.startswith("serviceusage."):  # a right in the project that pays
            place = f"projects {{}} {self.connection.project or 'PROJECT'}"
        grant = f"gcloud {place.format('add-iam-policy-binding')} --member=WHO --role={role}"
        fixes = {
            401: f"The credentials of {identity} were not accepted: they expired or were revoked. "
            "Log in again (gcloud auth application-default login) or use a new key file.",
            403: f"The permission {missing} is missing for {identity}. "
            f"Grant the role {role}: {grant}",
            404: "There is no such bucket or object, it was replaced after it was listed, or "
            f"{identity} may not see it. Check the name: gcloud storage ls {bucket}",
        }
        if self.connection.is_anonymous:
            login = "gcloud auth application-default login, or give the key file of an account"
            text = "No Google credentials were found, and the bucket is not public. Log in:"
            fixes[401] = f"{text} {login}."
            fixes[403] += f". Or log in first: {login}."
        other = f"The request of {identity} will fail again; the store's message says why."
        fix = fixes.get(fault.status or 0, other)
        if "requester pays" in fault.reason.lower() and not self.connection.project:
            fix = "Name the project that pays for the requests: --gcp-project PROJECT"
        return RefusedRequestError(f"{address}: {fault.reason}. {fix}", status=fault.status)

    def _path(self, name: str) -> str:
        checked_name(name, where=self._address)
        return f"{self._objects}/{quote(self._root + name, safe='')}"

    def _query(self, **chosen: str | int | None) -> dict[str, str]:
        named = chosen | {"userProject": self.connection.project}
        return {key: str(value) for key, value in named.items() if value is not None}

    def _request(self, method: str, path: str, query: Mapping[str, str]) -> Any:
        response = self.connection.session.request(
            method, self.endpoint + path, params=query, timeout=ONCE["timeout"]
        )
        response.raise_for_status()
        return response


def _starts_at(start: int, response: Any) -> bool:
    """Whether a response starts at a byte; some proxies send a range with status 200."""
    header = response.headers.get("Content-Range")
    if header is None:
        return bool(response.status_code == _PARTIAL)
    found = _RANGE.fullmatch(header)
    return found is not None and found[1].lstrip("0") == str(start).lstrip("0")


def _number(fields: Mapping[str, object], name: str) -> int:
    """Return a count, which the store writes as a string of digits."""
    text = str(fields.get(name))
    if not (text.isascii() and text.isdecimal() and len(text) < 300):
        raise ConnectionError(f"the store describes it with no {name}")
    return int(text)


def crc32c_to_base64(checksum: int) -> str:
    """Encode a checksum as Google Cloud Storage does: base64 of four big-endian bytes."""
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
