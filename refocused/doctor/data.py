"""Whether a run's tokens can be used by its model: headers of all files, ids of some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.doctor.finding import Finding
from refocused.system.errors import RefocusedError

if TYPE_CHECKING:
    from refocused.prepare.inspect_data import DataReport

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
