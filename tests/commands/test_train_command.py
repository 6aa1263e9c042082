import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands.run_samples import TINY_RUN
from ranks import ROOT, write_tokens

import refocused.system.world
import refocused.train.lifecycle.trainer
from refocused.commands import arguments, train
from refocused.config.load_run import load_run
from refocused.config.yaml_source import parse_yaml
from refocused.system import logs
from refocused.system.errors import BucketError, ConfigError, ExitCode, TrainingError
from refocused.system.world import World
from refocused.train.lifecycle import session as session_module
from refocused.train.lifecycle.launch_session import Signals
from refocused.train.lifecycle.session import Session


@pytest.fixture(autouse=True)
def naps(tmp_path, monkeypatch):
    """The pauses that a silent rank makes, without their time, beside the run file tiny.yaml."""
    taken: list[float] = []
    monkeypatch.setattr(arguments.time, "sleep", taken.append)
    monkeypatch.setattr(train.shutil, "which", str)  # as after `activate`
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY_RUN)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return taken


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--max_steps 7", {"run.steps": 7}),
        ("--max-steps 5 run.steps=9", {"run.steps": 5}),
        ("--local_rank=1 --run my_run --gcs_credentials=a_b.json", {"run.name": "my_run"}),
        (
            "batch.micro_batch_size=4 --resume none zero.stage=1",
            {"batch.micro_batch_size": 4, "zero.stage": 1},
        ),
    ],
)
def test_options_and_settings_stand_anywhere_and_change_the_run(typed, expected):
    settings = train.load(train.read_arguments(["--config", "tiny.yaml", *typed.split()])).config
    for name, value in expected.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(settings, section), key) == value


@pytest.mark.parametrize(
    ("typed", "resume", "overrides"),
    [
        ("", "auto", []),
        ("--resume", "latest", []),
        ("--resume run.steps=9", "latest", ["run.steps=9"]),
        ("--resume_from_checkpoint runs/a.b/checkpoint-5", "runs/a.b/checkpoint-5", []),
        ("--resume gs://bucket/a=b/checkpoint_step_5", "gs://bucket/a=b/checkpoint_step_5", []),
    ],
)
def test_a_resume_is_understood_as_other_trainers_spell_it(typed, resume, overrides):
    found = train.read_arguments([*typed.split(), "--gcs_credentials=a_b.json"])
    assert (found.resume, found.overrides, found.config) == (resume, overrides, "demo")
    assert str(found.gcs_credentials) == "a_b.json"  # values keep their underscores


@pytest.mark.parametrize("typed", ["--learning-rate 3", "lr=3"])
def test_wrong_use_is_reported_by_rank_0(typed, monkeypatch, capsys, naps):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        try:
            code = train.main(["--config", "tiny.yaml", *typed.split()])
        except SystemExit as ended:
            code = int(str(ended.code))
        assert code == ExitCode.WRONG_USE
        assert bool(capsys.readouterr().err) == (rank == "0")
    assert naps == [arguments.SILENT_RANK_SECONDS]


def test_printed_settings_load_back_and_need_no_torch(monkeypatch, capsys):
    settings = ["optimizer.lr=1e-4", "precision.dtype=bf16"]
    code = (
        "import sys; from refocused.commands.train import main; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    typed = ["--config", "tiny.yaml", "--print-config", *settings]
    done = subprocess.run([sys.executable, "-c", code, *typed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"train_batch_size": 4' in done.stdout
    Path("resolved.yaml").write_text(done.stdout)
    assert parse_yaml(done.stdout)["optimizer"]["lr"] == 1e-4
    assert load_run("resolved.yaml").config == load_run("tiny.yaml", settings).config
    monkeypatch.setenv("RANK", "1")
    assert (train.main(typed), capsys.readouterr().out) == (0, "")  # only rank 0 prints


@pytest.mark.parametrize(
    ("rank", "local_rank", "error", "told"),
    [
        (0, 0, BucketError("down").agreed(), "error: down\n"),
        (1, 1, BucketError("down").agreed(), ""),
        (2, 0, BucketError("down").agreed(), "error: down\n"),  # on another machine's screen
        (1, 1, BucketError("down"), "error: rank 1: down\n"),
        (0, 0, ConfigError("wrong"), "error: wrong\n"),
        (1, 1, ConfigError("wrong"), ""),
        (2, 0, ConfigError("wrong"), "error: rank 2: wrong\n"),  # another machine, with other files
    ],
)
def test_an_error_is_said_by_whom_it_concerns(rank, local_rank, error, told, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    code = arguments.report(error)
    assert code == (ExitCode.WRONG_USE if isinstance(error, ConfigError) else ExitCode.FAILED)
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("command", ["train --config tiny.yaml", "evaluate gpt2_tiny"])
def test_torch_is_imported_with_its_settings(command, monkeypatch):
    Path("torch.py").write_text("import os; raise ImportError(os.environ['PYTORCH_ALLOC_CONF'])")
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{ROOT}")
    typed = [sys.executable, "-m", "refocused", *command.split()]
    done = subprocess.run(typed, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("\nImportError: expandable_segments:True\n")  # with its traceback


@pytest.fixture
def quiet_logger():
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
        (TrainingError("diverged"), 1, "error: diverged\n"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed"),
            1,
            "error: Another rank ended",
        ),
        (RuntimeError("shapes differ"), 1, "error: Unexpected RuntimeError: shapes differ\n"),
        (SystemExit(3), 1, "error: Unexpected SystemExit: 3\n"),  # of a library, also Rust's panics
    ],
)
def test_every_end_has_its_code_and_its_words(
    ending, code, told, monkeypatch, capsys, quiet_logger
):
    def run(*_):
        if isinstance(ending, BaseException):
            raise ending
        return ending

    monkeypatch.setattr(refocused.system.world, "join_world", lambda *_, **__: World())
    monkeypatch.setattr(refocused.train.lifecycle.trainer, "run", run)
    write_tokens(Path("tokens"), shards=1, tokens=100, vocabulary=512)
    namespace = train.read_arguments(["--config", "tiny.yaml"])
    session = Session(Signals(speaks=False), 0)
    assert train.train_as_rank(train.load(namespace), namespace, 0, session) == code
    said = capsys.readouterr().err
    assert said.startswith(told) if told else said == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("failing", "has_file"),
    [
        ("refocused.system.world.join_world", False),
        ("refocused.train.lifecycle.trainer.settle", False),  # before the run's folder exists
        ("refocused.train.lifecycle.trainer.build_data", True),
    ],
)
def test_an_unexpected_error_is_shown_with_its_frames(
    failing, has_file, rank, monkeypatch, capsys, quiet_logger
):
    def deep(levels):
        if levels:
            deep(levels - 1)
        try:
            raise KeyError("cudnn")
        except KeyError as cause:
            raise AssertionError from cause

    monkeypatch.setattr(refocused.system.world, "join_world", lambda *_, **__: World())
    monkeypatch.setattr(failing, lambda *_, **__: deep(9))
    write_tokens(Path("tokens"), shards=1, tokens=100, vocabulary=512)
    namespace = train.read_arguments(["--config", "tiny.yaml"])
    session = Session(Signals(speaks=False), rank)
    assert train.train_as_rank(train.load(namespace), namespace, rank, session) == 1
    lines = capsys.readouterr().err.splitlines()
    whose = f"rank {rank}: " if rank else ""
    assert lines[0] == f"error: {whose}Unexpected AssertionError"
    assert "KeyError: 'cudnn'" in lines and "AssertionError" in lines  # and what it came from
    assert ("in train_as_rank" in "\n".join(lines)) != has_file
    if has_file:
        log = Path(lines[-1].removeprefix("All frames: "))
        assert "in train_as_rank" in log.read_text()
        assert log.name == "rank-0.log"  # the world's


def test_an_unexpected_error_in_a_thread_is_shown_and_kept(
    tmp_path, monkeypatch, capsys, quiet_logger
):
    """By `main`, whose session is not begun here, and whose end would end this process."""

    def fail():
        raise OSError(28, "No space left on device")

    def train_as_rank(*_):
        logs.start_screen(0)
        logs.start_files(tmp_path, 0)
        for thread in [threading.Thread(target=fail)]:
            thread.start()
            thread.join()
        raise StopIteration

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(train, "train_as_rank", train_as_rank)
    monkeypatch.setattr(session_module, "begin_session", lambda *_: None)
    with pytest.raises(StopIteration):
        train.main(["--config", "tiny.yaml"])
    told = "Unexpected OSError: [Errno 28] No space left on device in a thread\nTraceback"
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert told in (tmp_path / "rank-0.log").read_text()


TYPED = ["--local_rank=0", "--config", "demo"]
TRAIN = f"{ROOT}/launch/train.py --config demo"


@pytest.mark.parametrize(
    "resume", ["--resume=none", "--res best", "--resume", "--resume_from_checkpoint runs/a/x", ""]
)
def test_the_command_to_go_on_does_not_go_back_again(resume):
    secret = "log.on_alarm=https://hooks.example/SECRET"  # the command is logged
    typed = [*TYPED, *resume.split(), "--run", "a b", "run.steps=9", secret, "run.on_end=SECRET"]
    found = train.resume_command(typed, ranks=2, ranks_here=2)
    shown = "run.steps=9 log.on_alarm=https://hooks.example/... 'run.on_end=(hidden)'"
    assert found == f"deepspeed --num_gpus 2 {TRAIN} --run 'a b' {shown}"


def test_the_command_to_go_on_works_in_the_folder_where_it_is_printed(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train.shutil, "which", lambda _: None)  # `.venv` is not activated
    monkeypatch.setattr(sys, "executable", f"{ROOT}/.venv/bin/python")
    script = "./launch/train.py --config demo"
    for ranks, command in {1: script, 2: f"./.venv/bin/deepspeed --num_gpus 2 {script}"}.items():
        assert train.resume_command(TYPED, ranks=ranks, ranks_here=ranks) == command


@pytest.mark.parametrize("run", ["", "--run a", "--run=a"])
def test_the_command_to_go_on_names_a_run_that_was_started_beside_another(run):
    typed = [*TYPED, *run.split(), "--resume", "40", "--as", "b", "run.steps=60"]
    found = train.resume_command(typed, ranks=1, ranks_here=1)
    assert found == f"{TRAIN} --run b run.steps=60"
    loaded = train.load(arguments := train.read_arguments(typed))
    assert (loaded.config.run.name, arguments.parent) == ("b", "a" if run else "demo")


@pytest.mark.parametrize(
    ("ranks", "runner", "expected"),
    [
        (1, "", TRAIN),
        (16, "", f"deepspeed --hostfile FILE {TRAIN}"),
        (
            8,
            "/v/bin/python /v/bin/deepspeed --include x:2 train.py",
            "deepspeed --include x:2 train.py",
        ),
        (
            8,
            "python v/bin/deepspeed train.py --resume 5 --run a",
            "v/bin/deepspeed train.py --run a",
        ),
    ],
)
def test_the_command_to_go_on_is_what_was_typed_where_that_can_be_seen(ranks, runner, expected):
    def command(environment):
        options = {"runner": runner.split(), "environment": environment}
        return train.resume_command(TYPED, ranks=ranks, ranks_here=min(ranks, 8), **options)

    assert command({"PATH": "/bin"}) == expected
    if runner:
        gpus = {"CUDA_VISIBLE_DEVICES": "4,5"}
        assert command(gpus) == f"CUDA_VISIBLE_DEVICES=4,5 {expected}"
