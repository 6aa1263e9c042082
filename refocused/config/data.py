"""Settings of the data: where the token files are, how to read them, what to validate on."""

import re
from typing import Annotated, Literal, Self

import pydantic

from refocused.config.section import (
    Count,
    CountOrZero,
    Flag,
    Fraction,
    NotNegative,
    PathText,
    Positive,
    Section,
    Whole,
    matching,
    setting,
)

_STREAM_RANGE = re.compile(r"stream\[(\d{1,15}):(\d{1,15})\]")
TokenType = Literal["uint16", "uint32", "int32", "int64"]
PYTHON_STDLIB = "python_stdlib"  # as `data.source`: text that every machine has
# The folder of these tokens is not a setting: what is written there must not reach a folder that
# somebody named as a source.
STDLIB_FOLDER = "data/stdlib"


SourceName = Annotated[
    str,
    matching(
        r"[A-Za-z][A-Za-z0-9_]{0,31}",
        "a source's name has at most 32 letters, digits and '_', and begins with a letter",
    ),
]


class SourceConfig(Section):
    """One source of a mixture; settings left out are those of the data section."""

    source: PathText = pydantic.Field(examples=["gs://my-bucket/web"])
    """Bucket prefix or folder of its token files, as in `data.source`."""
    weight: NotNegative = pydantic.Field(examples=["3"])
    """Share of the sequences, relative to the weights of the other sources; 0 if only `data.stages`
    use the source."""
    max_epochs: Positive | None = setting(None, "4")
    """Most passes over this source. A run that needs more is refused at the start."""
    include: tuple[str, ...] | None = setting(None, '["web_*"]')
    """As `data.include`, for this source."""
    exclude: tuple[str, ...] | None = setting(None, '["*_old_*"]')
    """As `data.exclude`, for this source."""
    validation_files: tuple[str, ...] | None = setting(None, '["*_val_*"]')
    """As `data.validation_files`, for this source; replaces `validation_fraction`."""
    dtype: TokenType | None = None
    """As `data.dtype`, for this source."""
    pad_id: CountOrZero | None = setting(None, "0")
    """As `data.pad_id`, for this source."""


class StageConfig(Section):
    """A later stage of a mixture, with weights of its own. It lasts until the next one begins."""

    from_step: Count | None = setting(None, "90000")
    """Steps before the stage, with the present batch; `from_tokens` does not depend on that."""
    from_tokens: Count | None = setting(None, "9e10")
    """Tokens of the stream before the stage, in place of `from_step`."""
    weights: dict[SourceName, NotNegative] = pydantic.Field(examples=["{web: 1, code: 2}"])
    """The weight of every source; 0 leaves one out."""


class DataConfig(Section):
    """Where tokens come from and how they become sequences."""

    source: PathText | None = setting(None, "gs://my-bucket/tokens")
    """`gs://` or `s3://bucket/prefix`, or the folder of the token files. A source is never written
    to. `python_stdlib` stands for the source text of Python's standard library, as bytes, which the
    first start writes to `data/stdlib`; a folder of that name is `./python_stdlib`."""
    mixture: Annotated[
        dict[SourceName, SourceConfig],
        pydantic.BeforeValidator(lambda value: {} if value is None else value),
    ] = setting({}, "{web: {source: data/web, weight: 3}, code: {source: data/code, weight: 1}}")
    """Several sources by name, instead of `source`; the other settings apply to all of them."""
    stages: dict[SourceName, StageConfig] = setting(
        {}, "{anneal: {from_step: 90000, weights: {web: 1, code: 2}}}"
    )
    """Later stages of the mixture by name, each with weights of its own. The run begins with the
    weights of `mixture`, which also divide the validation."""
    tokenizer: PathText = setting("unknown", "gpt2")
    """Tokenizer that made the tokens: `bytes`, `gpt2`, a file of the `tokenizers` library, or
    `hub:MODEL` (downloaded once from the Hugging Face hub). Every checkpoint contains it."""
    bpe_folder: PathText | None = setting(None, "data/bpe")
    """Folder of GPT-2's `vocab.bpe` and `encoder.json`. Without it, checkpoints name gpt2 but do
    not contain its files."""
    cache: PathText = setting("data/cache", "/mnt/disk/cache")
    """Folder of the local shards. Runs may share it: a file that several data sets have is
    downloaded once."""
    disk_limit_gb: Positive | None = setting(None, "200")
    """Disk space for everything in `cache`, in 1e9 bytes: the shards of all data sets, and
    downloads under way. Older data sets are removed first. null: all free space but 5 %."""
    max_files: Count | None = setting(None, "10")
    """Use only the first N training files, in name order."""
    include: tuple[str, ...] = setting((), '["web_*"]')
    """Glob patterns of objects to use; empty: every file of a known format."""
    exclude: tuple[str, ...] = setting((), '["*_old_*"]')
    """Glob patterns of objects to leave out. Changing it changes the data: for a run that has begun
    use `skip`."""
    skip: tuple[str, ...] = setting((), '["a.npz", "stream[512:640]"]')
    """Glob patterns of files to skip from here on, also in validation; for packed chunks, the whole
    pack. `stream[A:B]` skips sequences A to B - 1 of the training stream; the metrics of a step
    name its end (`stream_sequences`). Later sequences take their places; order, position and
    fingerprint stay, so that a run can resume."""
    validation_files: tuple[str, ...] = setting((), '["*_val_*"]')
    """Glob patterns of the files to validate on."""
    validation_fraction: Fraction = setting(0.0, "0.001")
    """Share of the sequences to validate on if no file is named: the last ones, in name order."""
    dtype: TokenType | None = None
    """Type of the tokens in `.bin` files without a header."""
    pad_id: CountOrZero | None = setting(None, "0")
    """Padding id on the right of rows in files without a mask."""
    separator_id: CountOrZero | None = setting(None, "50256")
    """End-of-text id to put between rows of padded files; `mask_documents` requires it there."""
    document_id: CountOrZero | None = setting(None, "50256")
    """End-of-text id that precedes each document."""
    mask_documents: Flag = False
    """Restrict attention to documents, and do not train on predicting `document_id`."""
    block_shards: CountOrZero = setting(0, "32")
    """Shards that are shuffled together; 0: 16, or fewer to fit `disk_limit_gb`."""
    fetch_ahead_shards: Count = setting(4, "8")
    """Shards to download ahead, beyond the block in use."""
    fetch_ahead_seconds: NotNegative = setting(300.0, "600")
    """Download at least the shards of so many seconds of training ahead. An outage of the bucket of
    that length does not delay training."""
    fetch_ahead_gb: Positive | None = setting(None, "20")
    """Limit of the shards downloaded ahead, in 1e9 bytes; null: the rest of `disk_limit_gb`."""
    fetch_timeout_s: Positive = setting(600.0, "1200")
    """Longest wait for a shard without progress, in seconds."""
    fetch_threads: Whole = setting(8, "16", ge=1, le=64)
    """Number of concurrent downloads; from a folder, at most one per core."""

    @pydantic.model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.validation_files and self.validation_fraction:
            raise ValueError("validation_files and validation_fraction are both set; keep one")
        if self.source is None and not self.mixture:
            raise ValueError("source is missing: set it, or a mixture of several sources")
        if self.source is not None and self.mixture:
            raise ValueError("source and mixture are both set; keep one")
        if self.bpe_folder is not None and self.tokenizer != "gpt2":
            raise ValueError(
                f"bpe_folder holds gpt2's files, and tokenizer is {self.tokenizer}; drop one"
            )
        if not all(self.skipped_sequences):
            raise ValueError("skip: stream[A:B] holds no sequence unless A is less than B")
        if self.mask_documents and self.document_id is None:
            raise ValueError("mask_documents needs document_id, the id that precedes each document")
        if self.mask_documents and self.separator_id not in (None, self.document_id):
            raise ValueError(
                f"mask_documents finds documents by document_id = {self.document_id}, but rows are "
                f"separated by separator_id = {self.separator_id}; give both the same id"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _stages_fit(self) -> Self:
        begins = [(stage.from_step, stage.from_tokens) for stage in self.stages.values()]
        kinds = {(step is None, tokens is None) for step, tokens in begins}
        if kinds not in (set(), {(False, True)}, {(True, False)}):
            raise ValueError("stages: give each either from_step or from_tokens, all the same one")
        if len(set(begins)) < len(begins):
            raise ValueError("stages: two begin at the same place, and so overlap")
        weights = {"mixture": {name: source.weight for name, source in self.mixture.items()}}
        weights |= {f"stages.{name}": stage.weights for name, stage in self.stages.items()}
        for where, shares in weights.items() if self.mixture or self.stages else ():
            if set(shares) != set(self.mixture) or not any(shares.values()):
                raise ValueError(
                    f"{where}: expected a weight for each source of the mixture "
                    f"({', '.join(self.mixture) or 'there is none'}), and one above 0"
                )
        for name in self.mixture:
            if not any(shares[name] for shares in weights.values()):
                raise ValueError(f"mixture.{name}.weight is 0, and no stage uses it; remove it")
        return self

    @property
    def skipped_sequences(self) -> list[range]:
        """The parts of the training stream that `skip` names."""
        found = map(_STREAM_RANGE.fullmatch, self.skip)
        return [range(int(one[1]), int(one[2])) for one in found if one]

    @property
    def masked_id(self) -> int | None:
        """The id that begins each document where documents are masked."""
        return self.document_id if self.mask_documents else None

    @property
    def address(self) -> str:
        """The bucket prefix or the folder of the only source's token files."""
        return STDLIB_FOLDER if self.source == PYTHON_STDLIB else str(self.source)

    @property
    def by_source(self) -> dict[str, Self]:
        """The settings of each source of the mixture; without one, those of "" alone."""
        return {name: self.of_source(name) for name in self.mixture} or {"": self}

    @property
    def tokenizer_is_readable(self) -> bool:
        """Whether the tokenizer's files are named, so that checkpoints can hold them."""
        is_gpt2_by_name = self.tokenizer == "gpt2" and self.bpe_folder is None
        return self.tokenizer != "unknown" and not is_gpt2_by_name

    def of_source(self, name: str) -> Self:
        """Return the settings of one source of the mixture, as those of a run with it alone."""
        chosen = self.mixture[name]
        given = chosen.model_dump(exclude={"weight", "max_epochs"}, exclude_none=True)
        if chosen.validation_files is not None:
            given["validation_fraction"] = 0.0
        given["skip"] = tuple(pattern.removeprefix(f"{name}/") for pattern in self.skip)
        return self.model_copy(update={"mixture": {}, "stages": {}, **given})
