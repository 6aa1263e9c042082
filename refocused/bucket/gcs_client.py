"""Access to Google Cloud Storage: credentials, and one client per thread."""

import dataclasses
import logging
import os
import threading
from pathlib import Path
from typing import Any

from refocused.system.errors import BucketError

logger = logging.getLogger(__name__)

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
# Unless this is set, each client sends a request for unused trace attributes from a thread of its
# own, over the connections of the thread that owns the client.
_NO_BACKGROUND_REQUESTS = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
_NOT_FOUND = "default credentials were not found"  # in google-auth's error if there are none
ANONYMOUS = "an anonymous client (no credentials were found)"
EMULATOR = "an anonymous client (STORAGE_EMULATOR_HOST is set)"


@dataclasses.dataclass(frozen=True, slots=True)
class Login:
    """Loaded credentials, and whose they are."""

    credentials: Any  # google-auth's credentials; on S3, the client that has them
    identity: str  # for messages


class GoogleConnection:
    """Access to one bucket, safe to share between threads.

    `google.cloud` is imported with the first request. Each thread has its own client: a shared
    connection pool does not survive threads that fail halfway. Without a key file the
    environment's credentials are used. `project` pays for the requests (default: the bucket's).
    """

    def __init__(
        self, bucket_name: str, *, credentials_file: Path | None, project: str | None
    ) -> None:
        self.project = project
        self._bucket_name = bucket_name
        self._credentials_file = credentials_file
        self._found: Login | None = None
        self._is_stale, self.is_anonymous = True, False
        self._lock = threading.Lock()
        self._thread = threading.local()

    @property
    def identity(self) -> str:
        """Whose credentials are used, for messages."""
        return self._credentials().identity

    @property
    def bucket(self) -> Any:
        """This thread's `google.cloud.storage.Bucket`."""
        if not hasattr(self._thread, "bucket"):
            from google.cloud import storage

            os.environ.setdefault(_NO_BACKGROUND_REQUESTS, "true")
            client = storage.Client(
                project=self.project, credentials=self._credentials().credentials
            )
            self._thread.bucket = client.bucket(self._bucket_name, user_project=self.project)
        return self._thread.bucket

    @property
    def session(self) -> Any:
        """This thread's authorized `requests` session."""
        if not hasattr(self._thread, "session"):
            from google.auth.transport.requests import AuthorizedSession

            self._thread.session = AuthorizedSession(self._credentials().credentials)
        return self._thread.session

    def forget(self) -> None:
        """Load the credentials anew with the next request: they were refused, and may be renewed.

        Where there are none any more, as in an outage of the metadata server, the old ones stay.
        """
        self._is_stale, self._thread = True, threading.local()

    def _credentials(self) -> Login:
        with self._lock:
            if self._is_stale or self._found is None:
                self._is_stale = False
                found = self._load()
                if self._found is None or found.identity != ANONYMOUS:
                    self._found, self.is_anonymous = found, found.identity == ANONYMOUS
            return self._found

    def _load(self) -> Login:
        return find_credentials(self._credentials_file)


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
            found = service_account.Credentials.from_service_account_file(str(path), scopes=_SCOPES)
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
        return Login(found, f"{found.service_account_email} (key file {path})")
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return Login(AnonymousCredentials(), EMULATOR)
    try:
        found, _ = google.auth.default(scopes=_SCOPES)
    except DefaultCredentialsError as error:
        if _NOT_FOUND not in str(error):
            raise BucketError(
                f"The Google credentials of this environment cannot be used: {error} "
                "Log in again (gcloud auth application-default login), or correct or unset "
                "GOOGLE_APPLICATION_CREDENTIALS."
            ) from error
        logger.info("No Google credentials found: only public buckets can be read")
        return Login(AnonymousCredentials(), ANONYMOUS)
    email = getattr(found, "service_account_email", None)
    return Login(found, email or "the environment's default credentials")
