"""How many token ids the model of a run knows: `model.vocabulary`, the tokenizer and the data."""

from __future__ import annotations

from collections.abc import Callable

from refocused.bucket.bucket import Bucket
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun
from refocused.data.formats.object_names import MANIFEST_NAME, matches
from refocused.data.manifest.shard_manifest import read_manifest
from refocused.system.errors import ConfigError
from refocused.tokenizers.encoders import GPT2, HUB, VOCABULARIES, TokenizerChoice, vocabulary_of


def decide_vocabulary(
    loaded: LoadedRun, open_source: Callable[[str], Bucket] | None = None
) -> LoadedRun:
    """Return the run with a number of token ids in place of `model.vocabulary: auto`.

    It is the size of `data.tokenizer`; where that is unknown, the one that the `manifest.json` of
    the data gives; where there is none, that of `model.preset`. Without `open_source`, neither the
    data nor the Hugging Face hub are asked, and where they would have to be, `auto` stays.

    Raises:
        ConfigError: A setting does not fit that number.
        ShardError: The tokenizer or a manifest cannot be read.
        BucketError: A source cannot be read.
    """
    data = loaded.config.data
    if loaded.config.model.vocabulary != "auto":
        return loaded
    if open_source is not None:
        own = loaded.shape.vocabulary
        size = tokenizer_vocabulary(data) or _manifest_vocabulary(data, open_source, least=own)
        return loaded.with_vocabulary(size)
    if data.tokenizer == "unknown" or data.tokenizer.startswith(HUB):
        return loaded
    return loaded.with_vocabulary(vocabulary_of(TokenizerChoice.of_data(data)))


def require_room_for_tokenizer(loaded: LoadedRun, *, fetch: bool) -> None:
    """Refuse a vocabulary without all ids of the tokenizer, unless nothing but its name is known.

    A tokenizer of the Hugging Face hub is read only if it may be fetched.

    Raises:
        ConfigError: There are too few ids.
        ShardError: The tokenizer cannot be read.
    """
    data, model, known = loaded.config.data, loaded.config.model, loaded.shape.vocabulary
    is_read = data.tokenizer_is_readable and (fetch or not data.tokenizer.startswith(HUB))
    if model.vocabulary == "auto" or not (is_read or (model.vocabulary and data.tokenizer == GPT2)):
        return
    size = vocabulary_of(TokenizerChoice.of_data(data))
    if size <= known:
        return
    given = "model.vocabulary" if model.vocabulary else f"the vocabulary of {model.preset}"
    raise ConfigError(
        f"{loaded.file}: {given} = {known} is less than the {size} token ids of data.tokenizer = "
        f"{data.tokenizer!r}. Set model.vocabulary=auto, or name the tokenizer that made the data "
        "in data.tokenizer."
    )


def tokenizer_vocabulary(data: DataConfig) -> int | None:
    """Return the size of `data.tokenizer`, None if it is unknown; raises as `vocabulary_of`."""
    return None if data.tokenizer == "unknown" else vocabulary_of(TokenizerChoice.of_data(data))


def _manifest_vocabulary(
    data: DataConfig, open_source: Callable[[str], Bucket], *, least: int
) -> int:
    """Return the size of the tokenizer that the manifests name, or enough for the ids they know."""
    sizes, ids = [0], [0]
    for source in [data.of_source(name) for name in data.mixture] or [data]:
        bucket = open_source(str(source.source))
        if matches(MANIFEST_NAME, source.exclude) or bucket.info(MANIFEST_NAME) is None:
            continue
        manifest = read_manifest(bucket)
        sizes.append(manifest.vocabulary or VOCABULARIES.get(manifest.tokenizer, 0))
        ids += [shard.max_id + 1 for shard in manifest.shards if shard.max_id is not None]
    return max(max(sizes) or least, *ids)
