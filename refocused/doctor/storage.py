"""Check the data and the rights in a run's buckets, with an object that is removed again."""

from __future__ import annotations

import contextlib
import email.utils
import os
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from refocused.bucket.bucket import Bucket
from refocused.bucket.gcs_client import ANONYMOUS
from refocused.bucket.gcs_errors import RefusedRequestError
from refocused.doctor.early import STORE
from refocused.doctor.finding import Finding, Level
from refocused.system.errors import BucketError

if TYPE_CHECKING:
    from refocused.prepare.inspect_data import DataReport

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
NAMED_PROBLEMS = 3
SMALL_SHARE = 0.5
CANARY = b"refocused doctor: may be removed\n"


def store_time_s() -> float | None:
    """Return the store's clock in whole seconds since 1970; None: it cannot be reached."""
    address = os.environ.get("STORAGE_EMULATOR_HOST") or STORE
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # any answer tells the time
        date = error.headers["Date"]
    except (OSError, ValueError):
        return None
    return None if date is None else email.utils.parsedate_to_datetime(date).timestamp()


def judge_data(report: DataReport, *, vocabulary: int, setting: str) -> Iterator[Finding]:
    """Report whether the files of the source that a setting names suit the model's vocabulary."""
    for problem in report.problems[:NAMED_PROBLEMS]:
        yield Finding("data", "fail", f"{report.url}: {problem}")
    if len(report.problems) > NAMED_PROBLEMS:
        text = f"{report.url}: and {len(report.problems) - NAMED_PROBLEMS} more problems"
        yield Finding("data", "fail", text, f"python launch/prepare_data.py inspect {report.url}")
    if report.problems:
        return
    if report.unlisted:
        text = f"{setting} {report.url}: {report.unlisted:,} of {report.files:,} token files are "
        text += "not used, because manifest.json does not list them"
        add = f"Add them with: python launch/prepare_data.py manifest {report.url} --update"
        yield Finding("data", "warn", text, f"{add}; or put them in data.exclude.")
        return
    sample = report.sample
    ids = "" if sample.max_id is None else f", ids {sample.min_id} to {sample.max_id:,}"
    text = (
        f"{setting} {report.url}: {report.files:,} files, {report.tokens:,} tokens{ids} of "
        f"{vocabulary:,} ({sample.tokens:,} read)"
    )
    if sample.max_id is not None and sample.max_id < SMALL_SHARE * vocabulary:
        text = f"{text}: the upper half of the vocabulary does not occur"
        fix = "Set model.vocabulary to the size of the tokenizer that made the tokens."
        yield Finding("data", "warn", text, fix)
    else:
        yield Finding("data", "ok", text)


class _Rights:
    """What worked in the bucket that a setting names, and the errors of what did not."""

    def __init__(self, setting: str, bucket: Bucket) -> None:
        self._place = f"{setting} {bucket.url}"
        self._setting = setting
        self._allowed: list[str] = []
        self._refused: dict[str, str] = {}
        self.is_answered = True  # a store that does not answer at all is not asked for more

    def attempt(self, verb: str, action: Callable[[], T]) -> T | None:
        """Do something in the bucket and note whether it worked; return its result."""
        try:
            result = action()
        except BucketError as error:
            self._refused[verb] = str(error)
            self.is_answered = isinstance(error, RefusedRequestError)
            return None
        self._allowed.append(verb)
        return result

    def findings(self, *, unneeded: str = "") -> Iterator[Finding]:
        """Report which rights are missing; the run does without the one that is `unneeded`."""
        for verb, text in self._refused.items():
            level: Level = "warn" if verb == unneeded else "fail"
            yield Finding("bucket", level, f"{self._setting}: {verb} does not work. {text}")
        if not self._refused:
            yield Finding("bucket", "ok", f"{self._place}: {', '.join(self._allowed)}")


def check_source(bucket: Bucket, setting: str) -> Iterator[Finding]:
    """List a source, and read a byte of its first object."""
    rights = _Rights(setting, bucket)
    first = rights.attempt("list", lambda: next(iter(bucket.list()), None))
    if first is not None:
        rights.attempt("read", lambda: bucket.read(first.name, length=1))
    return rights.findings()


def check_mirror(bucket: Bucket, setting: str, *, prefix: str, removes: bool) -> Iterator[Finding]:
    """Write an object below a prefix, find it in a listing, read it and remove it.

    `removes`: the run removes checkpoints from its mirror.
    """
    canary = f"{prefix}/doctor-{os.urandom(8).hex()}.txt"  # a name that no other object has
    folder = Path(bucket.url)
    made = [] if "://" in bucket.url else [p for p in (folder, *folder.parents) if not p.exists()]

    def write() -> bool:
        bucket.write(canary, CANARY)
        return True

    def find() -> None:
        if written and canary not in [blob.name for blob in bucket.list(canary)]:
            raise BucketError(
                f"{bucket.url}: {canary} was written, and the listing does not show it. Choose a "
                "store that lists what it has."
            )

    def read() -> None:
        if bucket.read(canary) != CANARY:
            text = f"{bucket.url}: {canary} reads back as other bytes than were written."
            raise BucketError(text)

    def delete() -> None:
        try:
            bucket.delete(canary)
        except BucketError as error:
            raise BucketError(
                f"{error} The object {canary} stays there. Copies can be made without this right; "
                "a step that is saved again after a rewind, and latest/pointer.json, cannot."
            ) from error

    rights = _Rights(setting, bucket)
    written = rights.attempt("write", write)
    if rights.is_answered:
        rights.attempt("list", find)
    if written:
        rights.attempt("read", read)
        rights.attempt("delete", delete)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()
    return rights.findings(unneeded="" if removes else "delete")


def judge_credentials(identity: str | None, *, writes: bool, key: Path | None) -> Finding:
    """Report who reads, and perhaps writes, `gs://`; `identity` is None where nobody has to."""
    if identity is None:
        return Finding("credentials", "ok", "none are needed: source and mirror are folders")
    if identity == ANONYMOUS and writes:
        text = f"{identity}, but the mirror must be written"
        fix = "gcloud auth application-default login, or --gcs-credentials KEY.json."
        return Finding("credentials", "fail", text, fix)
    if key is not None and key.is_file() and key.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        text = f"{identity}; every user of this machine can read the key"
        return Finding("credentials", "warn", text, f"chmod 600 {key}")
    return Finding("credentials", "ok", identity)


def judge_wandb(offline: str | None) -> Finding:
    """Report whether Weights & Biases can be reached; `offline` says what prevents it."""
    if offline is None:
        return Finding("wandb", "ok", "a key is set, and its host answers")
    fix = "Log in (wandb login, or WANDB_API_KEY) before the start, or send it later (wandb sync)."
    return Finding("wandb", "warn", f"{offline}: everything is written to RUN/wandb", fix)
