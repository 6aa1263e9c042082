"""`init`: plans of runs that training takes, for any data, and copies of shipped run files."""

from pathlib import Path

import numpy as np
import pytest
from data.text_samples import random_texts, tiny_bpe, word_file, write_jsonl

from refocused.bucket.folder import DirectoryBucket
from refocused.commands import train
from refocused.commands.init import validation_files
from refocused.commands.main import run_command
from refocused.config import shipped_files
from refocused.config.batch_plan import plan_batch
from refocused.config.load_run import load_run
from refocused.data.loader.open_data import build_data
from refocused.system.world import World
from refocused.train.lifecycle.trainer import settle


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens_of(Path("tokens"), 200_000, largest=250, validation=False)


def init(*words):
    return run_command("init", [*map(str, words)])


def tokens_of(folder, count, *, largest, validation=True):
    """Write one shard that trains, and one that validates, with ids up to `largest`."""
    folder.mkdir()
    ids = np.random.default_rng(1).integers(0, largest + 1, count)
    ids[0] = largest
    kind = np.uint16 if largest < 2**16 else np.uint32
    np.save(folder / "web_train_000000.npy", ids.astype(kind))
    if validation:
        np.save(folder / "web_val_000000.npy", ids[: max(600, count // 20)].astype(kind))
    return folder


def settled(file, cache):
    """Load a run file and read its first batches as training does, on one rank without a GPU."""
    namespace = train.build_parser().read(["--config", str(file), f"data.cache={cache}"])
    loaded, _ = settle(
        train.load(namespace), World(), open_source=lambda name: DirectoryBucket(Path(name))
    )
    config = loaded.config
    data = build_data(
        config.data,
        plan=plan_batch(config.batch, world_size=1, sequence_length=config.model.sequence_length),
        world=World(),
        vocabulary=loaded.shape.vocabulary,
        seed=1,
        steps=config.run.steps,
        evaluation_sequences=config.evaluation.sequences,
    )
    stream = data.loader.batches_from(data.order.position_at(0))
    try:
        assert stream.next_step()
        assert next(data.validation_batches())
    finally:
        stream.close()
        data.cache.close()
    sequences = sum(source.sequences for source in data.sources)
    batch = config.batch.global_batch_size
    assert batch is not None
    assert 0.5 * sequences < config.run.steps * batch <= sequences
    return loaded


@pytest.mark.parametrize(
    ("count", "largest", "gpus"),
    [(6_000, 255, 8), (300_000, 300, 1), (300_000, 70_000, 2), (3_000_000, 50_256, 8)],
)
def test_the_run_file_trains_whatever_the_size_and_the_ids(tmp_path, count, largest, gpus):
    source, out = tokens_of(tmp_path / "data", count, largest=largest), tmp_path / "mine.yaml"
    assert init(out, "--data", source, "--gpus", gpus) == 0
    loaded = settled(out, tmp_path / "cache")
    config = loaded.config
    assert largest < loaded.shape.vocabulary <= largest + 128
    assert config.model.sequence_length <= loaded.shape.max_length
    assert config.data.validation_files == ("web_val_*.npy",)
    assert config.batch.global_batch_size is not None and config.batch.global_batch_size % gpus == 0
    assert 1e-4 <= config.optimizer.lr <= 2e-3
    assert config.schedule.kind == "cosine"
    assert config.run.name == "mine"


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "words"])
def test_prepared_data_name_their_tokenizer(tmp_path, tokenizer):
    texts = write_jsonl(tmp_path / "texts.jsonl", random_texts(400))
    source, out = tmp_path / "data", tmp_path / "mine.yaml"
    named = {"bytes": "bytes", "gpt2": "gpt2", "words": str(word_file(tmp_path / "words.json"))}
    options = ["--tokenizer", named[tokenizer], "--val-ratio", "0.1", "--workers", "1"]
    if tokenizer == "gpt2":
        options += ["--bpe-folder", str(tiny_bpe(tmp_path / "bpe"))]
    options += ["--max-loss", "1"] * (tokenizer == "words")  # which has three words
    assert (
        run_command("prepare_data", ["tokenize", str(texts), "--out", str(source), *options]) == 0
    )
    assert init(out, "--data", source, "--gpus", 1, "--per-hour", 20) == 0
    loaded = settled(out, tmp_path / "cache")
    assert loaded.shape.vocabulary == {"bytes": 257, "gpt2": 263, "words": 4}[tokenizer]
    assert loaded.config.data.tokenizer == ("bytes" if tokenizer == "bytes" else "unknown")
    assert loaded.config.data.validation_files == ("tokens_val_*.npy",)
    assert loaded.config.cost.per_hour_usd == 20


def test_packed_data_keep_their_length(tmp_path, capsys):
    texts = write_jsonl(tmp_path / "texts.jsonl", random_texts(50))
    given = [str(texts), "--out", "packed", "--tokenizer", "bytes", "--best-fit", "64"]
    assert run_command("prepare_data", ["tokenize", *given, "--workers", "1"]) == 0
    assert init("--dry-run", "--data", "packed", "--preset", "gpt2_124m", "--gpus", 1) == 0
    printed = capsys.readouterr().out
    assert "sequence_length: 64" in printed and "document_id: 256" in printed


def test_options_are_taken_over(tmp_path):
    source = tokens_of(tmp_path / "data", 200_000, largest=255, validation=False)
    out = tmp_path / "mine.yaml"
    options = ["--preset", "ten_nano", "--epochs", 1, "--step-tokens", 5000, "--gpus", 2]
    options += ["--sequence-length", 128, "--tokenizer", "bytes", "--exclude", "*_none_*"]
    assert init(out, "--data", source, *options) == 0
    loaded = settled(out, tmp_path / "cache")
    config = loaded.config
    assert (config.model.preset, config.model.sequence_length) == ("ten_nano", 128)
    assert (config.model.vocabulary, config.data.tokenizer) == (257, "bytes")
    assert config.batch.global_batch_size == 38
    assert config.data.exclude == ("*_none_*",)
    assert 0.001 <= config.data.validation_fraction <= 0.05


def test_the_folder_of_the_tokenizer_s_files_stays(capsys, monkeypatch):
    options = "two.yaml --data tokens --tokenizer gpt2 --bpe-folder bpe --gpus 1 --gpu L4"
    assert init(*options.split()) == 1
    assert "bpe does not have them. Download the two files" in capsys.readouterr().err
    vocabulary = "refocused.data.manifest.vocabulary."
    monkeypatch.setattr(f"{vocabulary}tokenizer_vocabulary", lambda data: 50_257)
    monkeypatch.setattr(f"{vocabulary}decide_vocabulary", lambda loaded: loaded)
    assert init(*options.split()) == 0
    data = load_run("two.yaml").config.data
    assert (data.tokenizer, data.bpe_folder) == ("gpt2", "bpe")
    assert init("three.yaml", "--data", "tokens", "--bpe-folder", "bpe") == 2
    assert "bpe_folder holds gpt2's files, and tokenizer is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", [file.stem for file in (shipped_files() / "runs").iterdir()])
def test_a_copy_of_a_shipped_run_file_is_the_same_run_under_its_own_name(name, capsys):
    assert init("--from", name, "mine.yaml") == 0
    text = Path("mine.yaml").read_text()
    assert text == (shipped_files() / "runs" / f"{name}.yaml").read_text()
    copy, shipped = load_run("mine.yaml"), load_run(name)
    named = shipped.config.run.model_copy(update={"name": "mine"})
    assert copy.config == shipped.config.model_copy(update={"run": named})
    assert (copy.shape, copy.fragment) == (shipped.shape, shipped.fragment)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "YOUR-BUCKET" in line]
    said = capsys.readouterr().out
    assert ("Set your bucket" in said) == bool(lines) and all(str(one) in said for one in lines)


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["a_train_0.npy", "a_val_0.npy", "a_val_1.npy"], ("a_val_*.npy",)),
        (["interval_1.npy", "values_2.npy"], ()),
        (["c/val_0.npy", "w/val_0.npy", "w/t.npy"], ("c/val_0.npy", "w/val_0.npy")),
        (["x/VALID.npy", "x/[1]_validation.npy"], ("x/VALID.npy", "x/[[]1]_validation.npy")),
    ],
)
def test_files_that_validate_are_known_by_their_names(names, files):
    assert validation_files(names) == files
