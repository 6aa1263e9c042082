"""Google Cloud Storage: credentials, requests, resumable uploads."""

import datetime
import logging
import os
import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from refocused.bucket import retry
from refocused.bucket.bucket import ANONYMOUS
from refocused.bucket.retry import Fault, fault_of_response, innermost
from refocused.bucket.store import (
    CHUNK_BYTES,
    SHRINK,
    TIMEOUT_S,
    Action,
    Login,
    Resource,
    Store,
    Transport,
    crc32c_to_base64,
    read_chunk,
)
from refocused.system.errors import BucketError

logger = logging.getLogger(__name__)

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
# Unless this is set, each client sends a request for unused trace attributes from a thread of its
# own, over the connections of the thread that owns the client.
_NO_BACKGROUND_REQUESTS = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
_NOT_FOUND = "default credentials were not found"  # in google-auth's error if there are none
EMULATOR = "an anonymous client (STORAGE_EMULATOR_HOST is set)"
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
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
# Of chunks: multiples of 256 KiB, as the protocol requires. The store may keep nothing of a chunk
# that was cut off, so chunks shrink after a failure, and grow again after four that were kept.
MIN_CHUNK_BYTES = 256 * 1024
_KEPT_TO_GROW = 4
_CONFIRMED = re.compile(r"bytes=0-(\d{1,15})")
_DONE = (200, 201)
_INCOMPLETE = 308
_SESSION_GONE = (404, 410)


class GcsTransport(Transport):
    """Requests to Google Cloud Storage.

    `google.cloud` is imported with the first request. Each thread has its own client: a shared
    connection pool does not survive threads that fail halfway.
    """

    scheme = "gs"

    @property
    def endpoint(self) -> str:
        """Address of the store's server."""
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"

    @property
    def bucket(self) -> Any:
        """This thread's `google.cloud.storage.Bucket`."""
        if not hasattr(self._thread, "bucket"):
            from google.cloud import storage

            os.environ.setdefault(_NO_BACKGROUND_REQUESTS, "true")
            client = storage.Client(project=self.project, credentials=self.login().credentials)
            self._thread.bucket = client.bucket(self.bucket_name, user_project=self.project)
        return self._thread.bucket

    @property
    def session(self) -> Any:
        """This thread's authorized `requests` session."""
        if not hasattr(self._thread, "session"):
            from google.auth.transport.requests import AuthorizedSession

            self._thread.session = AuthorizedSession(self.login().credentials)
        return self._thread.session

    def load(self) -> Login:
        """Load the key file's credentials, else the environment's."""
        return find_credentials(self.key_file)

    def fault_types(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that a failed request may raise."""
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import InvalidResponse

        return (GoogleAPICallError, GoogleAuthError, InvalidResponse, *retry.fault_types())

    def fault_of(self, error: Exception) -> Fault:
        """Interpret one of `fault_types`."""
        from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError

        response = getattr(error, "response", None)
        if isinstance(error, GoogleAuthError):
            # No token: often a network fault, but a revoked key (invalid_grant) stays revoked.
            transient = isinstance(error, RefreshError | TransportError) and (
                "invalid_grant" not in str(error)
            )
            is_network = isinstance(error, TransportError)
            return Fault(innermost(error), transient, status=None if is_network else 401)
        if response is not None and response.status_code >= 400:
            return fault_of_response(response)
        # A broken connection, a time-out, or an unreadable, perhaps truncated response.
        return Fault(innermost(error), transient=True)

    def remedy(self, fault: Fault, action: Action) -> str:
        """Return what to do about a permanent fault."""
        identity = self.login().identity
        bucket = f"{self.scheme}://{self.bucket_name}"
        named, target = _PERMISSION.search(fault.reason), f"storage buckets {{}} {bucket}"
        missing = named.group() if named else f"storage.objects.{action}"
        role = _ROLES.get(missing, "roles/storage.objectUser")
        if missing.startswith("serviceusage."):  # a right in the project that pays
            target = f"projects {{}} {self.project or 'PROJECT'}"
        grant = f"gcloud {target.format('add-iam-policy-binding')} --member=WHO --role={role}"
        fixes = {
            401: f"The credentials of {identity} were not accepted: they expired or were revoked. "
            "Log in again (gcloud auth application-default login) or use a new key file.",
            403: f"The permission {missing} is missing for {identity}. "
            f"Grant the role {role}: {grant}",
            404: "There is no such bucket or object, it was replaced after it was listed, or "
            f"{identity} may not see it. Check the name: gcloud storage ls {bucket}",
        }
        if self.is_anonymous:
            login = "gcloud auth application-default login, or give the key file of an account"
            text = "No Google credentials were found, and the bucket is not public. Log in:"
            fixes[401] = f"{text} {login}."
            fixes[403] += f". Or log in first: {login}."
        other = f"The request of {identity} will fail again; the store's message says why."
        if "requester pays" in fault.reason.lower() and not self.project:
            return "Name the project that pays for the requests: --gcp-project PROJECT"
        return fixes.get(fault.status or 0, other)

    def page(self, prefix: str, token: str | None) -> tuple[list[Any], str | None]:
        """Return the resources of one page of a listing, and the token of the next page."""
        page = self._get(
            f"/storage/v1/b/{self.bucket_name}/o",
            prefix=self.root + prefix,
            pageToken=token,
            maxResults=_PAGE_OBJECTS,
            fields=f"items({_FIELDS}),nextPageToken",
        ).json()
        items = page.get("items", []) if isinstance(page, Mapping) else None
        if not isinstance(page, Mapping) or not isinstance(items, list):
            raise ConnectionError("the store's response is not a listing")
        following = page.get("nextPageToken")
        return items, None if following is None else str(following)

    def describe(self, name: str) -> Resource:
        """Return an object's resource."""
        return _mapping(self._get(self._path(name), fields=_FIELDS).json())

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""
        response = self._get(self._path(name), fields="name,updated")
        resource = _mapping(response.json())
        self.require_key(resource.get("name"), name)
        now = parsedate_to_datetime(response.headers.get("Date", ""))
        written = datetime.datetime.fromisoformat(str(resource.get("updated")))
        return (now - written).total_seconds()

    def delete(self, name: str) -> None:
        """Remove one object."""
        self._request("DELETE", self._path(name))

    def media(
        self, name: str, *, start: int, end: int | None = None, generation: str | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes `start` to `end` (inclusive) of an object.

        See cloud.google.com/storage/docs/json_api/v1/objects/get.
        """
        from requests import RequestException

        is_range = bool(start) or end is not None
        headers = {"Accept-Encoding": "gzip"}  # no decompression of objects stored in gzip
        if is_range:
            headers["Range"] = f"bytes={start}-{'' if end is None else end}"
        with self.session.get(
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
            span = response.headers.get("Content-Range")
            match = _RANGE.fullmatch(span or "")
            # Some proxies send a range with status 200.
            starts = match is not None and match[1].lstrip("0") == str(start).lstrip("0")
            if is_range and not (response.status_code == _PARTIAL if span is None else starts):
                raise RequestException("the response holds another range than was requested")
            while piece := response.raw.read1(READ_BYTES, decode_content=False):
                yield piece

    def put(self, name: str, content: bytes, *, checksum: int, overwrite: bool | str) -> object:
        """Store a small object, whose CRC-32C the store compares; return its resource."""
        blob = self._new_blob(name, checksum)
        match = None if overwrite is True else int(overwrite)
        blob.upload_from_string(
            content, content_type=None, if_generation_match=match, checksum=None, **ONCE
        )
        return blob._properties

    def upload(self, store: Store, name: str, source: Path, *, size: int, checksum: int) -> object:
        """Store a new object by a resumable session; return its resource, if any.

        See cloud.google.com/storage/docs/performing-resumable-uploads. After a fault, the upload
        queries how much the store holds and continues from there, with smaller chunks if it kept
        nothing. A session that the store no longer knows is replaced. Attempts count only while
        the store does not hold more than ever before. (The client library resends a failed chunk
        whole, at one size, in one session.)
        """

        def open_session() -> str:
            url: str = self._new_blob(name, checksum).create_resumable_upload_session(
                size=size, if_generation_match=0, checksum=None, **ONCE
            )
            return url

        attempts = store.attempts("uploading", name)
        url = store.send(open_session, name, "create")
        confirmed: int | None = 0  # bytes that the store holds; None: unknown, query it
        held = most_held = 0  # bytes that it confirmed last, and ever
        chunk_bytes, chunks_kept = CHUNK_BYTES, 0
        while True:
            content, span = b"", "*"  # the next chunk, or a query of the state
            if confirmed is not None:
                length = min(chunk_bytes, size - confirmed)
                content = read_chunk(source, confirmed, length, size=size)
                span = f"{confirmed}-{confirmed + len(content) - 1}"
            is_chunk, confirmed = confirmed is not None, None
            try:
                response = self.session.put(
                    url,
                    data=content,
                    headers={"Content-Range": f"bytes {span}/{size}"},
                    timeout=TIMEOUT_S,
                    allow_redirects=False,  # 308 means "incomplete" here
                )
            except self.fault_types() as error:
                store.wait_after(self.fault_of(error), attempts, name, "create")
                continue
            if response.status_code in _DONE:
                try:
                    return response.json()
                except (ValueError, RecursionError):
                    return None
            if response.status_code in _SESSION_GONE:
                attempts.wait_after(fault_of_response(response))
                url, confirmed, held = store.send(open_session, name, "create"), 0, 0
                continue
            if response.status_code != _INCOMPLETE:
                store.wait_after(fault_of_response(response), attempts, name, "create")
                continue
            text = response.headers.get("Range")  # bytes=0-LAST
            match = _CONFIRMED.fullmatch(text) if text else None
            holds = int(match[1]) + 1 if match else 0
            if (text and not match) or holds >= size:
                reason = f"the store's response has an invalid header Range {text[:40]!r}"
                attempts.wait_after(Fault(reason, transient=True))
                continue
            is_more, held, confirmed = holds > held, holds, holds
            chunks_kept = chunks_kept + 1 if is_more else 0
            if not is_more:
                chunk_bytes = max(chunk_bytes // SHRINK, MIN_CHUNK_BYTES)
            elif chunks_kept % _KEPT_TO_GROW == 0:
                chunk_bytes = min(2 * chunk_bytes, CHUNK_BYTES)
            if held > most_held:
                most_held = held
                attempts.progressed()
            elif is_chunk and not is_more:
                fault = Fault("the store kept nothing of a chunk", transient=True)
                attempts.wait_after(fault)

    def _new_blob(self, name: str, checksum: int) -> Any:
        """Return a `Blob` whose metadata carry the checksum, which the store then verifies."""
        blob = self.bucket.blob(self.key(name))
        blob.crc32c = crc32c_to_base64(checksum)
        blob.content_type = "application/octet-stream"
        return blob

    def _path(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket_name}/o/{quote(self.key(name), safe='')}"

    def _query(self, **chosen: str | int | None) -> dict[str, str]:
        named = chosen | {"userProject": self.project}
        return {key: str(value) for key, value in named.items() if value is not None}

    def _request(self, method: str, path: str, **chosen: str | int | None) -> Any:
        response = self.session.request(
            method, self.endpoint + path, params=self._query(**chosen), timeout=ONCE["timeout"]
        )
        response.raise_for_status()
        return response

    def _get(self, path: str, **chosen: str | int | None) -> Any:
        response = self._request("GET", path, **chosen)
        if response.status_code != _OK:
            raise ConnectionError(f"HTTP {response.status_code}, which describes nothing")
        return response


def _mapping(resource: object) -> Resource:
    if not isinstance(resource, Mapping):
        raise ConnectionError("the store's response describes no object")
    return resource


def find_credentials(credentials_file: Path | None) -> Login:
    """Return the key file's credentials, else the environment's, else anonymous ones.

    With STORAGE_EMULATOR_HOST set, the environment's are not used. Raises `BucketError` if
    credentials are there but invalid.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.oauth2 import service_account

    for name in ("urllib3", "google.auth"):  # they log their attempts; `Attempts` logs ours
        logging.getLogger(name).setLevel(logging.ERROR)
    if (path := credentials_file) is not None:
        try:
            credentials = service_account.Credentials.from_service_account_file(
                str(path), scopes=_SCOPES
            )
        except OSError as error:
            raise BucketError(
                f"The credentials file {path} cannot be read: {error.strerror}. "
                "Check the path and its permissions."
            ) from error
        except (ValueError, GoogleAuthError) as error:
            raise BucketError(
                f"The credentials file {path} is not the JSON key of a service account: {error}. "
                "Download a new key, or leave the file out to use the environment's credentials "
                "(gcloud auth application-default login)."
            ) from error
        return Login(credentials, f"{credentials.service_account_email} (key file {path})")
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return Login(AnonymousCredentials(), EMULATOR)
    try:
        credentials, _ = google.auth.default(scopes=_SCOPES)
    except DefaultCredentialsError as error:
        if _NOT_FOUND not in str(error):
            raise BucketError(
                f"The Google credentials of this environment cannot be used: {error} "
                "Log in again (gcloud auth application-default login), or correct or unset "
                "GOOGLE_APPLICATION_CREDENTIALS."
            ) from error
        logger.info("No Google credentials found: only public buckets can be read")
        return Login(AnonymousCredentials(), ANONYMOUS)
    email = getattr(credentials, "service_account_email", None)
    return Login(credentials, email or "the environment's default credentials")
