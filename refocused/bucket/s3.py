"""A prefix of an S3 bucket (AWS, Cloudflare R2, MinIO), with the transfers of `GcsBucket`."""

import base64
import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from refocused.bucket import gcs_errors, gcs_requests, gcs_upload
from refocused.bucket.bucket import BlobInfo, checked_name, extended_crc32c
from refocused.bucket.gcs import GcsBucket
from refocused.bucket.gcs_client import ANONYMOUS, GoogleConnection, Login
from refocused.bucket.gcs_errors import Fault, RefusedRequestError
from refocused.bucket.gcs_requests import crc32c_to_base64
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


class S3Connection(GoogleConnection):
    """Access to one bucket by a `boto3` client, which threads share; anonymous without a login."""

    identity = "the AWS credentials of this environment"

    def __init__(self, bucket_name: str, **options: Any) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise BucketError(f"s3:// needs the package boto3: {how_to_install('boto3')}")
        super().__init__(bucket_name, **options)

    def call(self, operation: str, **fields: Any) -> Any:
        """Send one request about the bucket, and return the response."""
        client = self._credentials().credentials
        return getattr(client, operation)(Bucket=self._bucket_name, **fields)

    def _load(self) -> Login:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        is_aws = os.environ.keys().isdisjoint(_ENDPOINTS)
        session = boto3.session.Session()
        has_login = session.get_credentials() is not None
        config = Config(
            connect_timeout=gcs_requests.TIMEOUT_S[0],
            read_timeout=gcs_requests.TIMEOUT_S[1],
            retries={"total_max_attempts": 1},
            max_pool_connections=32,
            s3={"addressing_style": "auto" if is_aws else "path"},  # as MinIO does
            signature_version=None if has_login else UNSIGNED,
            response_checksum_validation="when_required",  # downloads are verified here
        )
        client = session.client("s3", config=config)
        return Login(client, self.identity if has_login else ANONYMOUS)


def fault_types() -> tuple[type[Exception], ...]:
    """Return the exceptions that a failed request may raise."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    known = BotoCoreError, ClientError, ResponseParserError, RuntimeError  # the last by bad dates
    return (*known, *gcs_errors.fault_types())


def fault_of(error: Exception) -> Fault:
    """Interpret one of `fault_types`."""
    from botocore import exceptions as known

    if not isinstance(error, known.ClientError):
        network = known.HTTPClientError, known.ConnectionError, known.IncompleteReadError
        later = *network, known.CredentialRetrievalError, known.MetadataRetrievalError
        transient = isinstance(error, later) or not isinstance(error, known.BotoCoreError)
        cause = getattr(error, "kwargs", {}).get("error")
        reason = gcs_errors.innermost(cause if isinstance(cause, Exception) else error)
        login = known.SSOError, known.TokenRetrievalError, known.NoCredentialsError
        return Fault(reason, transient, status=401 if isinstance(error, login) else None)
    answer, about = error.response["ResponseMetadata"], error.response["Error"]
    status, code = answer["HTTPStatusCode"], str(about.get("Code"))
    acts_as = _STATUSES.get(code, status)
    if error.operation_name == "GetObject" and status == 412:
        acts_as = 404  # the object was replaced
    header = answer["HTTPHeaders"].get("retry-after")
    return Fault(
        gcs_errors.printable_line(f"HTTP {status} {code}: {about.get('Message')}"),
        transient=acts_as in (408, 409, 429) or (acts_as >= 500 and acts_as != 501),
        status=acts_as,
        retry_after_s=gcs_errors.parsed_retry_after(header),
    )


def _other_checksum(found: Mapping[str, Any]) -> str:
    """Return another checksum of the whole object than CRC-32C from a HEAD response, or "".

    See docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html and,
    for when an ETag is an MD5, API/API_Object.html.
    """
    for algorithm in _ALGORITHMS:
        text = found.get(f"Checksum{algorithm}") or "-"  # X-N is a checksum of N checksums
        is_known = algorithm != "CRC64NVME" or importlib.util.find_spec("awscrt") is not None
        with contextlib.suppress(ValueError):
            if is_known and "-" not in text and found.get("ChecksumType") != "COMPOSITE":
                return f"{algorithm.lower()} {base64.b64decode(text, validate=True).hex()}"
    is_plain = found.get("ServerSideEncryption") in (None, "AES256")
    md5 = _MD5.fullmatch(found.get("ETag", "")) if is_plain else None
    return f"etag {md5[1].lower()}" if md5 and "SSECustomerAlgorithm" not in found else ""


def _resource(found: Mapping[str, Any]) -> dict[str, Any]:
    crc32c = found.get("ChecksumCRC32C") or "-"
    return {
        "name": found.get("Key"),
        "size": found.get("Size", found.get("ContentLength")),
        "crc32c": None if "-" in crc32c else crc32c,  # X-N is a checksum of N checksums
        "generation": int.from_bytes(found.get("ETag", "").encode(), "big") or None,
    }


class PartsUpload(gcs_upload.ResumableUpload):
    """Upload of one file in parts, which the store verifies one by one and as a whole.

    A store that does not return a part's checksum has not verified it: the caller then reads what
    is stored.
    """

    _requests: "S3Bucket"

    def send(self) -> BlobInfo | None:
        """Send the file; return the store's description, or None if it has to be read."""
        bucket, name, size = self._requests, self._name, self._size
        if bucket.info(name) is not None:
            return None  # the caller compares it
        whole = {"ChecksumType": "FULL_OBJECT"}
        begun = bucket._send("create_multipart_upload", name, ChecksumAlgorithm="CRC32C", **whole)
        upload, parts = {"UploadId": begun.get("UploadId")}, list[dict[str, Any]]()
        is_verified, start = True, 0
        least = max(_MIN_PART_BYTES, -(-size // 10_000))  # 10,000 parts at most
        length = max(gcs_upload.CHUNK_BYTES, least)

        def send_part() -> tuple[dict[str, Any], Any]:
            nonlocal length
            wanted = min(length, size - start)
            content = gcs_upload.read_chunk(self._source, start, wanted, size=size)
            check = crc32c_to_base64(extended_crc32c(0, content))
            part: dict[str, Any] = {"PartNumber": len(parts) + 1, "ChecksumCRC32C": check}
            fields = part | upload | bucket._key(name)
            try:
                return part, bucket.connection.call("upload_part", Body=content, **fields)
            except fault_types() as error:
                if not parts and fault_of(error).status in (None, 408):  # it was cut off
                    length = max(length // gcs_upload.SHRINK, least)
                raise

        try:
            while start < size:  # parts of one length, as R2 requires: that of the first one kept
                part, sent = bucket.send(send_part, name, permission="")
                parts.append(part | {"ETag": sent.get("ETag")})
                is_verified &= sent.get("ChecksumCRC32C") == part["ChecksumCRC32C"]
                start += length
            whole |= {"ChecksumCRC32C": crc32c_to_base64(self._checksum), "IfNoneMatch": "*"}
            made = {"MultipartUpload": {"Parts": parts}} | whole | upload
            bucket._send("complete_multipart_upload", name, **made)
        except BucketError:
            with contextlib.suppress(*fault_types()):  # else the parts are stored, and cost money
                bucket.connection.call("abort_multipart_upload", **bucket._key(name), **upload)
            raise
        return bucket.info(name) if is_verified else None


class S3Bucket(GcsBucket):
    """The objects below `s3://bucket/prefix`; a generation is an ETag, its bytes as a number."""

    scheme = "s3"
    connection_type, upload_type = S3Connection, PartsUpload
    connection: S3Connection
    fault_types, fault_of = staticmethod(fault_types), staticmethod(fault_of)

    @property
    def endpoint(self) -> str:
        """Address of the store's server."""
        return next(filter(None, map(os.environ.get, _ENDPOINTS)), "https://s3.amazonaws.com")

    def resource(self, name: str | None, **chosen: Any) -> object:
        """Request what `GcsBucket` does once, and return it in the form of Google's resource."""
        if name is None:
            token = {"ContinuationToken": chosen["pageToken"]} if chosen["pageToken"] else {}
            page = self.connection.call("list_objects_v2", Prefix=chosen["prefix"], **token)
            items = [_resource(one) for one in page.get("Contents", [])]
            return {"items": items, "nextPageToken": page.get("NextContinuationToken")}
        found = self._head(name)
        resource = _resource(found)
        if resource["crc32c"] is None and _DIRECTORY not in self._address:
            resource["checksum"] = _other_checksum(found)
        return resource

    def _head(self, name: str) -> dict[str, Any]:
        key = self._key(name)
        try:
            return {**key, **self.connection.call("head_object", **key, ChecksumMode="ENABLED")}
        except fault_types() as error:
            if fault_of(error).status in (301, 400, 403):  # HEAD has no message; GET has one
                self.connection.call("get_object", **key, Range="bytes=0-0")["Body"].close()
            raise

    def delete(self, name: str) -> None:
        """Remove one object, if it exists."""
        self._send("delete_object", name)

    def media(
        self, name: str, *, start: int, end: int | None = None, generation: int | None = None
    ) -> Iterator[bytes]:
        """Request the bytes `start` to `end` (inclusive) of an object once, and yield them."""
        chosen = self._key(name)
        if start or end is not None:
            chosen["Range"] = f"bytes={start}-{'' if end is None else end}"
        if generation is not None:
            chosen["IfMatch"] = _etag(generation)
        response = self.connection.call("get_object", **chosen)
        self.require_plain(name, response.get("ContentEncoding"))
        sent = response.get("ETag")
        if sent and generation is not None and _plain(sent) != _plain(_etag(generation)):
            raise ConnectionError(f"the response holds the version {sent[:40]}, another one")
        found = re.fullmatch(r"bytes (\d+)-\d+/\d+", response.get("ContentRange", ""))
        with contextlib.closing(response["Body"]) as body:
            if "Range" in chosen and (not found or int(found[1]) != start):
                raise ConnectionError("the response holds another range than was requested")
            yield from body.iter_chunks(READ_BYTES)

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock."""
        found = self.send(lambda: self._head(name), name, permission="")
        now = parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - found["LastModified"]).total_seconds())

    def write(self, name: str, content: bytes, *, overwrite: bool | int = False) -> BlobInfo:
        """Store a small object. Other bytes of that name are an error unless `overwrite`."""
        checksum = extended_crc32c(0, content)
        fields = {"Body": content, "ChecksumCRC32C": crc32c_to_base64(checksum)} | self._key(name)
        if overwrite is not True:
            fields |= {"IfMatch": _etag(overwrite)} if overwrite else {"IfNoneMatch": "*"}

        def send() -> BlobInfo | None:
            stored = self.connection.call("put_object", ChecksumAlgorithm="CRC32C", **fields)
            if "ChecksumCRC32C" not in stored:
                return None  # the store has not verified it: it is read
            return self.blob_info(_resource(fields | stored | {"Size": len(content)}))

        here = len(content), checksum
        return self._store(name, here, lambda: self.send(send, name, permission=""))

    def refused(self, fault: Fault, name: str, *, permission: str) -> RefusedRequestError:
        """Build the error of a permanent fault."""
        words = {*fault.reason.replace(":", "").split(), str(fault.status)}
        fixes = [fix for code, fix in _FIXES.items() if code in words]
        fix = fixes[0] if fixes else "The request will fail again; the store's message says why."
        text = f"{self.address(name)}: {fault.reason}. {fix}"
        return RefusedRequestError(text, status=fault.status)

    def _key(self, name: str) -> dict[str, Any]:
        return {"Key": self._root + checked_name(name, where=self._address)}

    def _send(self, operation: str, name: str, **fields: Any) -> Any:
        key = self._key(name)

        def send() -> Any:
            answer = self.connection.call(operation, **key, **fields)
            if (named := answer.get("Key", key["Key"])) != key["Key"]:
                raise ConnectionError(f"the response is about another object: {named!r:.80}")
            return answer

        return self.send(send, name, permission="")


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')  # some servers weaken or unquote an ETag


def _etag(generation: int) -> str:
    return generation.to_bytes(128, "big").lstrip(b"\0").decode()
