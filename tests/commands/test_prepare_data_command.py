from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data.text_samples import assert_prepared, random_texts, stream, tiny_bpe, write_jsonl

from refocused.commands.main import VERBS as COMMANDS_VERBS
from refocused.commands.main import run_command

REPOSITORY = Path(__file__).parents[2]
VERBS = COMMANDS_VERBS["prepare_data"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", random_texts(50)).parent / "texts.jsonl"


def run(*arguments: object) -> int:
    return run_command("prepare_data", [str(argument) for argument in arguments])


def test_tokenize_makes_a_set_and_says_how_to_train_on_it(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    bpe = tiny_bpe(tmp_path / "bpe")
    options = ["--bpe-folder", bpe, "--shard_tokens", "1e3", "--val-ratio", "0.2", "--workers", 1]
    assert run("tokenize", texts, "--out", out, "--tokenizer", "gpt2", *options) == 0
    assert_prepared(out)
    said = capsys.readouterr().out
    assert f"source: {out}\n  tokenizer: gpt2\n  bpe_folder: " in said
    assert 'validation_files: ["tokens_val_*"]' in said
    assert "50 documents" in said


def test_tokenize_can_answer_in_json(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["tokenize", texts, "--out", out, "--tokenizer", "bytes", "--workers", 1, "--json"]
    assert run(*command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == said["train_tokens"] == len(stream(out, "train"))
    assert (said["documents"], said["val_tokens"], said["kept_shards"]) == (50, 0, 0)
    assert run(*command) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["new_tokens"], said["kept_shards"]) == (0, 1)


def test_tokenize_warns_when_nothing_is_left_to_validate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("one document")
    options = ["--tokenizer", "bytes", "--val-ratio", "0.000001", "--workers", 1]
    assert run("tokenize", tmp_path / "a.txt", "--out", tmp_path / "out", *options) == 0
    assert "data.validation_fraction" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said", "code"),
    [
        (["--tokenizer", "gpt3"], "neither gpt2 nor bytes", 1),
        (["--shard-tokens", "0"], "a whole number from 1", 2),
        (["--shard-tokens", "1.5"], "a whole number from 1", 2),
        (["--val-ratio", "2"], "a share from 0 to 1", 2),
        (["--name", "../x"], "letters, digits", 2),
        (["--work-folder", "x"], "gs:// --out", 2),
        (["--field", "body"], "it has id, text", 1),
        (["--unknown"], "unrecognized arguments: --unknown", 2),
        (["--out", "s3://x"], "not a bucket", 1),
    ],
)
def test_tokenize_refuses_wrong_options(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    said: str,
    code: int,
) -> None:
    command = ["tokenize", texts, "--out", tmp_path / "o", "--tokenizer", "bytes", "--workers", 1]
    try:
        found = run(*command, *changes)
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_an_unknown_verb_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("tokenise") == 2
    assert "'tokenise' is no verb. There are: tokenize" in capsys.readouterr().err


def test_help_names_every_verb_and_loads_nothing_slow() -> None:
    heavy = ("torch", "numpy", "pydantic", "pyarrow", "matplotlib", "google.cloud", "tiktoken")
    for arguments in (["--help"], *([verb, "--help"] for verb in VERBS)):
        code = (
            "import sys; from refocused.commands.main import run_command\n"
            f"try: run_command('prepare_data', {arguments!r})\nexcept SystemExit: pass\n"
            f"print([m for m in {heavy!r} if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"
        assert all(
            verb in done.stdout for verb in (VERBS if len(arguments) == 1 else arguments[:1])
        )


@pytest.fixture
def prepared(texts: Path, tmp_path: Path) -> Path:
    """Prepared byte tokens in ten shards."""
    out = tmp_path / "prepared"
    options = ["--tokenizer", "bytes", "--workers", 1, "--shard-tokens", 500]
    assert run("tokenize", texts, "--out", out, *options) == 0
    return out


def test_inspect_prints_draws_and_tells_problems(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    picture = tmp_path / "p.png"
    assert run("inspect", prepared, "--picture", picture) == 0
    said = capsys.readouterr().out
    assert "documents  50" in said
    assert "10 (10 npy)" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("inspect", prepared, "--json", "--vocabulary", 256) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["documents"], report["sample"]["max_id"]) == (50, 256)
    assert "Set model.vocabulary" in report["problems"][0]
    assert run("inspect", tmp_path / "missing") == 1
    assert "does not exist" in capsys.readouterr().err


def test_verify_names_the_damaged_and_says_so_by_its_code(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", prepared, "--deep") == 0
    shard = sorted(prepared.glob("*.npy"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xee")
    capsys.readouterr()
    assert run("verify", prepared) == 3
    said = capsys.readouterr().out
    assert f"{shard.name}: its CRC-32C is" in said
    assert run("verify", prepared, "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found if one["problem"]] == [shard.name]
    assert run("verify", prepared, "--vocabulary", 300) == 2


def test_manifest_lists_headers_and_keeps_what_was_known(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (prepared / "manifest.json").read_text()
    capsys.readouterr()
    assert run("manifest", prepared, "--write", "--json") == 0
    assert (prepared / "manifest.json").read_text() == before
    assert capsys.readouterr().out == before
    (prepared / "manifest.json").unlink()
    assert run("manifest", prepared, "--tokenizer", "bytes", "--write") == 0
    assert json.loads(before)["fingerprint"][:16] in capsys.readouterr().out
    assert run("verify", prepared) == 0


def test_manifest_update_adds_new_files_and_says_what_follows(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((prepared / "manifest.json").read_text())
    assert run("manifest", prepared, "--update") == 0
    assert json.loads((prepared / "manifest.json").read_text()) == before
    for name in ("more/a.npy", "more/b.npy"):
        (prepared / "more").mkdir(exist_ok=True)
        np.save(prepared / name, np.arange(300, dtype=np.uint16) % 257)
    capsys.readouterr()
    assert run("manifest", prepared, "--update") == 0
    after = json.loads((prepared / "manifest.json").read_text())
    said = capsys.readouterr().out
    assert "2 files are added to 10" in said
    assert f"fingerprint {before['fingerprint'][:16]} -> {after['fingerprint'][:16]}" in said
    assert "--allow-change data" in said
    rows = {row["name"]: row for row in after["shards"]}
    assert [rows.pop(row["name"]) for row in before["shards"]] == before["shards"]
    assert after["vocabulary"] == before["vocabulary"] == 257
    assert {name: row["tokens"] for name, row in rows.items()} == {
        "more/a.npy": 300,
        "more/b.npy": 300,
    }
    assert None not in {row["crc32c"] for row in rows.values()}
    assert run("verify", prepared, "--deep") == 0
    assert run("manifest", prepared, "--update", "--tokenizer", "gpt2") == 1
    (prepared / "manifest.json").unlink()
    assert run("manifest", prepared, "--update") == 1
    assert "--write" in capsys.readouterr().err


def test_reading_options_are_checked(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", prepared, "--pad-id", "-1") == 2
    assert "--pad-id -1" in capsys.readouterr().err
    assert run("verify", prepared, "--threads", "100") == 2
    assert "--threads 100" in capsys.readouterr().err
    assert run("verify", prepared, "--include", "x*") == 1


def test_convert_packs_and_is_verified(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "converted"
    command = ["convert", prepared, "--out", out, "--shard-tokens", 2000, "--tokenizer", "bytes"]
    assert run(*command) == 0
    assert f"source: {out}\n  tokenizer: bytes" in capsys.readouterr().out
    assert run("verify", out, "--deep") == 0
    packed = [int(t) for path in sorted(out.glob("*.npy")) for t in np.load(path)]
    assert packed == stream(prepared, "train")
    capsys.readouterr()
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(packed)
    assert run(*command, "--name", "a/b") == 2
    assert run(*command, "--pad-id", 3) == 1
    assert "pad_id = None there, pad_id = 3 now" in capsys.readouterr().err


def test_split_prints_settings_that_a_run_file_takes(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    from refocused.config.data import DataConfig

    capsys.readouterr()
    assert run("split", prepared, "--val-ratio", "0.2", "--seed", 3) == 0
    data = DataConfig(**yaml.safe_load(capsys.readouterr().out)["data"])
    assert len(data.validation_files) == 2
    assert run("split", prepared, "--val-ratio", "0.001") == 0
    data = DataConfig(**yaml.safe_load(capsys.readouterr().out)["data"])
    assert (data.validation_files, data.validation_fraction) == ((), 0.001)
    assert run("split", prepared, "--val-ratio", "0.2", "--seed", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["validation_tokens"] > 0
    assert run("split", prepared, "--val-ratio", "0") == 1


def test_upload_and_sync_move_once(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run("upload", prepared, tmp_path / "store") == 0
    assert "12 objects" in capsys.readouterr().out
    assert run("sync", tmp_path / "store", tmp_path / "back", "--json") == 0
    assert json.loads(capsys.readouterr().out)["moved_objects"] == 11
    assert_prepared(tmp_path / "store")
    assert run("verify", tmp_path / "back", "--deep") == 0
    assert run("sync", tmp_path / "store", tmp_path / "few", "--max_files=2") == 0
    assert len(list((tmp_path / "few").glob("*.npy"))) == 2
    assert run("verify", tmp_path / "few") == 0
    assert run("sync", tmp_path / "missing", tmp_path / "back") == 1
    assert "does not exist" in capsys.readouterr().err
    assert run("upload", tmp_path / "missing", tmp_path / "store") == 1


def test_every_verb_that_a_message_names_is_there() -> None:
    named = {
        verb
        for path in (REPOSITORY / "refocused").rglob("*.py")
        for verb in re.findall(r"refocused prepare_data (\w+)", path.read_text())
    }
    assert {"tokenize", "convert", "sync", "manifest"} <= named <= set(VERBS)
