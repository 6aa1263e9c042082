"""Check the data and the rights in a run's buckets, with a temporary object."""

from __future__ import annotations

import contextlib
import email.utils
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import requests

from refocused.bucket.bucket import ANONYMOUS, Bucket
from refocused.bucket.retry import RefusedRequestError
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.doctor.finding import Finding, Level
from refocused.system.errors import BucketError, as_typed, counted

if TYPE_CHECKING:
    from refocused.prepare.inspect_data import DataReport

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
NAMED_PROBLEMS = 3
SMALL_SHARE = 0.5
CANARY = b"refocused doctor: may be removed\n"
RENEWED = b"refocused doctor: may be removed, too\n"


def store_time_s(endpoint: str) -> float | None:
    """Return the time of a store's server in seconds since 1970; None if it cannot be reached."""
    try:
        answer = requests.head(endpoint, timeout=TIMEOUT_SECONDS)
        return email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (OSError, LookupError, ValueError):
        return None


def judge_data(report: DataReport, *, vocabulary: int, setting: str) -> Iterator[Finding]:
    """Report whether the files of a source suit the model's vocabulary."""
    for problem in report.problems[:NAMED_PROBLEMS]:
        yield Finding("data", "fail", f"{report.url}: {problem}")
    if len(report.problems) > NAMED_PROBLEMS:
        text = f"{report.url}: and {counted(len(report.problems) - NAMED_PROBLEMS, 'more problem')}"
        yield Finding("data", "fail", text, as_typed(f"prepare_data inspect {report.url}"))
    if report.problems:
        return
    if report.unlisted:
        text = f"{setting} {report.url}: {report.unlisted:,} of {report.files:,} token files are "
        text += "not used: manifest.json does not list them"
        add = f"Add them with: {as_typed('prepare_data manifest')} {report.url} --update"
        yield Finding("data", "warn", text, f"{add}; or put them in data.exclude.")
        return
    sample = report.sample
    ids = "" if sample.max_id is None else f", ids {sample.min_id} to {sample.max_id:,}"
    text = f"{setting} {report.url}: {counted(report.files, 'file')}, {report.tokens:,} tokens"
    text += f"{ids} of {vocabulary:,} ({sample.tokens:,} read)"
    if sample.max_id is not None and sample.max_id < SMALL_SHARE * vocabulary:
        text = f"{text}: no id is in the upper half of the vocabulary"
        fix = "Set model.vocabulary to the size of the tokenizer that made the tokens."
        yield Finding("data", "warn", text, fix)
    else:
        yield Finding("data", "ok", text)


class _Rights:
    """The actions that worked in the bucket of a setting, and the errors of the others."""

    def __init__(self, setting: str, bucket: Bucket) -> None:
        self._place = f"{setting} {bucket.url}"
        self._setting = setting
        self.allowed: list[str] = []
        self._refused: dict[str, str] = {}
        self.is_answered = True  # else there is no point in trying more

    def attempt(self, verb: str, action: Callable[[], T]) -> T | None:
        """Run an action in the bucket, record whether it worked, and return its result."""
        try:
            result = action()
        except BucketError as error:
            self._refused[verb] = str(error)
            self.is_answered = isinstance(error, RefusedRequestError)
            return None
        self.allowed.append(verb)
        return result

    def findings(self, *, unneeded: str = "") -> Iterator[Finding]:
        """Report missing rights; the run does not need the `unneeded` one."""
        for verb, text in self._refused.items():
            level: Level = "warn" if verb == unneeded else "fail"
            yield Finding("bucket", level, f"{self._setting}: {verb} failed. {text}")
        if not self._refused:
            yield Finding("bucket", "ok", f"{self._place}: {', '.join(self.allowed)}")


def check_source(bucket: Bucket, setting: str) -> Iterator[Finding]:
    """List a source and read a byte of its first object."""
    rights = _Rights(setting, bucket)
    first = rights.attempt("list", lambda: next(iter(bucket.list()), None))
    if first is not None:
        rights.attempt("read", lambda: bucket.read(first.name, length=1))
    elif "list" not in rights.allowed and rights.is_answered:  # a manifest may do instead
        with contextlib.suppress(BucketError):
            bucket.read(MANIFEST_NAME, length=1)
            rights.allowed.append("read")
    return rights.findings(unneeded="list" if "read" in rights.allowed else "")


def check_mirror(bucket: Bucket, setting: str, *, prefix: str, removes: bool) -> Iterator[Finding]:
    """Write an object below a prefix, find it in a listing, read, replace and remove it.

    `removes`: the run removes checkpoints from its mirror.
    """
    canary = f"{prefix}/doctor-{os.urandom(8).hex()}.txt"  # a name that no other object has
    folder = Path(bucket.url)
    made = [] if "://" in bucket.url else [p for p in (folder, *folder.parents) if not p.exists()]

    def find() -> None:
        if "write" in rights.allowed and canary not in [blob.name for blob in bucket.list(canary)]:
            text = f"{canary} was written, but the listing does not show it. Use another store."
            raise BucketError(f"{bucket.url}: {text}")

    def read() -> None:
        if bucket.read(canary) != CANARY:
            raise BucketError(f"{bucket.url}: {canary} has other bytes than were written.")

    def replace() -> None:
        if written is None or written.generation is None:
            return
        try:
            bucket.write(canary, RENEWED, overwrite=written.generation)
        except RefusedRequestError as error:
            why = "A run renews its lease so: the store must support If-Match and allow it."
            raise RefusedRequestError(f"{error} {why}") from error
        try:
            bucket.write(canary, CANARY, overwrite=written.generation)
        except BucketError:
            return  # as it should be: that version is no longer there
        raise BucketError(
            f"{bucket.url}: a condition on a write (If-Match) has no effect, so that two machines "
            "could train one run. Use another store."
        )

    def delete() -> None:
        try:
            bucket.delete(canary)
        except BucketError as error:
            raise BucketError(
                f"{error} The object {canary} stays there. Without this right, the mirror cannot "
                "replace a checkpoint that is saved again, nor latest/pointer.json."
            ) from error

    rights = _Rights(setting, bucket)
    written = rights.attempt("write", lambda: bucket.write(canary, CANARY))
    if rights.is_answered:
        rights.attempt("list", find)
    if "write" in rights.allowed:
        rights.attempt("read", read)
        if bucket.endpoint is not None:  # in a folder, a lock keeps the condition
            rights.attempt("replace", replace)
        rights.attempt("delete", delete)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()
    return rights.findings(unneeded="" if removes else "delete")


def judge_credentials(identity: str | None, *, writes: bool, key: Path | None) -> Finding:
    """Report the identity for the store; None if the run uses only folders."""
    if identity is None:
        return Finding("credentials", "ok", "not needed: source and mirror are folders")
    if identity == ANONYMOUS and writes:
        text = f"{identity}, but the run writes to the mirror"
        fix = "gcloud auth application-default login, or --gcs-credentials KEY.json; aws configure."
        return Finding("credentials", "fail", text, fix)
    if key is not None and key.is_file() and key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        text = f"{identity}; every user of this machine can read the key"
        return Finding("credentials", "warn", text, f"chmod 600 {key}")
    return Finding("credentials", "ok", identity)


def judge_wandb(offline: str | None) -> Finding:
    """Report whether Weights & Biases can be reached; `offline` is the reason if not."""
    if offline is None:
        return Finding("wandb", "ok", "a key is set, and its host answers")
    fix = "Log in before the start (wandb login or WANDB_API_KEY), or upload later (wandb sync)."
    return Finding("wandb", "warn", f"{offline}: the run writes to RUN/wandb", fix)
