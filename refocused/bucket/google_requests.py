"""One request to Google Cloud Storage, asked again while its fault may pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from refocused.bucket.bucket import BlobInfo, checked_name
from refocused.bucket.checksum import crc32c_from_base64
from refocused.bucket.google_connection import GoogleConnection
from refocused.bucket.google_faults import RefusedRequestError, fault_of, fault_types, refusal
from refocused.bucket.retry import Attempts, Fault, RetryPolicy

Answer = TypeVar("Answer")

TIMEOUT_S = (10.0, 60.0)  # connect, and silence between two pieces of an answer
# What the library must not do by itself: its retries end 120 s after the call began, ignore
# Retry-After and leave resumed downloads unchecked.
ONCE = {"retry": None, "timeout": TIMEOUT_S}
DESCRIBED = ("name", "size", "crc32c", "generation")  # what is read of an object's resource


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
        path: str = self.blob(name).path
        return f"{self.connection.bucket.client.api_endpoint}/download/storage/v1{path}"

    def media_parameters(self, generation: int | None) -> dict[str, str]:
        """Return the query for an object's bytes, of one generation or the newest."""
        chosen = {"generation": generation, "userProject": self.connection.bucket.user_project}
        return {"alt": "media"} | {
            key: str(value) for key, value in chosen.items() if value is not None
        }

    def described(self, blob: Any) -> BlobInfo:
        """Describe a blob by the metadata that were received; errors are `described_in`'s."""
        return self.described_in({field: getattr(blob, field) for field in DESCRIBED})

    def described_in(self, fields: object) -> BlobInfo:
        """Describe an object by its resource in the store's JSON.

        Raises:
            ConnectionError: That is no such resource; it is a fault that may pass.
        """
        if not isinstance(fields, Mapping) or any(fields.get(name) is None for name in DESCRIBED):
            raise ConnectionError("the store's answer describes no object")
        return BlobInfo(
            name=fields["name"].removeprefix(self.root),
            size=int(fields["size"]),
            crc32c=crc32c_from_base64(fields["crc32c"]),
            generation=int(fields["generation"]),
        )

    def info(self, name: str) -> BlobInfo | None:
        """Ask for an object's description; None when there is none of that name."""

        def ask() -> BlobInfo:
            blob = self.blob(name)
            blob.reload(**ONCE)
            return self.described(blob)

        try:
            return self.ask(ask, name, permission="storage.objects.get")
        except RefusedRequestError as refused:
            if refused.status == 404 and "bucket does not exist" not in str(refused):
                return None
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
