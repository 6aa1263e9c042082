"""Determine the vocabulary size of a run from `model.vocabulary`, the tokenizer and the data."""

from collections.abc import Callable

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun
from refocused.data.formats.object_names import MANIFEST_NAME, matches
from refocused.data.manifest.shard_manifest import read_manifest
from refocused.system.errors import ConfigError
from refocused.tokenizers.encoders import GPT2, HUB, VOCABULARIES, TokenizerChoice, described


def decide_vocabulary(
    loaded: LoadedRun, open_source: Callable[[str], Bucket] | None = None
) -> LoadedRun:
    """Return the run with a number in place of `model.vocabulary: auto`.

    The number is the size of `data.tokenizer`; if that is unknown, the one in the data's
    `manifest.json`; otherwise that of `model.preset`, or one that covers the ids. Without
    `open_source`, neither the data nor the Hugging Face hub are read, and `auto` stays if they
    would be needed.

    Raises:
        ConfigError: A setting does not fit the number.
        ShardError: The tokenizer or a manifest cannot be read.
        BucketError: A source cannot be read.
    """
    data = loaded.config.data
    if loaded.config.model.vocabulary != "auto":
        return loaded
    if open_source is not None:
        if (size := tokenizer_vocabulary(data)) is not None:
            return loaded.with_vocabulary(size)
        sizes, ids = [0], [0]
        for source in data.by_source.values():
            bucket = open_source(source.address)
            if matches(MANIFEST_NAME, source.exclude) or bucket.info(MANIFEST_NAME) is None:
                continue
            manifest = read_manifest(bucket)
            sizes.append(manifest.vocabulary or VOCABULARIES.get(manifest.tokenizer, 0))
            ids += [shard.max_id + 1 for shard in manifest.shards if shard.max_id is not None]
        return loaded.with_vocabulary(max(max(sizes) or loaded.shape.vocabulary, *ids))
    if data.tokenizer == "unknown" or data.tokenizer.startswith(HUB):
        return loaded
    return loaded.with_vocabulary(described(TokenizerChoice.of_data(data))[1])


def require_room_for_tokenizer(loaded: LoadedRun, *, fetch: bool) -> None:
    """Check that the model's vocabulary has all ids of the tokenizer, if that can be read.

    A tokenizer of the Hugging Face hub is read only with `fetch`.

    Raises:
        ConfigError: The vocabulary is too small.
        ShardError: The tokenizer cannot be read.
    """
    data, model, known = loaded.config.data, loaded.config.model, loaded.shape.vocabulary
    is_read = data.tokenizer_is_readable and (fetch or not data.tokenizer.startswith(HUB))
    if model.vocabulary == "auto" or not (is_read or (model.vocabulary and data.tokenizer == GPT2)):
        return
    _, size = described(TokenizerChoice.of_data(data))
    if size <= known:
        return
    given = "model.vocabulary" if model.vocabulary else f"the vocabulary of {model.preset}"
    raise ConfigError(
        f"{loaded.file}: {given} = {known} is less than the {size} token ids of data.tokenizer = "
        f"{data.tokenizer!r}. Set model.vocabulary=auto, or set data.tokenizer to that of the data."
    )


def tokenizer_vocabulary(data: DataConfig) -> int | None:
    """Return the size of `data.tokenizer`, or None if it is unknown; raises as `described`."""
    return None if data.tokenizer == "unknown" else described(TokenizerChoice.of_data(data))[1]
