import math
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands.run_samples import TINY_RUN
from ranks import write_tokens

from refocused.commands import launch
from refocused.commands.launch import (
    HURRIED_SECONDS,
    LAST_RANKS_SECONDS,
    StopSignals,
    deadline,
    judge,
)
from refocused.config.load_run import load_run
from refocused.doctor import early
from refocused.doctor.early import place_problems
from refocused.monitor.sampler import gpu_reader
from refocused.monitor.sampler.gpu_reader import NoGpusError
from refocused.system.errors import ExitCode
from refocused.system.processes import ProcessIdentity, this_process
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
def test_there_is_a_rank_for_each_gpu_that_may_be_used(gpus, environment, options, accelerator):
    command = launch.deepspeed_command(environment, gpus=gpus)
    assert command[1 : command.index("--master_port")] == options
    assert command[0] == str(Path(sys.executable).with_name("deepspeed"))
    chosen = launch.training_environment(environment, gpus=gpus)
    assert (chosen.get("DS_ACCELERATOR"), chosen["PYTHONWARNINGS"]) == (accelerator, "ignore")
    if "RANKS" in environment and gpus:  # DeepSpeed would take the first GPUs of the machine
        assert chosen.get("CUDA_VISIBLE_DEVICES") in (None, "4,5")


def test_gpus_are_those_that_the_driver_lists(monkeypatch, capsys):
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [None] * 8)
    assert launch.usable_gpus(load_run("gpt2_124m")) == 8

    for text, gpus in {"": 0, "-1": 0, "NoDevFiles": 0, "4,5": 2, "0,-1,2": 1, "GPU-a": 1}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert launch.usable_gpus(load_run("gpt2_124m")) == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def at_fault():
        raise NoGpusError("The NVIDIA driver does not answer.", is_fault=True)

    monkeypatch.setattr(launch, "gpu_capabilities", at_fault)
    assert launch.usable_gpus(load_run("gpt2_124m", ["run.device=cpu"])) == 0
    assert capsys.readouterr().err == ""  # for the CPU the driver is not asked
    assert launch.usable_gpus(load_run("demo")) == 0
    assert capsys.readouterr().err == "warning: The NVIDIA driver does not answer.\n"


def test_more_ranks_than_gpus_that_are_visible_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(launch, "gpu_capabilities", lambda: [None] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("RANKS", "3")
    assert launch.main(["--config", "gpt2_124m", "data.source=x"]) == ExitCode.WRONG_USE
    assert capsys.readouterr().err == "error: RANKS=3, but CUDA_VISIBLE_DEVICES=4,5 has 2 GPUs.\n"


def test_a_launch_ends_where_the_driver_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_reader, "QUERY", ["sleep", "600"])
    monkeypatch.setattr(gpu_reader, "LIMIT_SECONDS", 0.5)
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY_RUN.replace("device: cpu", "device: auto"))
    assert launch.main(["--config", str(file), f"run.directory={tmp_path}"]) == ExitCode.FAILED
    assert "The NVIDIA driver did not answer" in capsys.readouterr().err


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
    tmp_path, monkeypatch, key, url, answer, refused
):
    def look_up(host, port):
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
    write_tokens(Path("tokens"), shards=1, tokens=1000, vocabulary=512)
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


def test_a_tracker_without_its_package_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    Path("tiny.yaml").write_text(TINY_RUN)
    write_tokens(Path("tokens"), shards=1, tokens=1000, vocabulary=512)
    assert not place_problems(load_run("tiny.yaml"))
    assert launch.main(["--config", "tiny.yaml", "tracking.wandb=p", "run.device=cpu"]) == 2
    told = f"{sys.executable} -m pip install wandb, or leave the setting out.\n"
    assert capsys.readouterr().err == f"error: tracking.wandb: needs wandb. Install it: {told}"


def test_a_dns_that_does_not_answer_is_not_waited_for(monkeypatch):
    asked, over = threading.Event(), threading.Event()

    def look_up(host, port):
        asked.set()
        over.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(early, "LOOKUP_SECONDS", 0.01)
    assert early.missing_store_name("http://store.example") is None
    assert asked.is_set()
    over.set()


def test_help_shows_both_commands_and_needs_no_torch():
    program = "import sys; from refocused.commands.launch import main; main(['--help']);"
    program += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\nFalse\n")
    for option in ("--restarts", "--spot", "--grace", "--resume", "--max-steps"):
        assert option in shown


def test_a_summary_is_written_once_and_its_failure_is_one_line(tmp_path, monkeypatch):
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


def test_the_way_on_keeps_what_chose_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("RANKS", "2")
    typed = ["--spot", "--config", "demo", "--resume", "none"]
    launches = launch.Launches(load_run("demo"), 0, typed, typed[1:], 1.0, 0.0)
    assert launches.resume_command == (
        "CUDA_VISIBLE_DEVICES=4,5 RANKS=2 ./launch/train.sh --spot --config demo"
    )


def test_settings_are_explained_once_and_without_ranks(monkeypatch, capsys):
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
def test_a_run_that_hung_has_its_own_exit_code_and_is_restarted(codes, hang, text, restarts):
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


@pytest.mark.parametrize(
    ("signals", "facts", "ends"),
    [
        ((), {}, math.inf),
        ((100.0,), {}, 400.0),
        ((100.0, 110.0), {}, 110.0 + HURRIED_SECONDS),
        ((100.0, 395.0), {}, 400.0),  # a second one never gives more time
        ((100.0, 110.0, 111.0), {}, 111.0),
        ((), {"abandoned": 50.0}, 350.0),
        ((), {"rank_ended": 50.0}, 50.0 + LAST_RANKS_SECONDS),
        ((100.0,), {"rank_ended": 120.0}, 120.0 + LAST_RANKS_SECONDS),
    ],
)
def test_the_grace_ends_with_what_was_seen(signals, facts, ends):
    assert deadline(signals, grace_seconds=300.0, **facts) == ends


@pytest.mark.parametrize(("pause", "counted"), [(0.29, 1), (0.31, 2)])
def test_the_two_signals_of_a_closing_terminal_count_as_one(pause, counted, monkeypatch):
    times = iter([100.0, 100.0 + pause])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    signals = StopSignals()
    signals.receive(signal.SIGINT)
    signals.receive(signal.SIGHUP)
    assert (len(signals.times), signals.times[0]) == (counted, 100.0)


def note(rank, exit_code=None, **facts):
    process = ProcessIdentity(pid=1, started=1)
    told = {"run": "r", "training": True} | facts
    return RankNote(rank=rank, process=process, exit_code=exit_code, **told)


GONE = [note(0, 130, reason="PARENT_GONE"), note(1, 130)]
WAITING = [note(0, training=False), note(1, training=False)]
CASES: list[tuple[list[RankNote], dict[str, Any], int, bool, str]] = [
    # notes, launcher code and signals, then: code, crashed, text
    ([note(0, 1), note(1, 1)], {}, 1, True, ""),  # they have said why
    (
        [note(0, 1), note(1)],
        {"launcher_code": 247},
        1,
        True,
        "Rank 1 was killed by SIGKILL, usually",
    ),
    ([note(0), note(1)], {"launcher_code": 245}, 1, True, "Ranks 0, 1 were killed by SIGSEGV; it"),
    ([note(0), note(1, 1)], {"launcher_code": 1}, 1, True, "Rank 0 was killed, usually"),
    (GONE, {"launcher_code": -9}, 130, True, ""),  # the launcher's end: a crash that was saved
    (GONE, {"launcher_code": -15, "signals": 1}, 130, False, ""),
    (WAITING, {"signals": 1}, 130, False, "Stopped before training began; nothing was changed."),
    ([note(0), note(1)], {"signals": 1}, 1, False, "Ranks 0, 1 ended without saving"),
    ([], {"launcher_code": 0}, 1, True, "deepspeed exited with 0 before any rank started"),
    ([], {"launcher_code": -9}, 1, True, "deepspeed exited with -9 before any rank started"),
    ([], {"launcher_code": 2}, 2, False, ""),
    ([], {"launcher_code": 1}, 1, False, "deepspeed exited with 1 before any rank started"),
]
for code in (0, 2, 4, 5, 130):  # what rank 0 ended with is the truth
    ended = [note(0, code), note(1, code)]
    CASES += [(ended, {"launcher_code": launcher}, code, False, "") for launcher in (0, 1, code)]
    CASES.append((ended, {"signals": 1, "killed": True}, code, False, ""))


@pytest.mark.parametrize(("notes", "facts", "code", "crashed", "text"), CASES)
def test_the_end_of_a_launch(notes, facts, code, crashed, text):
    verdict = judge(
        notes, **{"launcher_code": 1, "signals": 0, "killed": False, "hang": None, **facts}
    )
    assert (verdict.code, verdict.crashed) == (code, crashed)
    assert verdict.text.startswith(text) if text else not verdict.text
