"""Settings of the data: where the token files are, how they are read, what validates."""

from __future__ import annotations

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
    matching,
)

TokenType = Literal["uint16", "uint32", "int32", "int64"]


SourceName = Annotated[
    str,
    matching(
        r"[A-Za-z][A-Za-z0-9_]{0,31}",
        "a source's name is letters, digits and '_', at most 32, and begins with a letter",
    ),
]


class SourceConfig(Section):
    """One source of a mixture; what it leaves out is as in the data section."""

    source: str
    """`gs://bucket/prefix` or a folder that holds its token files."""
    weight: Positive
    """Share of the windows, relative to the weights of the others."""
    include: tuple[str, ...] | None = None
    """As `data.include`, for this source."""
    exclude: tuple[str, ...] | None = None
    """As `data.exclude`, for this source."""
    validation_files: tuple[str, ...] | None = None
    """As `data.validation_files`, for this source; also in place of `validation_fraction`."""
    dtype: TokenType | None = None
    """As `data.dtype`, for this source."""
    pad_id: CountOrZero | None = None
    """As `data.pad_id`, for this source."""


class DataConfig(Section):
    """Where tokens come from and how they become windows."""

    source: str | None = None
    """`gs://bucket/prefix` or a folder that holds the token files."""
    mixture: Annotated[
        dict[SourceName, SourceConfig],
        pydantic.BeforeValidator(lambda value: {} if value is None else value),
    ] = pydantic.Field(default={})
    """Several sources by name, in place of `source`; the other settings are for all of them."""
    prepare: Literal["python_stdlib"] | None = None
    """What fills the source when it is an empty folder; `python_stdlib` writes the source text of
    Python's own standard library as bytes."""
    tokenizer: str = "unknown"
    """The tokenizer that made the tokens: `bytes`, `gpt2`, a file of the `tokenizers` library, or
    `hub:MODEL` (of the Hugging Face hub, fetched once). Every checkpoint holds it. Never guessed.
    """
    bpe_folder: str | None = None
    """Folder of GPT-2's `vocab.bpe` and `encoder.json`; without it checkpoints name gpt2 but do not
    hold it."""
    cache: str = "data/cache"
    """Folder of the local shards, with a folder below it for each data set."""
    disk_limit_gb: Positive | None = None
    """Limit of the local shards, in 1e9 bytes; null: all free space but 5 %."""
    max_files: Count | None = None
    """Use only the first N training files in name order."""
    include: tuple[str, ...] = ()
    """Glob patterns of objects to use; empty: every file of a known format."""
    exclude: tuple[str, ...] = ()
    """Glob patterns of objects to leave out. A change is other data: see `skip` for a run that has
    begun."""
    skip: tuple[str, ...] = ()
    """Glob patterns of files whose windows are left out from here on, also in validation, and which
    are not fetched. Later windows take their places; order, position and fingerprint stay, so a run
    can go on. Of packed chunks the whole pack is left out."""
    validation_files: tuple[str, ...] = ()
    """Glob patterns of the files kept for validation."""
    validation_fraction: Fraction = 0.0
    """Share of the windows kept for validation when no file is named: the last in name order."""
    dtype: TokenType | None = None
    """Type of the tokens in `.bin` files without a header."""
    pad_id: CountOrZero | None = None
    """Id that fills rows on the right in files without a mask."""
    separator_id: CountOrZero | None = None
    """End-of-text id put between rows of padded files; `mask_documents` refuses to go without."""
    document_id: CountOrZero | None = None
    """End-of-text id that precedes each document."""
    mask_documents: bool = False
    """Keep attention within documents, and do not train on predicting `document_id`."""
    block_shards: CountOrZero = 0
    """Shards that are shuffled together; 0: 16, or what `disk_limit_gb` holds."""
    fetch_ahead_shards: Count = 4
    """Shards downloaded ahead of their use, beyond the block in use."""
    fetch_ahead_seconds: NotNegative = 300.0
    """Training time whose shards are downloaded ahead, if that is more: how long the bucket may be
    away unnoticed."""
    fetch_ahead_gb: Positive | None = None
    """Limit of the shards downloaded ahead, in 1e9 bytes; null: what `disk_limit_gb` leaves."""
    fetch_timeout_s: Positive = 600.0
    """Longest wait for one shard without progress, in seconds."""
    fetch_threads: Whole = pydantic.Field(default=8, ge=1, le=64)
    """Downloads at once; from a folder, at most one a core."""

    @pydantic.model_validator(mode="after")
    def _settings_fit(self) -> DataConfig:
        if self.validation_files and self.validation_fraction:
            raise ValueError(
                "validation_files and validation_fraction are both set; keep the one that is meant"
            )
        if self.source is None and not self.mixture:
            raise ValueError("source is missing: give it, or a mixture of several sources")
        if self.source is not None and self.mixture:
            raise ValueError("source and mixture are both set; keep the one that is meant")
        if self.mixture and self.prepare is not None:
            raise ValueError("prepare fills the folder of source, which a mixture does not have")
        if self.bpe_folder is not None and self.tokenizer != "gpt2":
            raise ValueError(
                f"bpe_folder holds gpt2's files, and tokenizer is {self.tokenizer}; drop one"
            )
        if self.mask_documents and self.document_id is None:
            raise ValueError("mask_documents needs document_id, the id that precedes each document")
        if self.mask_documents and self.separator_id not in (None, self.document_id):
            raise ValueError(
                f"mask_documents finds documents by document_id = {self.document_id}, but rows are "
                f"separated by separator_id = {self.separator_id}; give both the same id"
            )
        return self

    @property
    def tokenizer_is_readable(self) -> bool:
        """Whether the tokenizer's files are named, so that checkpoints can hold them."""
        is_gpt2_by_name = self.tokenizer == "gpt2" and self.bpe_folder is None
        return self.tokenizer != "unknown" and not is_gpt2_by_name

    def of_source(self, name: str) -> DataConfig:
        """Return the settings of one source of the mixture, as those of a run with it alone."""
        chosen = self.mixture[name]
        given = chosen.model_dump(exclude={"weight"}, exclude_none=True)
        if chosen.validation_files is not None:
            given["validation_fraction"] = 0.0
        given["skip"] = tuple(pattern.removeprefix(f"{name}/") for pattern in self.skip)
        return self.model_copy(update={"mixture": {}, **given})
