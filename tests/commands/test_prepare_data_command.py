"""`prepare_data`: that files and printed settings serve what they are for; see the transcript."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.text_samples import assert_prepared, random_texts, stream, write_jsonl
from ranks import ROOT

from refocused.commands.main import VERBS, run_command
from refocused.config.data import DataConfig
from refocused.config.yaml_source import parse_yaml
from refocused.prepare.texts import text_inputs
from refocused.prepare.texts.text_documents import TextReading, sampled_texts


@pytest.fixture(autouse=True)
def prepared(tmp_path, monkeypatch):
    """Prepared byte tokens in ten shards, below the current folder."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("texts.jsonl"), random_texts(50))
    run("tokenize texts.jsonl --out prepared --tokenizer bytes --workers 1 --shard-tokens 500")
    return Path("prepared")


def run(command):
    assert run_command("prepare_data", command.split()) == 0


def test_printed_settings_are_those_of_a_run_file(capsys):
    def settings(command):
        run(command)
        printed = capsys.readouterr().out
        parsed: dict[str, Any] = parse_yaml(printed[printed.index("data:") :])
        return parsed

    capsys.readouterr()
    packed = settings("tokenize texts.jsonl --out x --tokenizer bytes --workers 1 --best-fit 64")
    assert DataConfig(**packed["data"]).mask_documents
    assert packed["model"] == {"vocabulary": "auto", "sequence_length": 64}
    data = DataConfig(**settings("split prepared --val-ratio 0.2 --seed 3")["data"])
    assert len(data.validation_files) == 2
    data = DataConfig(**settings("split prepared --val-ratio 0.001")["data"])
    assert (data.validation_files, data.validation_fraction) == ((), 0.001)


def test_manifest_update_adds_new_files_and_says_what_follows(prepared):
    def manifest():
        return json.loads((prepared / "manifest.json").read_text())

    before = manifest()
    (prepared / "more").mkdir()
    for name in ("more/a.npy", "more/b.npy"):
        np.save(prepared / name, np.arange(300, dtype=np.uint16) % 257)
    run("manifest prepared --update")
    after = manifest()
    rows = {row["name"]: row for row in after["shards"]}
    assert [rows.pop(row["name"]) for row in before["shards"]] == before["shards"]
    assert after["vocabulary"] == before["vocabulary"] == 257
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert tokens == {"more/a.npy": 300, "more/b.npy": 300}
    assert None not in {row["crc32c"] for row in rows.values()}
    run("verify prepared --deep")


def test_converted_and_copied_sets_hold_the_same_tokens(prepared):
    run("convert prepared --out converted --shard-tokens 2000 --tokenizer bytes")
    run("verify converted --deep")
    packed = [np.load(path) for path in sorted(Path("converted").glob("*.npy"))]
    assert [int(token) for shard in packed for token in shard] == stream(prepared, "train")
    run("upload prepared store")
    assert_prepared(Path("store"))
    run("sync store few --max_files=2")
    assert len(list(Path("few").glob("*.npy"))) == 2


def test_a_sample_is_taken_from_every_part(monkeypatch):
    monkeypatch.setattr(text_inputs, "TASK_BYTES", 1000)
    texts = [f"{number:03} {'x' * 96}" for number in range(100)]
    write_jsonl(Path("sampled/1.jsonl"), texts)
    tasks = text_inputs.plan_tasks(text_inputs.find_inputs(["sampled"]))

    def sample(most_bytes):
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


def test_every_verb_that_a_message_names_is_there():
    named = {
        verb
        for path in (ROOT / "refocused").rglob("*.py")
        for verb in re.findall(r"refocused prepare_data ([\w-]+)", path.read_text())
    }
    assert {"tokenize", "convert", "manifest"} <= named <= set(VERBS["prepare_data"])
