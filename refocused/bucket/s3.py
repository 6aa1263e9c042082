"""S3 (AWS, Cloudflare R2, MinIO): credentials, requests, uploads in parts."""

import base64
import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from refocused.bucket import retry
from refocused.bucket.bucket import ANONYMOUS, extended_crc32c
from refocused.bucket.retry import Fault
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
from refocused.system.errors import BucketError, how_to_install

_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"  # variables, the first one counts
READ_BYTES = 64 * 1024  # of a piece; one that is cut off is lost
# What an error means if its status does not say it: 301 other region, 400 send again, 401 log in.
_STATUSES = {"AuthorizationHeaderMalformed": 301, "NoSuchUpload": 400, "RequestTimeout": 408}
_LOGIN = "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"
_STATUSES |= dict.fromkeys(_LOGIN, 401)
_ALGORITHMS = "CRC32", "CRC64NVME", "MD5", "SHA1", "SHA256", "SHA512"
_MD5 = re.compile('"?([0-9a-fA-F]{32})"?')  # an ETag of an object that was not uploaded in parts
_MIN_PART_BYTES = 5 * 1024 * 1024  # of S3, but for the last part
_DIRECTORY = "--x-s3"  # ends the names of directory buckets, whose ETags are random
_FIXES = {  # by the store's error code, or by status
    "RequestTimeTooSkewed": "This machine's clock is wrong. Correct it: sudo chronyc makestep",
    "NoSuchBucket": "Check its name, and AWS_ENDPOINT_URL_S3 if it is not on AWS.",
    "301": "The bucket is in another region: set AWS_REGION to it (R2: auto).",
    "401": "The AWS credentials were not accepted: they expired, were revoked or are of another "
    "store. Log in (aws sso login), or renew AWS_ACCESS_KEY_ID and what belongs to it.",
    "403": "The AWS credentials lack a permission: data need s3:ListBucket and s3:GetObject, and a "
    "mirror s3:PutObject and s3:DeleteObject too. Grant them, or log in (aws configure).",
    "404": "There is no such object, or it was replaced after it was listed.",
}


IDENTITY = "the AWS credentials of this environment"


class S3Transport(Transport):
    """Requests to an S3 store by a `boto3` client, which threads share; a generation is an ETag."""

    scheme = "s3"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise BucketError(f"s3:// needs the package boto3: {how_to_install('boto3')}")
        super().__init__(*arguments, **options)

    @property
    def endpoint(self) -> str:
        """Address of the store's server."""
        return next(filter(None, map(os.environ.get, _ENDPOINTS)), "https://s3.amazonaws.com")

    def load(self) -> Login:
        """Return a client with the environment's credentials, or an anonymous one."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        is_aws = os.environ.keys().isdisjoint(_ENDPOINTS)
        session = boto3.session.Session()
        has_login = session.get_credentials() is not None
        config = Config(
            connect_timeout=TIMEOUT_S[0],
            read_timeout=TIMEOUT_S[1],
            retries={"total_max_attempts": 1},
            max_pool_connections=32,
            s3={"addressing_style": "auto" if is_aws else "path"},  # as MinIO does
            signature_version=None if has_login else UNSIGNED,
            response_checksum_validation="when_required",  # downloads are verified here
        )
        client = session.client("s3", config=config)
        return Login(client, IDENTITY if has_login else ANONYMOUS)

    def fault_types(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that a failed request may raise."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        known = BotoCoreError, ClientError, ResponseParserError
        return (*known, RuntimeError, *retry.fault_types())  # a RuntimeError by bad dates

    def fault_of(self, error: Exception) -> Fault:
        """Interpret one of `fault_types`."""
        from botocore import exceptions as known

        if not isinstance(error, known.ClientError):
            network = known.HTTPClientError, known.ConnectionError, known.IncompleteReadError
            later = *network, known.CredentialRetrievalError, known.MetadataRetrievalError
            transient = isinstance(error, later) or not isinstance(error, known.BotoCoreError)
            cause = getattr(error, "kwargs", {}).get("error")
            reason = retry.innermost(cause if isinstance(cause, Exception) else error)
            login = known.SSOError, known.TokenRetrievalError, known.NoCredentialsError
            return Fault(reason, transient, status=401 if isinstance(error, login) else None)
        answer, about = error.response["ResponseMetadata"], error.response["Error"]
        status, code = answer["HTTPStatusCode"], str(about.get("Code"))
        acts_as = _STATUSES.get(code, status)
        if error.operation_name == "GetObject" and status == 412:
            acts_as = 404  # the object was replaced
        header = answer["HTTPHeaders"].get("retry-after")
        return Fault(
            retry.printable_line(f"HTTP {status} {code}: {about.get('Message')}"),
            transient=acts_as in (408, 409, 429) or (acts_as >= 500 and acts_as != 501),
            status=acts_as,
            retry_after_s=retry.parsed_retry_after(header),
        )

    def remedy(self, fault: Fault, action: Action) -> str:
        """Return what to do about a permanent fault."""
        words = {*fault.reason.replace(":", "").split(), str(fault.status)}
        fixes = [fix for code, fix in _FIXES.items() if code in words]
        return (*fixes, "The request will fail again; the store's message says why.")[0]

    def page(self, prefix: str, token: str | None) -> tuple[list[Any], str | None]:
        """Return the resources of one page of a listing, and the token of the next page."""
        options = {"ContinuationToken": token} if token else {}
        page = self._send("list_objects_v2", Prefix=self.root + prefix, **options)
        return list(map(_resource, page.get("Contents", []))), page.get("NextContinuationToken")

    def describe(self, name: str) -> Resource:
        """Return an object's resource, with another `checksum` if the store keeps one."""
        head = self._head(name)
        resource = _resource(head)
        if resource["crc32c"] is None and _DIRECTORY not in self.bucket_name:
            resource["checksum"] = _other_checksum(head)
        return resource

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""
        head = self._head(name)
        now = parsedate_to_datetime(head["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - head["LastModified"]).total_seconds())

    def delete(self, name: str) -> None:
        """Remove one object."""
        self._send("delete_object", name)

    def media(
        self, name: str, *, start: int, end: int | None = None, generation: str | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes `start` to `end` (inclusive) of an object."""
        options = {} if generation is None else {"IfMatch": generation}
        if start or end is not None:
            options["Range"] = f"bytes={start}-{'' if end is None else end}"
        response = self._send("get_object", name, **options)
        self.require_plain(name, response.get("ContentEncoding"))
        sent = response.get("ETag")
        if sent and generation is not None and _plain(sent) != _plain(generation):
            raise ConnectionError(f"the response holds the version {sent[:40]}, another one")
        span = re.fullmatch(r"bytes (\d+)-\d+/\d+", response.get("ContentRange", ""))
        with contextlib.closing(response["Body"]) as body:
            if "Range" in options and (not span or int(span[1]) != start):
                raise ConnectionError("the response holds another range than was requested")
            yield from body.iter_chunks(READ_BYTES)

    def put(
        self, name: str, content: bytes, *, checksum: int, overwrite: bool | str
    ) -> Resource | None:
        """Store a small object; return its resource, or None if the store has not verified it."""
        options = {"Body": content, "ChecksumCRC32C": crc32c_to_base64(checksum)}
        if overwrite is not True:
            options |= {"IfMatch": overwrite} if overwrite else {"IfNoneMatch": "*"}
        stored = self._send("put_object", name, ChecksumAlgorithm="CRC32C", **options)
        if "ChecksumCRC32C" not in stored:
            return None
        return _resource({"Key": self.key(name), **stored, "Size": len(content)})

    def upload(
        self, store: Store, name: str, source: Path, *, size: int, checksum: int
    ) -> Resource | None:
        """Store a new object in parts, which the store verifies one by one and as a whole.

        A store that does not return a part's checksum has not verified it: returns None then.
        """
        if store.info(name) is not None:
            return None  # the caller compares it
        whole: dict[str, Any] = {"ChecksumType": "FULL_OBJECT"}
        session = store.send(
            lambda: self._send(
                "create_multipart_upload", name, ChecksumAlgorithm="CRC32C", **whole
            ),
            name,
            "create",
        )
        upload, parts = {"UploadId": session.get("UploadId")}, list[dict[str, Any]]()
        is_verified, start = True, 0
        least = max(_MIN_PART_BYTES, -(-size // 10_000))  # 10,000 parts at most
        length = max(CHUNK_BYTES, least)

        def send_part() -> tuple[dict[str, Any], Any]:
            nonlocal length
            content = read_chunk(source, start, min(length, size - start), size=size)
            check = crc32c_to_base64(extended_crc32c(0, content))
            part: dict[str, Any] = {"PartNumber": len(parts) + 1, "ChecksumCRC32C": check}
            try:
                return part, self._send("upload_part", name, Body=content, **part, **upload)
            except self.fault_types() as error:
                if not parts and self.fault_of(error).status in (None, 408):  # it was cut off
                    length = max(length // SHRINK, least)
                raise

        try:
            while start < size:  # parts of one length, as R2 requires: that of the first one kept
                part, sent = store.send(send_part, name, "create")
                parts.append(part | {"ETag": sent.get("ETag")})
                is_verified &= sent.get("ChecksumCRC32C") == part["ChecksumCRC32C"]
                start += length
            whole |= {"ChecksumCRC32C": crc32c_to_base64(checksum), "IfNoneMatch": "*"}
            whole |= {"MultipartUpload": {"Parts": parts}} | upload
            store.send(
                lambda: self._send("complete_multipart_upload", name, **whole), name, "create"
            )
        except BucketError:
            with contextlib.suppress(*self.fault_types()):  # the parts would cost money
                self._send("abort_multipart_upload", name, **upload)
            raise
        return store.send(lambda: self.describe(name), name, "get") if is_verified else None

    def _head(self, name: str) -> dict[str, Any]:
        try:
            head = self._send("head_object", name, ChecksumMode="ENABLED")
        except self.fault_types() as error:
            if self.fault_of(error).status in (301, 400, 403):  # HEAD has no message; GET has one
                self._send("get_object", name, Range="bytes=0-0")["Body"].close()
            raise
        return {"Key": self.key(name), **head}

    def _send(self, operation: str, name: str | None = None, **options: Any) -> Any:
        if name is not None:
            options["Key"] = self.key(name)
        client = self.login().credentials
        response = getattr(client, operation)(Bucket=self.bucket_name, **options)
        if name is not None and "Key" in response:
            self.require_key(response["Key"], name)
        return response


def _other_checksum(head: Mapping[str, Any]) -> str:
    """Return another checksum of the whole object than CRC-32C from a HEAD response, or "".

    See docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html and,
    for when an ETag is an MD5, API/API_Object.html.
    """
    for algorithm in _ALGORITHMS:
        text = head.get(f"Checksum{algorithm}") or "-"  # X-N is a checksum of N checksums
        is_known = algorithm != "CRC64NVME" or importlib.util.find_spec("awscrt") is not None
        with contextlib.suppress(ValueError):
            if is_known and "-" not in text and head.get("ChecksumType") != "COMPOSITE":
                return f"{algorithm.lower()} {base64.b64decode(text, validate=True).hex()}"
    is_plain = head.get("ServerSideEncryption") in (None, "AES256")
    md5 = _MD5.fullmatch(head.get("ETag", "")) if is_plain else None
    return f"etag {md5[1].lower()}" if md5 and "SSECustomerAlgorithm" not in head else ""


def _resource(fields: Mapping[str, Any]) -> dict[str, Any]:
    crc32c = fields.get("ChecksumCRC32C") or "-"
    return {
        "name": fields.get("Key"),
        "size": fields.get("Size", fields.get("ContentLength")),
        "crc32c": None if "-" in crc32c else crc32c,  # X-N is a checksum of N checksums
        "generation": fields.get("ETag"),
    }


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')  # some servers weaken or unquote an ETag
