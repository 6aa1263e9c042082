"""Check the data and the rights in a run's buckets, with an object that is removed again."""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import os
import socket
import stat
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from refocused.bucket.bucket import Bucket
from refocused.bucket.gcs_errors import RefusedRequestError
from refocused.config.data import DataConfig
from refocused.doctor.finding import Finding
from refocused.system.errors import BucketError, RefocusedError

if TYPE_CHECKING:
    from refocused.prepare.inspect_data import DataReport


_STORE = "https://storage.googleapis.com"
_TIMEOUT_S = 10.0
LOOKUP_SECONDS = 1.5


def store_time_s() -> float | None:
    """Return the store's clock in seconds since 1970, whole ones; None: it cannot be reached."""
    address = os.environ.get("STORAGE_EMULATOR_HOST") or _STORE
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # any answer tells the time
        date = error.headers["Date"]
    except (OSError, ValueError):
        return None
    return None if date is None else email.utils.parsedate_to_datetime(date).timestamp()


def missing_store_name() -> str | None:
    """Return the store's host name where DNS says that there is none; None: it may be reached.

    A slow or failing DNS proves nothing, and behind a proxy names are looked up elsewhere.
    """
    address = urllib.parse.urlsplit(os.environ.get("STORAGE_EMULATOR_HOST") or _STORE)
    host, answers = address.hostname, []
    if host is None or address.scheme in urllib.request.getproxies():
        return None

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            answers.append(error.errno)

    thread = threading.Thread(target=look_up, daemon=True)  # DNS may take longer than we wait
    thread.start()
    thread.join(LOOKUP_SECONDS)
    return host if answers and answers[0] in (socket.EAI_NONAME, socket.EAI_NODATA) else None


NAMED_PROBLEMS = 3
SMALL_SHARE = 0.5
SAMPLED_TOKENS = 4_000_000
SAMPLED_TOKENS_QUICK = 400_000


def sources_of(data: DataConfig) -> Mapping[str, DataConfig]:
    """Return the settings of each source, by the setting that names it."""
    if data.source is not None:
        return {"data.source": data}
    return {f"data.mixture.{name}": data.of_source(name) for name in data.mixture}


def probe_data(
    bucket: Bucket, data: DataConfig, *, vocabulary: int, is_quick: bool
) -> DataReport | Finding:
    """Look at a source's files; the finding says why they cannot be looked at."""
    from refocused.prepare.inspect_data import inspect_data

    tokens = SAMPLED_TOKENS_QUICK if is_quick else SAMPLED_TOKENS
    try:
        return inspect_data(bucket, data, sample_tokens=tokens, vocabulary=vocabulary)
    except RefocusedError as error:
        return Finding("data", "fail", str(error))


def judge_data(
    report: DataReport, data: DataConfig, *, vocabulary: int, setting: str
) -> Iterator[Finding]:
    """Say whether a source's files can be used by the model.

    Args:
        report: What was found in them.
        data: How they are read.
        vocabulary: Ids that the model knows.
        setting: Which setting names the source.
    """
    for problem in report.problems[:NAMED_PROBLEMS]:
        yield Finding("data", "fail", f"{report.url}: {problem}")
    if len(report.problems) > NAMED_PROBLEMS:
        more = len(report.problems) - NAMED_PROBLEMS
        text = f"{report.url}: and {more} more problems"
        yield Finding("data", "fail", text, f"python launch/prepare_data.py inspect {data.source}")
    if report.problems:
        return
    if report.unlisted:
        yield Finding(
            "data",
            "warn",
            f"{setting} {report.url}: {report.unlisted:,} of {report.files:,} token files are not "
            "used, because manifest.json does not list them",
            f"Add them with: python launch/prepare_data.py manifest {report.url} --update; or put "
            "them in data.exclude.",
        )
        return
    sample = report.sample
    ids = "" if sample.max_id is None else f", ids {sample.min_id} to {sample.max_id:,}"
    text = (
        f"{setting} {report.url}: {report.files:,} files, {report.tokens:,} tokens{ids} of "
        f"{vocabulary:,} ({sample.tokens:,} read)"
    )
    if sample.max_id is not None and sample.max_id < SMALL_SHARE * vocabulary:
        yield Finding(
            "data",
            "warn",
            f"{text}: the upper half of the vocabulary is not met",
            "Set model.vocabulary to the size of the tokenizer that made the tokens.",
        )
    else:
        yield Finding("data", "ok", text)


T = TypeVar("T")

CANARY = b"refocused doctor: may be removed\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Rights:
    """What was tried in a bucket.

    Attributes:
        setting: Which setting names the bucket.
        url: Its address.
        allowed: What worked: `list`, `read`, `write`, `delete`.
        refused: What did not, and the error's text.
        left: The object that could not be removed again; None: nothing is left.
    """

    setting: str
    url: str
    allowed: tuple[str, ...]
    refused: dict[str, str]
    left: str | None = None


def probe_source(bucket: Bucket, setting: str) -> Rights:
    """List a source, and read a byte of its first object."""
    trial = _Trial()
    first = trial("list", lambda: next(iter(bucket.list()), None))
    if first is not None:
        trial("read", lambda: bucket.read(first.name, length=1))
    return Rights(setting, bucket.url, tuple(trial.allowed), trial.refused)


def probe_mirror(bucket: Bucket, setting: str, *, canary: str) -> Rights:
    """Write an object, find it in a listing, read it and remove it.

    Args:
        bucket: The mirror.
        setting: Which setting names it.
        canary: Name of the object; nobody else's.
    """
    missing = [] if "://" in bucket.url else _missing_folders(Path(bucket.url))
    trial = _Trial()
    written = trial("write", lambda: bucket.write(canary, CANARY))
    if trial.is_answered:
        trial("list", lambda: _found(bucket, canary, expected=written is not None))
    if written is not None:
        trial("read", lambda: _same(bucket, canary))
        trial("delete", lambda: bucket.delete(canary))
    for folder in missing:
        with contextlib.suppress(OSError):
            folder.rmdir()
    left = canary if written is not None and "delete" in trial.refused else None
    return Rights(setting, bucket.url, tuple(trial.allowed), trial.refused, left)


def judge_rights(rights: Rights, *, wanted: frozenset[str]) -> Iterator[Finding]:
    """Say which rights are missing.

    Args:
        rights: What was tried.
        wanted: What the run cannot do without; the rest is a warning.
    """
    for verb, text in rights.refused.items():
        left = ""
        if verb == "delete":
            left = (
                f" The object {rights.left} stays there. Copies can be made without this right; a "
                "step that is saved again after a rewind, and latest/pointer.json, cannot."
            )
        yield Finding(
            "bucket",
            "fail" if verb in wanted else "warn",
            f"{rights.setting}: {verb} does not work. {text}{left}",
        )
    if not rights.refused:
        verbs = ", ".join(rights.allowed)
        yield Finding("bucket", "ok", f"{rights.setting} {rights.url}: {verbs}")


def judge_credentials(
    *, identity: str | None, anonymous: bool, writes: bool, exposed: Path | None
) -> Finding:
    """Say who asks.

    Args:
        identity: In words; None: the run asks no `gs://`.
        anonymous: Nobody.
        writes: Whether the run writes to `gs://`.
        exposed: A key file that others on this machine may read; None: there is none.
    """
    if identity is None:
        return Finding("credentials", "ok", "none are needed: source and mirror are folders")
    if anonymous and writes:
        return Finding(
            "credentials",
            "fail",
            f"{identity}, and the mirror has to be written",
            "gcloud auth application-default login, or --gcs-credentials KEY.json.",
        )
    if exposed is not None:
        text = f"{identity}; everybody on this machine may read the key"
        return Finding("credentials", "warn", text, f"chmod 600 {exposed}")
    return Finding("credentials", "ok", identity)


def judge_wandb(offline: str | None) -> Finding:
    """Say whether Weights & Biases can be told of the run.

    Args:
        offline: What is in the way; None: nothing.
    """
    if offline is None:
        return Finding("wandb", "ok", "a key is there, and its host answers")
    return Finding(
        "wandb",
        "warn",
        f"{offline}: all goes to RUN/wandb",
        "Log in (wandb login, or WANDB_API_KEY) before the start, or send it later (wandb sync).",
    )


def exposed_key(file: Path | None) -> Path | None:
    """Return a key file that others may read."""
    if file is None or not file.is_file():
        return None
    return file if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) else None


def canary_name(prefix: str) -> str:
    """Return a name that no other object has."""
    return f"{prefix}/doctor-{os.urandom(8).hex()}.txt"


def _missing_folders(folder: Path) -> list[Path]:
    """Return what writing to a folder would make: itself at first, then what it lies in."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


class _Trial:
    """Tries one thing after another, and remembers what worked."""

    def __init__(self) -> None:
        self.allowed: list[str] = []
        self.refused: dict[str, str] = {}
        self.is_answered = True  # what does not answer at all is not asked for more

    def __call__(self, verb: str, action: Callable[[], T]) -> T | None:
        try:
            result = action()
        except BucketError as error:
            self.refused[verb] = str(error)
            self.is_answered = isinstance(error, RefusedRequestError)
            return None
        self.allowed.append(verb)
        return result


def _found(bucket: Bucket, name: str, *, expected: bool) -> None:
    names = [blob.name for blob in bucket.list(name)]
    if expected and name not in names:
        raise BucketError(
            f"{bucket.url}: {name} was written, and the listing does not show it. Choose a store "
            "that lists what it has."
        )


def _same(bucket: Bucket, name: str) -> None:
    if bucket.read(name) != CANARY:
        raise BucketError(f"{bucket.url}: {name} is not read as it was written.")
