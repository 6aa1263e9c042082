"""`prepare_data`: what each verb prints, and what it says to a mistake."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.text_samples import (
    assert_prepared,
    random_texts,
    stream,
    tiny_bpe,
    write_jsonl,
    write_parquet,
)
from ranks import ROOT

from refocused.commands.main import VERBS, run_command
from refocused.config.data import DataConfig
from refocused.config.yaml_source import parse_yaml
from refocused.prepare.texts import text_inputs
from refocused.prepare.texts.text_documents import TextReading, sampled_texts

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb that has to end with a code; returns what it printed."""

    def command(*arguments: object, code: int = 0) -> str:
        try:
            found = run_command("prepare_data", [str(argument) for argument in arguments])
        except SystemExit as ended:
            found = int(ended.code or 0)
        out, err = capsys.readouterr()
        assert found == code, err
        assert "Traceback" not in err
        return out + err

    return command


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", random_texts(50)).parent / "texts.jsonl"


@pytest.fixture
def prepared(run: Run, texts: Path, tmp_path: Path) -> Path:
    """Prepared byte tokens in ten shards."""
    out = tmp_path / "prepared"
    options = ("--tokenizer", "bytes", "--workers", 1, "--shard-tokens", 500)
    run("tokenize", texts, "--out", out, *options)
    return out


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("tokenise", 2, "unknown verb 'tokenise'. Did you mean tokenize?"),
        ("{tokenize} --tokenizer gpt3", 1, "neither gpt2 nor bytes"),
        ("{tokenize} --bpe-folder x", 2, "--bpe-folder needs --tokenizer gpt2."),
        ("{tokenize} --end-of-text x", 2, "--end-of-text needs a tokenizer.json"),
        ("{tokenize} --shard-tokens 0", 2, "a whole number of at least 1"),
        ("{tokenize} --val-ratio 2", 2, "a share from 0 to 1"),
        ("{tokenize} --name ../x", 2, "letters, digits"),
        ("{tokenize} --work-folder x", 2, "a remote --out"),
        ("{tokenize} --field body", 1, "it has id, text"),
        ("{tokenize} --val-ratio 0.000001", 0, "or set data.validation_fraction in the run file"),
        ("{tokenize} --out az://x", 1, "not a bucket"),
        ("{train} --vocabulary 256", 1, "--vocabulary 256: give at least 257"),
        ("{train} --vocabulary 300 --field body", 1, "it has id, text"),
        ("{train} --vocabulary 300 --bpe-folder x", 1, "x does not have them"),
        ("{tokenize} --best-fit 1", 2, "--best-fit 1: give 2 tokens or more"),
        ("{tokenize} --best-fit 9 --shard-tokens 8", 2, "at most --shard-tokens"),
        ("convert {} --out x --best-fit 9", 2, "--best-fit needs --separator-id"),
        ("inspect {}/missing", 1, "does not exist"),
        ("inspect {} --pad-id -1", 2, "--pad-id -1"),
        ("verify {} --threads 100", 2, "--threads 100"),
        ("verify {} --vocabulary 300", 2, "--vocabulary needs --deep, which reads the ids."),
        ("verify {} --include x*", 1, ""),
        ("manifest {} --update --tokenizer gpt2", 1, "gpt2"),
        ("manifest {}/.. --update", 1, "has no manifest.json to update. Make one with --write."),
        ("split {} --val-ratio 0", 1, ""),
        ("sync {}/missing {}/back", 1, "does not exist"),
        ("upload {}/missing {}/store", 1, ""),
    ],
)
def test_each_mistake_has_one_message(
    run: Run, texts: Path, prepared: Path, command: str, code: int, said: str
) -> None:
    tokenize = f"tokenize {texts} --out {texts.parent}/o --tokenizer bytes --workers 1"
    train = f"train-tokenizer {texts} --out {texts.parent}/new.json"
    command = command.replace("{train}", train).replace("{tokenize}", tokenize)
    command = command.replace("{}", str(prepared))
    assert said in run(*command.split(), code=code)


def test_tokenize_makes_a_set_and_says_how_to_train_on_it(
    run: Run, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--bpe-folder", tiny_bpe(tmp_path / "bpe"), "--shard_tokens", "1e3", "--workers", 1)
    said = run(
        "tokenize", texts, "--out", out, "--tokenizer", "gpt2", "--val-ratio", "0.2", *options
    )
    assert_prepared(out)
    assert f"source: {out}\n  tokenizer: gpt2\n  bpe_folder: " in said
    assert 'validation_files: ["tokens_val_*"]' in said
    assert "50 documents" in said
    options = ("--tokenizer", "bytes", "--workers", 1, "--name", "my_val_notes")
    command = ("tokenize", texts, "--out", f"{out}2", *options)
    found = json.loads(run(*command, "--json"))
    assert found["tokens"] == found["train_tokens"] == len(stream(tmp_path / "out2", "train"))
    assert (found["documents"], found["val_tokens"], found["kept_shards"]) == (50, 0, 0)
    found = json.loads(run(*command, "--json"))
    assert (found["new_tokens"], found["kept_shards"]) == (0, 1)
    texts.write_text('{"text": null}\n{"text": ""}\n{"text": "a"}\n')
    said = run("tokenize", texts, "--out", f"{out}3", *options)
    assert "left out: 2 null or empty texts" in said


def test_inspect_prints_draws_and_reports_problems(run: Run, prepared: Path) -> None:
    picture = prepared.parent / "p.png"
    said = run("inspect", prepared, "--picture", picture)
    assert "documents  50" in said
    assert "10 (10 npy)" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert said.count("  text       tokens_train_0") == 3
    assert "round trip 100.00% of the compared ids come back" in said
    assert " <|endoftext|> \"the the cat it's" in said
    report = json.loads(run("inspect", prepared, "--json", "--vocabulary", 256, code=3))
    assert (report["documents"], report["sample"]["max_id"]) == (50, 256)
    assert "Set model.vocabulary" in report["problems"][0]
    for name in ("manifest.json", "recipe.json"):
        (prepared / name).unlink()
    assert "text       none, and no round trip: the tokenizer is unknown." in run(
        "inspect", prepared
    )
    said = run("inspect", prepared, "--tokenizer", "gpt2", "--bpe-folder", prepared)
    assert f"{prepared} does not have them" in said


def test_verify_names_the_damaged_and_says_so_by_its_code(run: Run, prepared: Path) -> None:
    assert "10 of 10 files are right" in run("verify", prepared, "--deep")
    shard = sorted(prepared.glob("*.npy"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xee")
    assert f"{shard.name}: its CRC-32C is" in run("verify", prepared, code=3)
    found = json.loads(run("verify", prepared, "--json", code=3))
    assert [one["name"] for one in found if one["problem"]] == [shard.name]


def test_manifest_lists_headers_and_keeps_what_was_known(run: Run, prepared: Path) -> None:
    file = prepared / "manifest.json"
    before = file.read_text()
    assert run("manifest", prepared, "--write", "--json") == before == file.read_text()
    file.unlink()
    said = run("manifest", prepared, "--tokenizer", "bytes", "--write")
    assert json.loads(before)["fingerprint"][:16] in said
    run("verify", prepared)
    lost = min(prepared.rglob("*.npy"))
    lost.unlink()
    assert f"without 1 file of the stored one, such as {lost.name}" in run("manifest", prepared)


def test_manifest_update_adds_new_files_and_says_what_follows(run: Run, prepared: Path) -> None:
    def manifest() -> Any:
        return json.loads((prepared / "manifest.json").read_text())

    before = manifest()
    run("manifest", prepared, "--update")
    assert manifest() == before
    (prepared / "more").mkdir()
    for name in ("more/a.npy", "more/b.npy"):
        np.save(prepared / name, np.arange(300, dtype=np.uint16) % 257)
    said = run("manifest", prepared, "--update")
    after = manifest()
    assert "2 files are added to 10" in said
    assert f"fingerprint {before['fingerprint'][:16]} -> {after['fingerprint'][:16]}" in said
    assert "--allow-change data" in said
    rows = {row["name"]: row for row in after["shards"]}
    assert [rows.pop(row["name"]) for row in before["shards"]] == before["shards"]
    assert after["vocabulary"] == before["vocabulary"] == 257
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert tokens == {"more/a.npy": 300, "more/b.npy": 300}
    assert None not in {row["crc32c"] for row in rows.values()}
    run("verify", prepared, "--deep")


def test_convert_packs_and_is_verified(run: Run, prepared: Path) -> None:
    out = prepared.parent / "converted"
    command = ("convert", prepared, "--out", out, "--shard-tokens", 2000, "--tokenizer", "bytes")
    assert f"source: {out}\n  tokenizer: bytes" in run(*command)
    run("verify", out, "--deep")
    packed = [int(token) for path in sorted(out.glob("*.npy")) for token in np.load(path)]
    assert packed == stream(prepared, "train")
    assert json.loads(run(*command, "--json"))["tokens"] == len(packed)
    assert "pad_id = None there, 3 now" in run(*command, "--pad-id", 3, code=1)


def test_a_trained_tokenizer_is_compared_with_gpt2s_and_tokenizes(run: Run, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "new.json"
    write_parquet(
        write_jsonl(texts / "1.jsonl.gz", random_texts(90)).parent / "2.parquet", ["x"] * 9
    )
    command = ("train-tokenizer", texts, "--vocabulary", 300, "--out", out)
    found = json.loads(run(*command, "--bpe-folder", tiny_bpe(tmp_path / "bpe"), "--json"))
    assert found["vocabulary"] == 300
    sizes = found["bytes_per_token"]
    assert sizes["new"] > 1.5 * sizes["gpt2"] > 1
    first = out.read_bytes()
    assert "name a new file" in run(*command, code=2)
    out.unlink()
    assert "not compared with GPT-2's: give" in run(*command)
    assert out.read_bytes() == first
    options = ("--out", tmp_path / "tokens", "--tokenizer", out, "--workers", 1)
    assert f"tokenizer: {out}" in run("tokenize", texts, *options)
    assert "no pair that repeats for the other" in run(
        *command[:2], "--vocabulary", 4000, "--out", texts / "a.json"
    )
    (texts / "3.txt").write_bytes(b"")
    assert "There is no text" in run(
        "train-tokenizer", texts / "3.txt", *command[2:4], "--out", texts / "b.json", code=1
    )


def test_a_sample_is_taken_from_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 1000)
    texts = [f"{number:03} {'x' * 96}" for number in range(100)]
    write_jsonl(tmp_path / "1.jsonl", texts)
    tasks = text_inputs.plan_tasks(text_inputs.find_inputs([str(tmp_path)]))

    def sample(most_bytes: int) -> tuple[list[str], list[str]]:
        held: list[str] = []
        given = {"held_out": held, "progress": lambda done, total: None}
        return list(sampled_texts(tasks, TextReading(), most_bytes=most_bytes, **given)), held

    assert sample(10**6) == (
        [text for text in texts if text[1:3] not in ("49", "99")],
        texts[49::50],
    )
    some, _ = sample(2000)
    assert 20 <= len(some) <= 21
    assert {text[1] for text in some} == set("0123456789")


def test_best_fit_says_how_to_train_and_stays_known(
    run: Run, texts: Path, prepared: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "packed", tmp_path / "again"
    command = ("tokenize", texts, "--out", out, "--tokenizer", "bytes", "--workers", 1)
    said = run(*command, "--best-fit", 64)
    assert re.search(
        r"best fit cuts [\d.]+% of 50 documents, a stream [\d.]+%; [\d.]+% is pad", said
    )
    section = parse_yaml(said[said.index("data:") :])
    assert section["model"]["sequence_length"] == 64
    assert DataConfig(**section["data"]).mask_documents
    said = run("convert", prepared, "--out", again, "--best-fit", 32, "--separator-id", 256)
    assert "mask_documents: true" in said and "model:\n  sequence_length: 32" in said
    before = (out / "manifest.json").read_text()
    assert run("manifest", out, "--write", "--json") == before


def test_split_prints_settings_that_a_run_file_takes(run: Run, prepared: Path) -> None:
    many = ("split", prepared, "--val-ratio", "0.2", "--seed", 3)
    data = DataConfig(**parse_yaml(run(*many))["data"])
    assert len(data.validation_files) == 2
    data = DataConfig(**parse_yaml(run("split", prepared, "--val-ratio", "0.001"))["data"])
    assert (data.validation_files, data.validation_fraction) == ((), 0.001)
    assert json.loads(run(*many, "--json"))["validation_tokens"] > 0


def test_upload_and_sync_move_once(run: Run, prepared: Path) -> None:
    store, back, few = (prepared.parent / name for name in ("store", "back", "few"))
    assert "12 objects" in run("upload", prepared, store)
    assert json.loads(run("sync", store, back, "--json"))["moved_objects"] == 11
    assert_prepared(store)
    run("verify", back, "--deep")
    run("sync", store, few, "--max_files=2")
    assert len(list(few.glob("*.npy"))) == 2
    run("verify", few)


def test_every_verb_that_a_message_names_is_there() -> None:
    named = {
        verb
        for path in (ROOT / "refocused").rglob("*.py")
        for verb in re.findall(r"refocused prepare_data ([\w-]+)", path.read_text())
    }
    assert {"tokenize", "convert", "manifest"} <= named <= set(VERBS["prepare_data"])
