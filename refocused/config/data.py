"""Settings of the data: where the token files are, how they are read, what validates."""

from __future__ import annotations

from typing import Literal

import pydantic

from refocused.config.section import Count, CountOrZero, Fraction, Positive, Section, Whole


class DataConfig(Section):
    """Where tokens come from and how they become windows.

    Attributes:
        source: `gs://bucket/prefix` or a folder that holds the token files.
        prepare: What makes the source when it is an empty folder; `python_stdlib` writes the
            source text of Python's own standard library as bytes.
        tokenizer: Name of the tokenizer the tokens came from (`bytes`, `gpt2`, a file); recorded
            in checkpoints, never guessed.
        cache: Folder of the local shards; one below it for each data set.
        disk_limit_gb: Most that the local shards may take, in 1e9 bytes; None: all that is free
            but 5 %.
        max_files: Use only the first N training files in name order.
        include: Glob patterns of object names to use; empty: every file of a known format.
        exclude: Glob patterns of object names to leave out.
        validation_files: Glob patterns of the files kept for validation.
        validation_fraction: Share of the windows kept for validation when no file is named: the
            last ones in name order.
        dtype: Element type of headerless `.bin` files, which cannot say it themselves.
        pad_id: Id that fills rows on the right in files without a mask.
        separator_id: End-of-text id put between rows of padded files; None: nothing is put there.
        block_shards: Shards whose windows are shuffled together; 0: chosen from `disk_limit_gb`.
        fetch_ahead_shards: Shards fetched ahead of their use.
        fetch_timeout_s: Longest wait for one shard without progress, in seconds.
        fetch_threads: Downloads at once.
    """

    source: str
    prepare: Literal["python_stdlib"] | None = None
    tokenizer: str = "unknown"
    cache: str = "data/cache"
    disk_limit_gb: Positive | None = None
    max_files: Count | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: Fraction = 0.0
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    pad_id: CountOrZero | None = None
    separator_id: CountOrZero | None = None
    block_shards: CountOrZero = 0
    fetch_ahead_shards: Count = 4
    fetch_timeout_s: Positive = 600.0
    fetch_threads: Whole = pydantic.Field(default=8, ge=1, le=64)

    @pydantic.model_validator(mode="after")
    def _one_way_to_validate(self) -> DataConfig:
        if self.validation_files and self.validation_fraction:
            raise ValueError(
                "validation_files and validation_fraction are both set; keep the one that is meant"
            )
        return self
