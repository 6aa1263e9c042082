import dataclasses
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.run_samples import TINY_RUN
from ranks import write_tokens

from refocused.bucket.folder import DirectoryBucket
from refocused.commands import launch
from refocused.config.data import DataConfig
from refocused.config.load_run import load_run
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.doctor import early
from refocused.doctor.early import place_problems
from refocused.monitor.sampler import gpu_reader
from refocused.monitor.sampler.gpu_reader import NoGpusError
from refocused.monitor.sampler.machine_readings import FreeMemory
from refocused.system.errors import ExitCode
from refocused.system.processes import this_process
from refocused.train.lifecycle.launch_session import RankNote


@pytest.mark.parametrize(
    ("gpus", "environment", "options", "accelerator"),
    [
        (8, {}, ["--num_gpus", "8"], None),
        (8, {"RANKS": "4"}, ["--num_gpus", "4"], None),
        (8, {"CUDA_VISIBLE_DEVICES": "4,5"}, [], None),
        (8, {"RANKS": "2", "CUDA_VISIBLE_DEVICES": "4,5,6"}, [], None),
        (0, {"CUDA_VISIBLE_DEVICES": ""}, ["--num_gpus", "2"], "cpu"),
        (0, {"RANKS": "3", "CUDA_VISIBLE_DEVICES": "-1"}, ["--num_gpus", "3"], "cpu"),
        (0, {"RANKS": "3"}, ["--num_gpus", "3"], None),
        (0, {}, ["--num_gpus", "2"], "cpu"),  # so that DeepSpeed does not look for a GPU
    ],
)
def test_there_is_a_rank_for_each_gpu_that_may_be_used(
    gpus: int, environment: dict[str, str], options: list[str], accelerator: str | None
) -> None:
    command = launch.deepspeed_command(environment, gpus=gpus)
    assert command[1 : command.index("--master_port")] == options
    assert command[0] == str(Path(sys.executable).with_name("deepspeed"))
    chosen = launch.training_environment(environment, gpus=gpus)
    assert (chosen.get("DS_ACCELERATOR"), chosen["PYTHONWARNINGS"]) == (accelerator, "ignore")
    if "RANKS" in environment and gpus:  # DeepSpeed would take the first GPUs of the machine
        assert chosen.get("CUDA_VISIBLE_DEVICES") in (None, "4,5")


def test_gpus_are_those_that_the_driver_lists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [None] * 8)
    assert launch.usable_gpus(load_run("gpt2_124m")) == 8

    for text, gpus in {"": 0, "-1": 0, "NoDevFiles": 0, "4,5": 2, "0,-1,2": 1, "GPU-a": 1}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert launch.usable_gpus(load_run("gpt2_124m")) == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def at_fault() -> list[None]:
        raise NoGpusError("The NVIDIA driver does not answer.", is_fault=True)

    monkeypatch.setattr(launch, "gpu_capabilities", at_fault)
    assert launch.usable_gpus(load_run("gpt2_124m", ["run.device=cpu"])) == 0
    assert capsys.readouterr().err == ""  # for the CPU the driver is not asked
    assert launch.usable_gpus(load_run("demo")) == 0
    assert capsys.readouterr().err == "warning: The NVIDIA driver does not answer.\n"


def test_more_ranks_than_gpus_that_are_visible_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [None] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("RANKS", "3")
    assert launch.main(["--config", "gpt2_124m", "data.source=x"]) == ExitCode.WRONG_USE
    assert capsys.readouterr().err == "error: RANKS=3, but CUDA_VISIBLE_DEVICES=4,5 has 2 GPUs.\n"


def test_a_launch_ends_where_the_driver_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_reader, "QUERY", ["sleep", "600"])
    monkeypatch.setattr(gpu_reader, "LIMIT_SECONDS", 0.5)
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY_RUN.replace("device: cpu", "device: auto"))
    assert launch.main(["--config", str(file), f"run.directory={tmp_path}"]) == ExitCode.FAILED
    assert "The NVIDIA driver did not answer" in capsys.readouterr().err


def tokens(folder: Path, *, largest: int) -> Path:
    write_tokens(folder, shards=1, tokens=1000, vocabulary=largest + 1)
    np.save(folder / "last.npy", np.full(1000, largest, np.uint16))
    return folder


def prepared(folder: Path, *, largest: int) -> None:
    """Make data whose manifest knows the largest id of each file; the last one has it."""
    bucket = DirectoryBucket(tokens(folder, largest=largest))
    found = build_manifest(bucket, DataConfig(source=str(folder)), cache_file=None)
    known = [dataclasses.replace(one, max_id=9) for one in found.shards]
    known[0] = dataclasses.replace(known[0], max_id=largest)
    write_manifest(bucket, dataclasses.replace(found, shards=tuple(known)))


LARGE = "run.device=auto model.preset=gpt2_124m"
MISTAKES: dict[str, tuple[str, str]] = {
    "restarts": ("--restarts -1", "argument --restarts: -1: expected 0 or more"),
    "an option": ("--learning-rate 3", "unrecognized arguments"),
    "a number": ("--grace soon", "--grace"),
    "two run files": ("--config=test", "error: --config is given twice (tiny.yaml, then test). Ke"),
    "a setting": ("optimizer.lrr=1", "Did you mean optimizer.lr?"),
    "ids of a tokenizer": ("model.vocabulary=9 data.tokenizer=gpt2", "= 9 is less than the 50257"),
    "nowhere": ("data.source=nowhere", "data.source: nowhere: the folder does not exist"),
    "another cloud": ("data.source=az://x/y", "data.source: 'az://x/y' is not a bucket this"),
    "a mirror": (
        "checkpoint.mirror=s3://x",
        "checkpoint.mirror: 's3://x' is not the address of a bu",
    ),
    "one of two": (
        "data.source=null data.mixture={a: {source: nowhere, weight: 1}}",
        "data.mixture.a: nowhere: the folder does not exist",
    ),
    "an empty folder": ("data.source=empty", "data.source: empty: no token files; it holds no fi"),
    "ids": ("data.source=large", "last.npy has the id 600, and the model has ids up to"),
    "ids in a manifest": ("data.source=prepared", "last.npy has the id 600, and the model has"),
    "no GPU": ("run.device=cuda", "run.device is cuda, and the NVIDIA driver lists no GPU on this"),
    "no key": ("data.source=gs://bucket/x --gcs-credentials no.json", "no.json cannot be read: No"),
    "memory": (
        "model.preset=gpt2_1b batch.micro_batch_size=8 model.sequence_length=2048",
        "10.0 GB of 10.0 GB are free. Use a machine with",
    ),
    "a CPU": (LARGE, "124 M parameters on the CPU"),
    "four on it": (f"RANKS=4 {LARGE}", "124 M parameters on the CPU"),
    "many ranks": (f"RANKS=x {LARGE}", "RANKS=x is not a whole number of at least 1"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_that_is_known_at_once_starts_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    monkeypatch.setattr(launch, "Supervisor", None)  # nothing can be started
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [])
    monkeypatch.setattr(early, "memory_now", lambda: FreeMemory(10**10, 10**10, 0))
    Path("tiny.yaml").write_text(TINY_RUN)
    Path("empty").mkdir()
    tokens(Path("tokens"), largest=511)
    (tokens(Path("large"), largest=600) / "shard_000.npy").unlink()
    prepared(Path("prepared"), largest=600)
    typed, message = MISTAKES[case]
    words = typed.split(" ", 1 if "mixture" in typed else -1)
    if words[0].startswith("RANKS="):
        monkeypatch.setenv("RANKS", words.pop(0)[len("RANKS=") :])
    try:
        code = launch.main(["--config", "tiny.yaml", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == ExitCode.WRONG_USE
    told = capsys.readouterr().err
    assert message in told and told.count("error: ") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_NODATA, "No address associated with hostname"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (None, False),
    ],
)
@pytest.mark.parametrize("key", ["data.source", "checkpoint.mirror"])
@pytest.mark.parametrize("url", ["gs://b42/x", "s3://b42/x"])
def test_only_a_name_that_does_not_exist_refuses_a_bucket(
    tmp_path: Path, monkeypatch: Any, key: str, url: str, answer: OSError | None, refused: bool
) -> None:
    def look_up(host: str, port: object) -> list[object]:
        assert host == "store.example"
        if answer is not None:
            raise answer
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "https://store.example")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    Path("tiny.yaml").write_text(TINY_RUN)
    tokens(Path("tokens"), largest=511)
    loaded = load_run("tiny.yaml", [f"{key}={url}"])
    found = place_problems(loaded)
    assert list(found) == ([key] if refused else [])
    told = "Unknown host store.example. Check the network and DNS of this machine"
    assert all(text.startswith(f"{key}: {told}") for text in found.values())
    if key == "checkpoint.mirror":  # with steps of its own a run goes on without its mirror
        assert not place_problems(loaded, resume="none")
        (tmp_path / "runs/tiny/checkpoints/checkpoint_step_10").mkdir(parents=True)
        assert not place_problems(loaded)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")  # it looks names up itself
    assert not place_problems(load_run("tiny.yaml", [f"{key}={url}"]))


def test_a_tracker_without_its_package_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    Path("tiny.yaml").write_text(TINY_RUN)
    tokens(Path("tokens"), largest=511)
    assert not place_problems(load_run("tiny.yaml"))
    assert launch.main(["--config", "tiny.yaml", "tracking.wandb=p", "run.device=cpu"]) == 2
    told = f"{sys.executable} -m pip install wandb, or leave the setting out.\n"
    assert capsys.readouterr().err == f"error: tracking.wandb: needs wandb. Install it: {told}"


def test_a_dns_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Event(), threading.Event()

    def look_up(host: str, port: object) -> list[object]:
        asked.set()
        over.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(early, "LOOKUP_SECONDS", 0.01)
    assert early.missing_store_name("http://store.example") is None
    assert asked.is_set()
    over.set()


def test_help_shows_both_commands_and_needs_no_torch() -> None:
    program = "import sys; from refocused.commands.launch import main; main(['--help']);"
    program += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\nFalse\n")
    for option in ("--restarts", "--spot", "--grace", "--resume", "--max-steps"):
        assert option in shown


def test_a_summary_is_written_once_and_its_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "python"
    tool.write_text("#!/bin/sh\necho one >&2\necho 'No room.' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    assert launch.summarize(tmp_path) == ""  # it never began
    (tmp_path / "state.json").write_text("{}")
    trouble = launch.summarize(tmp_path)
    assert "SUMMARY.md was not written (No room.)" in trouble and "\n" not in trouble
    (tmp_path / "SUMMARY.md").touch()  # by rank 0, after the state
    assert launch.summarize(tmp_path) == ""


def test_the_way_on_keeps_what_chose_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("RANKS", "2")
    typed = ["--spot", "--config", "demo", "--resume", "none"]
    launches = launch.Launches(load_run("demo"), 0, typed, typed[1:], 1.0, 0.0)
    assert launches.resume_command == (
        "CUDA_VISIBLE_DEVICES=4,5 RANKS=2 ./launch/train.sh --spot --config demo"
    )


def test_settings_are_explained_once_and_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "deepspeed_command", None)  # calling it would fail
    assert launch.main(["--settings", "optimizer.lr"]) == 0
    assert capsys.readouterr().out.count("optimizer.lr ") == 1
    assert launch.main(["--config", "demo", "--print-config"]) == 0
    assert capsys.readouterr().out.count("run:\n") == 1


@pytest.mark.parametrize(
    ("codes", "hang", "text", "restarts"),
    [
        ([ExitCode.HUNG, None], "Rank 1 is missing", "", True),  # rank 0 has printed it
        ([None, None], "Rank 0 is missing", "Rank 0 is missing", True),  # no rank could
        ([None, None], None, "Ranks 0, 1 were killed by SIGKILL", True),
    ],
)
def test_a_run_that_hung_has_its_own_exit_code_and_is_restarted(
    codes: list[int | None], hang: str | None, text: str, restarts: bool
) -> None:
    notes = [
        RankNote(rank=rank, process=this_process(), training=True, exit_code=code)
        for rank, code in enumerate(codes)
    ]
    verdict = launch.judge(notes, launcher_code=247, signals=0, killed=False, hang=hang)
    assert verdict.code == (ExitCode.FAILED if hang is None else ExitCode.HUNG)
    assert verdict.text.startswith(text) and bool(verdict.text) == bool(text)
    assert verdict.crashed == restarts
    stopped = launch.judge(notes, launcher_code=247, signals=1, killed=False, hang=hang)
    assert not stopped.crashed
