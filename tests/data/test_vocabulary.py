"""How many ids a run's model knows: by its setting, its tokenizer, its data, its preset."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from shard_samples import npy_bytes
from text_samples import tiny_bpe, word_file

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun, load_run, render_run
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.data.manifest.vocabulary import decide_vocabulary, require_room_for_tokenizer
from refocused.system.errors import ConfigError, ShardError

PRESET = 512  # that of gpt2_tiny
RUN = """
run: {steps: 20}
model: {preset: gpt2_tiny, sequence_length: 32}
batch: {micro_batch_size: 2, gradient_accumulation_steps: 2}
data: {source: tokens}
optimizer: {lr: 3e-3}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A run file beside the folder of its data."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(RUN)
    return path


def opened(name: str) -> Bucket:
    return DirectoryBucket(Path(name))


def decided(file: Path, *settings: str) -> LoadedRun:
    return decide_vocabulary(load_run(file, ["model.vocabulary=auto", *settings]), opened)


def prepared(folder: Path, *, max_id: int, **changes: object) -> None:
    """Write a prepared source whose manifest knows the largest id."""
    bucket = DirectoryBucket(folder)
    bucket.write("a.npy", npy_bytes(np.array([0, max_id], np.uint32)), overwrite=True)
    data = DataConfig(source=str(folder), exclude=("manifest.json",))
    found = build_manifest(bucket, data)
    shards = tuple(dataclasses.replace(shard, max_id=max_id) for shard in found.shards)
    write_manifest(bucket, dataclasses.replace(found, shards=shards, **changes))


def test_a_run_file_without_the_setting_keeps_the_size_of_its_preset(file):
    prepared(file.parent / "tokens", max_id=9, tokenizer="bytes")
    old = load_run(file, ["data.tokenizer=bytes"])
    recorded = file.with_name("run.yaml")
    recorded.write_text(render_run(old.config).replace("  vocabulary: null\n", ""))
    for run in (old, load_run(recorded)):
        found = decide_vocabulary(run, opened)
        assert (found.shape.vocabulary, found.shape.settings["vocab_size"]) == (PRESET, PRESET)
        assert found.config.model.vocabulary is None


KNOWN = {"max_id": 600, "tokenizer": "tokenizer-1a2b3c4d", "vocabulary": 32_000}


@pytest.mark.parametrize(
    ("manifest", "settings", "size"),
    [
        (KNOWN, ["data.tokenizer=bytes"], 257),  # the tokenizer of the run comes first
        (KNOWN, ["data.tokenizer=gpt2"], 50_257),
        (KNOWN, ["data.tokenizer=gpt2", "data.bpe_folder=bpe"], 263),
        (KNOWN, ["data.tokenizer=words.json"], 4),
        (KNOWN, [], 32_000),
        (KNOWN, ["data.exclude=[manifest.json]"], PRESET),
        ({"max_id": 40, "tokenizer": "bytes"}, [], 257),  # by its name, as in older manifests
        (None, [], PRESET),
        ({"max_id": 40}, [], PRESET),
        ({"max_id": 50_256}, [], 50_257),  # every known id has room
    ],
)
def test_auto_is_the_size_of_the_tokenizer_or_that_in_the_manifest(file, manifest, settings, size):
    tiny_bpe(file.parent / "bpe")
    word_file(file.parent / "words.json")
    if manifest is not None:
        prepared(file.parent / "tokens", **manifest)
    found = decided(file, *settings)
    assert found.shape.vocabulary == found.config.model.vocabulary == size
    recorded = file.with_name("recorded.yaml")
    recorded.write_text(render_run(found.config))
    assert load_run(recorded).shape.settings["vocab_size"] == size


def test_all_sources_of_a_mixture_count(file):
    prepared(file.parent / "web", max_id=3, vocabulary=700)
    prepared(file.parent / "code", max_id=800)
    text = RUN.replace(
        "{source: tokens}",
        "{mixture: {web: {source: web, weight: 1}, code: {source: code, weight: 1}}}",
    )
    file.write_text(text)
    assert decided(file).shape.vocabulary == 801


@pytest.mark.parametrize("setting", ["model.vocabulary=256", "model.vocabulary=null"])
def test_fewer_ids_than_the_tokenizer_has_are_refused_with_a_remedy(file, setting):
    words = word_file(file.parent / "words.json")
    require_room_for_tokenizer(load_run(file, [setting, f"data.tokenizer={words}"]), fetch=False)
    file.write_text(RUN.replace("gpt2_tiny", "small.json"))
    shape = load_run(file, ["model.preset=gpt2_tiny"]).shape.with_vocabulary(256).settings
    file.with_name("small.json").write_text(str(dict(shape)).replace("'", '"').replace("True", "1"))
    with pytest.raises(ConfigError) as refused:
        require_room_for_tokenizer(load_run(file, [setting, "data.tokenizer=bytes"]), fetch=False)
    assert "= 256 is less than the 257 token ids of data.tokenizer = 'bytes'" in str(refused.value)
    assert "Set model.vocabulary=auto" in str(refused.value)


def test_an_explicit_number_is_compared_with_gpt2_by_name_alone(file):
    gpt2 = "data.tokenizer=gpt2"
    require_room_for_tokenizer(load_run(file, ["model.vocabulary=50257", gpt2]), fetch=False)
    require_room_for_tokenizer(load_run(file, [gpt2]), fetch=False)  # as before
    with pytest.raises(ConfigError, match=r"model\.vocabulary = 50000 is less than the 50257"):
        require_room_for_tokenizer(load_run(file, ["model.vocabulary=50000", gpt2]), fetch=False)


def test_neither_data_nor_hub_are_read_without_permission(file):
    for tokenizer in ("unknown", "hub:nobody/nothing"):
        run = load_run(file, ["model.vocabulary=auto", f"data.tokenizer={tokenizer}"])
        assert decide_vocabulary(run) is run
    with pytest.raises(ShardError, match="no such file"):
        decide_vocabulary(load_run(file, ["model.vocabulary=auto", "data.tokenizer=gone.json"]))
