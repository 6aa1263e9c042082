from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from monitoring.watched_run import new_run

from refocused.commands import launch
from refocused.config.decode import load_run
from refocused.errors import ConfigError, ExitCode, RefocusedError
from refocused.monitoring import gpu_driver
from refocused.monitoring.gpu import NoGpusError

RUN = """
run: {steps: 20, device: cpu}
model: {preset: gpt2_tiny, sequence_length: 32}
batch: {micro: 2, accumulation: 2}
data: {source: tokens}
optimizer: {lr: 3e-3}
"""


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        (8, {}, ["--num_gpus", "8"]),
        (8, {"RANKS": "4"}, ["--num_gpus", "4"]),
        (8, {"CUDA_VISIBLE_DEVICES": "4,5"}, []),
        (8, {"RANKS": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, ["--num_gpus", "2"]),
        (0, {}, ["--num_gpus", "2"]),
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, ["--num_gpus", "2"]),
    ],
)
def test_there_is_a_rank_for_each_gpu_that_may_be_used(
    gpus: int, environment: dict[str, str], expected: list[str]
) -> None:
    command = launch.deepspeed_command(environment, gpus=gpus)
    assert command[1 : command.index("--master_port")] == expected
    assert command[0] == str(Path(sys.executable).with_name("deepspeed"))


@pytest.mark.parametrize(
    ("gpus", "environment", "accelerator"),
    [(8, {}, None), (0, {}, "cpu"), (0, {"RANKS": "2"}, None)],
)
def test_without_a_gpu_deepspeed_is_told_not_to_look_for_one(
    gpus: int, environment: dict[str, str], accelerator: str | None
) -> None:
    chosen = launch.training_environment(environment, gpus=gpus)
    assert chosen.get("DS_ACCELERATOR") == accelerator
    assert chosen["PYTHONWARNINGS"] == "ignore"


def drivers(monkeypatch: pytest.MonkeyPatch, answer: list[None] | RefocusedError) -> list[str]:
    """Stand in for the driver; return the list that notes each time it is asked."""
    asked: list[str] = []

    def capabilities() -> list[None]:
        asked.append("")
        if isinstance(answer, RefocusedError):
            raise answer
        return answer

    monkeypatch.setattr(launch, "gpu_capabilities", capabilities)
    return asked


def test_gpus_are_those_that_the_driver_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = drivers(monkeypatch, [None] * 8)
    assert launch.usable_gpus(load_run("gpt2_124m"), {}) == 8
    assert launch.usable_gpus(load_run("gpt2_124m", ["run.device=cpu"]), {}) == 0
    assert len(asked) == 1  # for the CPU nobody has to ask


def test_a_driver_at_fault_leaves_the_cpu_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drivers(monkeypatch, NoGpusError("The NVIDIA driver does not answer.", is_fault=True))
    assert launch.usable_gpus(load_run("demo"), {}) == 0
    assert capsys.readouterr().err == "WARN  The NVIDIA driver does not answer.\n"


@pytest.mark.parametrize(("ranks", "is_refused"), [("", True), ("4", True), ("1", False)])
def test_a_large_model_is_not_trained_on_the_cpu_by_accident(
    monkeypatch: pytest.MonkeyPatch, ranks: str, is_refused: bool
) -> None:
    drivers(monkeypatch, [])
    loaded = load_run("gpt2_124m", ["run.device=auto"])
    if not is_refused:
        assert launch.usable_gpus(loaded, {"RANKS": ranks}) == 0
        return
    with pytest.raises(ConfigError, match=r"124 M parameters on the CPU.*run\.device=cpu"):
        launch.usable_gpus(loaded, {"RANKS": ranks})


def test_a_launch_ends_where_the_driver_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.StopSignals, "install", lambda self: None)
    monkeypatch.setattr(gpu_driver, "QUERY", ["sleep", "600"])
    monkeypatch.setattr(gpu_driver, "LIMIT_SECONDS", 0.5)
    file = tmp_path / "tiny.yaml"
    file.write_text(RUN.replace("device: cpu", "device: auto"))
    assert launch.main(["--config", str(file), f"run.directory={tmp_path}"]) == ExitCode.FAILED
    assert "The NVIDIA driver did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--learning-rate", "3"], "unrecognized arguments"),
        (["--grace", "soon"], "--grace"),
        (["optimizer.lrr=1"], "Did you mean optimizer.lr?"),
        (
            ["model.vocabulary=50256", "data.tokenizer=gpt2"],
            "= 50256 is less than the 50257 token ids",
        ),
    ],
)
def test_wrong_use_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(RUN)
    try:
        code = launch.main(["--config", str(file), *arguments])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == ExitCode.WRONG_USE
    assert told in capsys.readouterr().err


def test_help_shows_both_commands_and_needs_no_torch() -> None:
    program = (
        "import sys; from refocused.commands.launch import main; code = main(['--help']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for option in ("--restarts", "--spot", "--grace", "--resume", "--max-steps"):
        assert option in shown.stdout


def test_the_newest_step_is_that_on_the_disk(tmp_path: Path) -> None:
    assert launch.newest_step(tmp_path) == 0
    for name in ("checkpoint_step_950", "checkpoint_step_1000", "superseded-checkpoint_step_2000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert launch.newest_step(tmp_path) == 1000


@pytest.mark.slow
def test_a_run_that_crashed_gets_its_summary(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(pid=1, pid_started=-1)
    assert launch.summarize(run.folder) == ""
    assert "crashed" in (run.folder / "SUMMARY.md").read_text()


def test_a_summary_is_written_once_and_its_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "python"
    tool.write_text("#!/bin/sh\necho one >&2\necho 'No room.' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    run = tmp_path / "run"
    assert launch.summarize(run) == ""  # it never began
    run.mkdir()
    (run / "state.json").write_text("{}")
    trouble = launch.summarize(run)
    assert "SUMMARY.md was not written (No room.)" in trouble and "\n" not in trouble
    (run / "SUMMARY.md").touch()  # by rank 0, after the state
    assert launch.summarize(run) == ""


def test_the_way_on_keeps_what_chose_the_gpus() -> None:
    typed = ["--spot", "--config", "demo", "--resume", "none"]
    environment = {"CUDA_VISIBLE_DEVICES": "4,5", "RANKS": "2", "HOME": "/"}
    assert launch._again(typed, environment) == (
        "CUDA_VISIBLE_DEVICES=4,5 RANKS=2 launch/train.sh --spot --config demo"
    )
