from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import write_tokens

import refocused.system.world
import refocused.train.lifecycle.run
from refocused.commands import arguments, train
from refocused.config.load_run import load_run
from refocused.system.errors import (
    BucketError,
    ConfigError,
    ExitCode,
    RefocusedError,
    TrainingError,
)
from refocused.system.world import World
from refocused.train.lifecycle.launch_session import Presence, Signals
from refocused.train.lifecycle.session import Ancestors, Session

RUN = """
run: {steps: 20, device: cpu}
model: {preset: gpt2_tiny, sequence_length: 32}
batch: {micro: 2, accumulation: 2}
data: {source: tokens}
optimizer: {lr: 3e-3}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that a silent rank makes, without their time."""
    taken: list[float] = []
    monkeypatch.setattr(train.time, "sleep", taken.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return taken


def printed(file: str, *argv: str) -> dict[str, Any]:
    """The settings that the command line comes to."""
    namespace = train.build_parser().read(["--config", file, *argv])
    return train.load(namespace).config.model_dump()


@pytest.mark.parametrize("option", ["--max-steps", "--max_steps"])
def test_an_option_may_be_written_with_either_dash(file: str, option: str) -> None:
    assert printed(file, option, "7")["run"]["steps"] == 7
    assert printed(file, f"{option}=8")["run"]["steps"] == 8


def test_the_launchers_option_is_taken_and_values_keep_their_underscores(file: str) -> None:
    settings = printed(file, "--local_rank=1", "--run", "my_run", "--gcs_credentials=a_b.json")
    assert settings["run"]["name"] == "my_run"
    namespace = train.build_parser().read(["--gcs_credentials=a_b.json", "--local_rank", "1"])
    assert str(namespace.gcs_credentials) == "a_b.json"


def test_settings_may_stand_anywhere(file: str) -> None:
    settings = printed(
        file,
        "optimizer.lr=2e-4",
        "--max-steps",
        "5",
        "batch.micro=4",
        "--resume",
        "none",
        "zero.stage=1",
    )
    assert settings["optimizer"]["lr"] == 2e-4
    assert settings["batch"]["micro"] == 4
    assert settings["zero"]["stage"] == 1
    assert settings["run"]["steps"] == 5


@pytest.mark.parametrize(
    ("given", "resume", "overrides"),
    [
        ([], "auto", []),
        (["--resume"], "latest", []),
        (["--resume", "--max-steps", "5"], "latest", []),
        (["--resume", "run.steps=9"], "latest", ["run.steps=9"]),
        (["--resume_from_checkpoint", "runs/a.b/checkpoint-5"], "runs/a.b/checkpoint-5", []),
        (["--resume-from-checkpoint=best", "run.steps=9"], "best", ["run.steps=9"]),
        (
            ["--resume", "gs://bucket/a=b/checkpoint_step_5"],
            "gs://bucket/a=b/checkpoint_step_5",
            [],
        ),
    ],
)
def test_a_resume_is_understood_as_other_trainers_spell_it(
    given: list[str], resume: str, overrides: list[str]
) -> None:
    namespace = train.read_arguments(given)
    assert (namespace.resume, namespace.overrides) == (resume, overrides)


def test_max_steps_wins_over_the_setting(file: str) -> None:
    assert printed(file, "--max-steps", "5", "run.steps=9")["run"]["steps"] == 5


def test_what_is_not_given_has_its_default() -> None:
    namespace = train.build_parser().read([])
    assert (namespace.config, namespace.resume, namespace.dry_run) == ("demo", "auto", False)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--learning-rate", "3"], "--learning-rate"),
        (["--max-steps", "many"], "many"),
        (["-z"], "-z"),
    ],
)
def test_an_unknown_option_or_value_is_one_line_and_exit_code_2(
    argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(argv)
    assert ended.value.code == ExitCode.WRONG_USE
    told = capsys.readouterr().err
    assert told.startswith("train: ") and word in told and told.endswith("See train --help.\n")
    assert told.count("\n") == 1


def test_other_ranks_keep_silent_until_rank_0_has_spoken(
    monkeypatch: pytest.MonkeyPatch, naps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        train.main(["--learning-rate", "3"])
    assert ended.value.code == ExitCode.WRONG_USE
    assert capsys.readouterr().err == ""
    assert naps == [arguments.SILENT_RANK_SECONDS]


@pytest.mark.parametrize("word", ["lr=3", "3e-4", "optimizer lr=3", "optimizer.lr"])
def test_what_is_no_setting_is_refused_with_an_example(
    file: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--config", file, word]) == ExitCode.WRONG_USE
    told = capsys.readouterr().err
    assert told.startswith(f"command line: {word!r} is not understood.")
    assert "optimizer.lr=2e-4" in told


def test_all_that_is_wrong_is_said_at_once(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = train.main(["--config", file, "optimizer.lrr=1", "batch.micro=none"])
    assert code == ExitCode.WRONG_USE
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "command line: optimizer.lrr is not a setting. Did you mean optimizer.lr?",
        "command line: batch.micro = 'none': a number is wanted",
    ]


def test_printed_settings_load_back_and_need_no_torch(tmp_path: Path, file: str) -> None:
    settings = ["optimizer.lr=1e-4", "precision.dtype=bf16"]
    code = (
        "import sys; from refocused.commands.train import main; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", file, "--print-config", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"train_batch_size": 4' in done.stdout
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(done.stdout)
    assert yaml.safe_load(done.stdout)["optimizer"]["lr"] == 1e-4
    assert load_run(resolved).config == load_run(file, settings).config


def test_only_rank_0_prints_the_settings(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert train.main(["--config", file, "--print-config"]) == 0
    assert capsys.readouterr().out == ""


def marked(error: RefocusedError) -> RefocusedError:
    error.on_every_rank = True
    return error


@pytest.mark.parametrize(
    ("rank", "local_rank", "error", "told"),
    [
        (0, 0, marked(BucketError("down")), "down\n"),
        (1, 1, marked(BucketError("down")), ""),
        (2, 0, marked(BucketError("down")), ""),
        (1, 1, BucketError("down"), "rank 1: down\n"),
        (0, 0, ConfigError("wrong"), "wrong\n"),
        (1, 1, ConfigError("wrong"), ""),
        (2, 0, ConfigError("wrong"), "rank 2: wrong\n"),  # another machine, with other files
    ],
)
def test_an_error_is_said_by_whom_it_concerns(
    rank: int,
    local_rank: int,
    error: RefocusedError,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    code = train.report(error, rank)
    assert code == (ExitCode.WRONG_USE if isinstance(error, ConfigError) else ExitCode.FAILED)
    assert capsys.readouterr().err == told


@pytest.fixture
def quiet_logger() -> Iterator[None]:
    logger = logging.getLogger("refocused")
    before = (logger.handlers[:], logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        (ExitCode.OK, 0, ""),
        (ExitCode.NOT_MIRRORED, 5, ""),
        (ExitCode.INTERRUPTED, 130, ""),
        (TrainingError("diverged"), 1, "diverged\n"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed"), 1, "Another rank has"),
        (RuntimeError("shapes differ"), 1, "ERROR This should not have happened:\n"),
    ],
)
def test_every_end_has_its_code_and_its_words(
    file: str,
    ending: ExitCode | BaseException,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet_logger: None,
) -> None:
    def run(*_: object) -> ExitCode:
        if isinstance(ending, BaseException):
            raise ending
        return ending

    monkeypatch.setattr(refocused.system.world, "join_world", lambda asked: World())
    monkeypatch.setattr(refocused.train.lifecycle.run, "run", run)
    monkeypatch.chdir(Path(file).parent)
    write_tokens(Path("tokens"), shards=1, tokens=100, vocabulary=512)
    namespace = train.build_parser().read(["--config", file])
    session = Session(Signals(speaks=False), Ancestors(None), Presence(None, 0), 0.0, 0.0, None)
    assert train.train_as_rank(train.load(namespace), namespace, 0, session) == code
    said = capsys.readouterr().err
    assert said.startswith(told) if told else said == ""
