"""Settings of the data: where the token files are, how they are read, what validates."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pydantic

from refocused.config.section import (
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    Section,
    Whole,
)

TokenType = Literal["uint16", "uint32", "int32", "int64"]


def _source_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", value):
        raise ValueError(
            "a source's name is letters, digits and '_', at most 32, and begins with a letter"
        )
    return value


SourceName = Annotated[str, pydantic.AfterValidator(_source_name)]


class SourceConfig(Section):
    """One source of a mixture; what it leaves out is as the data section says.

    Attributes:
        source: `gs://bucket/prefix` or a folder that holds its token files.
        weight: Its share of the windows, relative to the weights of the others.
        include: In place of `data.include`.
        exclude: In place of `data.exclude`.
        validation_files: In place of `data.validation_files` and `data.validation_fraction`.
        dtype: In place of `data.dtype`.
        pad_id: In place of `data.pad_id`.
    """

    source: str
    weight: Positive
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    validation_files: tuple[str, ...] | None = None
    dtype: TokenType | None = None
    pad_id: CountOrZero | None = None


class DataConfig(Section):
    """Where tokens come from and how they become windows.

    Attributes:
        source: `gs://bucket/prefix` or a folder that holds the token files.
        mixture: Several sources by name, in place of `source`; the other settings are for all.
        prepare: What makes the source when it is an empty folder; `python_stdlib` writes the
            source text of Python's own standard library as bytes.
        tokenizer: The tokenizer that the tokens came from: `bytes`, `gpt2`, a file of the
            `tokenizers` library, or `hub:MODEL` (of the Hugging Face hub, fetched once); it travels
            in every checkpoint. Never guessed.
        bpe_folder: Folder of GPT-2's `vocab.bpe` and `encoder.json`; None: checkpoints name gpt2
            but do not hold it.
        cache: Folder of the local shards; one below it for each data set.
        disk_limit_gb: Most that the local shards may take, in 1e9 bytes; None: all that is free
            but 5 %.
        max_files: Use only the first N training files in name order.
        include: Glob patterns of object names to use; empty: every file of a known format.
        exclude: Glob patterns of object names to leave out.
        skip: Glob patterns of files whose windows are left out from here on, those that validate
            too, and which are not fetched. Windows that follow take their places; order, position
            and fingerprint stay, so that a run goes on where it stands. Of packed chunks the whole
            pack is left out.
        validation_files: Glob patterns of the files kept for validation.
        validation_fraction: Share of the windows kept for validation when no file is named: the
            last ones in name order.
        dtype: Element type of headerless `.bin` files, which cannot say it themselves.
        pad_id: Id that fills rows on the right in files without a mask.
        separator_id: End-of-text id put between rows of padded files; None: nothing is put there,
            which `mask_documents` refuses.
        document_id: End-of-text id that precedes each document in the files.
        mask_documents: Train within documents alone: no token attends to another document, and
            `document_id` is not predicted where one ends.
        block_shards: Shards whose windows are shuffled together; 0: chosen from `disk_limit_gb`.
        fetch_ahead_shards: Shards fetched ahead of their use, beyond the block in use.
        fetch_ahead_seconds: Time of training whose shards are fetched ahead when that is more, at
            the pace measured so far: how long the bucket may be away unnoticed.
        fetch_ahead_gb: Most that the shards ahead may take, in 1e9 bytes; None: what
            `disk_limit_gb` leaves.
        fetch_timeout_s: Longest wait for one shard without progress, in seconds.
        fetch_threads: Downloads at once; a folder's files are read by at most a thread a core.
    """

    source: str | None = None
    mixture: dict[SourceName, SourceConfig] = pydantic.Field(default={})
    prepare: Literal["python_stdlib"] | None = None
    tokenizer: str = "unknown"
    bpe_folder: str | None = None
    cache: str = "data/cache"
    disk_limit_gb: Positive | None = None
    max_files: Count | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: Fraction = 0.0
    dtype: TokenType | None = None
    pad_id: CountOrZero | None = None
    separator_id: CountOrZero | None = None
    document_id: CountOrZero | None = None
    mask_documents: bool = False
    block_shards: CountOrZero = 0
    fetch_ahead_shards: Count = 4
    fetch_ahead_seconds: NotNegative = 300.0
    fetch_ahead_gb: Positive | None = None
    fetch_timeout_s: Positive = 600.0
    fetch_threads: Whole = pydantic.Field(default=8, ge=1, le=64)

    @pydantic.model_validator(mode="after")
    def _one_way_to_validate(self) -> DataConfig:
        if self.validation_files and self.validation_fraction:
            raise ValueError(
                "validation_files and validation_fraction are both set; keep the one that is meant"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _one_way_to_tokens(self) -> DataConfig:
        if self.source is None and not self.mixture:
            raise ValueError("source is missing: give it, or a mixture of several sources")
        if self.source is not None and self.mixture:
            raise ValueError("source and mixture are both set; keep the one that is meant")
        if self.mixture and self.prepare is not None:
            raise ValueError("prepare fills the folder of source, which a mixture does not have")
        return self

    @pydantic.model_validator(mode="after")
    def _pairs_are_of_gpt2(self) -> DataConfig:
        if self.bpe_folder is not None and self.tokenizer != "gpt2":
            raise ValueError(
                f"bpe_folder holds gpt2's files, and tokenizer is {self.tokenizer}; drop one"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _documents_begin_alike(self) -> DataConfig:
        if not self.mask_documents:
            return self
        if self.document_id is None:
            raise ValueError("mask_documents needs document_id, the id that precedes each document")
        if self.separator_id not in (None, self.document_id):
            raise ValueError(
                f"mask_documents finds documents by document_id = {self.document_id}, but rows are "
                f"separated by separator_id = {self.separator_id}; give both the same id"
            )
        return self

    @property
    def tokenizer_is_readable(self) -> bool:
        """Whether the files of the tokenizer are named, so that it can travel in checkpoints."""
        is_gpt2_by_name = self.tokenizer == "gpt2" and self.bpe_folder is None
        return self.tokenizer != "unknown" and not is_gpt2_by_name

    def of_source(self, name: str) -> DataConfig:
        """Return the settings of one source of the mixture, as those of a run with it alone."""
        chosen = self.mixture[name]
        given = {
            key: value
            for key in ("include", "exclude", "validation_files", "dtype", "pad_id")
            if (value := getattr(chosen, key)) is not None
        }
        if chosen.validation_files is not None:
            given["validation_fraction"] = 0.0
        given["skip"] = tuple(pattern.removeprefix(f"{name}/") for pattern in self.skip)
        return self.model_copy(update={"source": chosen.source, "mixture": {}, **given})
