"""The supervisor over a process tree like DeepSpeed's: whoever is signalled, it ends all of it."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import ROOT, until

from refocused.commands.launch import restart_pause

pytestmark = pytest.mark.slow
STAND_IN = Path(__file__).with_name("rank_stand_in.py")
RUN, SCRIPT = Path("runs/stand_in"), ROOT / "launch" / "train.sh"
# The real command, with the stand-in for DeepSpeed and without a run file.
COMMAND = """
import os, sys
from refocused.commands import launch
from refocused.config.load_run import load_run
launch.LAST_RANKS_SECONDS = launch.HURRIED_SECONDS = 2.0
launch.RESTART_PAUSE_SECONDS = float(sys.argv[5])
launch.SCRIPT = sys.argv[1]
launch.deepspeed_command = lambda environment, gpus: [
    sys.executable, sys.argv[1], "deepspeed", sys.argv[2]
]
on_end = [f"run.on_end={os.environ['ON_END']}"] if "ON_END" in os.environ else []
launches = launch.Launches(
    load_run("demo", ["run.device=cpu", "checkpoint.mirror=null", *on_end], name="stand_in"),
    gpus=0,
    typed=["--config", "demo", "--resume", "7", "--as", "new"],
    arguments=["--config", "demo", "--resume", "none", *sys.argv[6:]],
    grace_seconds=float(sys.argv[3]),
    began_seconds=0.0,
)
launches.signals.install()
sys.exit(launches.until_the_end(restarts=int(sys.argv[4])))
"""


class Tree:
    """The supervisor's process and what it started."""

    def __init__(self, folder, scenario, *values):
        self.folder = folder
        self.log = folder / "said"
        (folder / "tmp").mkdir()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, STAND_IN, scenario, *map(str, values)],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder / "tmp"), "TREE": str(folder)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, *names):
        until(lambda: all((self.folder / RUN / name).exists() for name in names), said=self.said)

    def pid(self, who):
        if who == "supervisor":
            return self.process.pid
        if who.startswith("rank"):
            return int((self.folder / RUN / f"pid-{who[-1]}").read_text())
        (pid,) = (pid for pid, words in self.members().items() if who in words)
        return pid

    def members(self):
        """Everything that runs for this test, by its environment."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"TREE={self.folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    words = (path / "cmdline").read_text().split("\0")
                    if any(words):  # a zombie has none
                        found[int(path.name)] = words
        return found

    def end(self):
        """Wait for the command; nothing of it may be left."""
        code = self.process.wait(60)
        assert self.members() == {}, self.said()
        assert not list((self.folder / "tmp").iterdir())
        return code

    def said(self):
        return self.log.read_text()


@contextlib.contextmanager
def tree(folder, scenario, *settings, grace=20, restarts=0, pause=0):
    started = Tree(folder, scenario, grace, restarts, pause, *settings)
    try:
        yield started
    finally:
        for pid in started.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.process.wait(60)


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("supervisor", signal.SIGINT),
        ("supervisor", signal.SIGHUP),
        ("deepspeed", signal.SIGTERM),
        ("deepspeed", signal.SIGKILL),
        ("launcher", signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_whoever_is_signalled_the_ranks_save_and_nothing_is_left(tmp_path, who, number):
    with tree(tmp_path, "trains") as started:
        started.wait_for("training-0", "training-1")
        os.kill(started.pid(who), number)
        assert started.end() == 130, started.said()
    assert started.said().count("stopping after this step and saving; 20 s") <= 1


def test_ranks_outlive_their_killed_supervisor_only_to_save(tmp_path):
    with tree(tmp_path, "trains") as started:
        started.wait_for("training-0", "training-1")
        os.kill(started.pid("supervisor"), signal.SIGKILL)
        until(lambda: not started.members(), said=started.members)
        assert not list((tmp_path / "tmp").iterdir())


def test_removed_temporary_files_cost_no_work(tmp_path):
    with tree(tmp_path, "trains") as started:
        started.wait_for("training-0", "training-1")
        for left in (tmp_path / "tmp").iterdir():  # by a cleaner of old files, or another launch
            shutil.rmtree(left)
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.end() == 130
    assert "stopping after this step and saving" in started.said()
    assert "nothing was changed" not in started.said()


def test_before_anything_is_open_a_signal_ends_it_at_once(tmp_path):
    with tree(tmp_path, "imports", grace=600) as started:
        started.wait_for("pid-0", "pid-1")
        os.kill(started.process.pid, signal.SIGINT)
        assert started.end() == 130
    assert "Stopped before training began; nothing was changed." in started.said()


def test_a_stop_before_anything_is_open_ends_it_at_once(tmp_path):
    with tree(tmp_path, "imports", grace=600) as started:
        started.wait_for("pid-0", "pid-1")
        (tmp_path / RUN / "STOP").touch()
        assert started.end() == 130
    assert "Stopped before training began; nothing was changed." in started.said()


def test_a_rank_that_does_not_end_is_killed_when_the_grace_is_over(tmp_path):
    with tree(tmp_path, "hangs", grace=1) as started:
        started.wait_for("training-0", "training-1")
        os.kill(started.process.pid, signal.SIGTERM)
        assert any("sleep" in words for words in started.members().values())  # a rank's helper
        # Rank 0 has said that all is saved; what hung afterwards does not make that untrue.
        assert started.end() == 130
    assert "killing the remaining processes (ranks 1)" in started.said()


def test_a_second_and_a_third_signal_shorten_the_grace(tmp_path):
    with tree(tmp_path, "hangs", grace=600) as started:
        started.wait_for("training-0", "training-1")
        for _ in range(3):
            os.kill(started.process.pid, signal.SIGINT)
            time.sleep(0.4)
        assert started.end() == 130


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_with_its_signal_and_the_way_on(tmp_path, victim):
    with tree(tmp_path, "trains") as started:
        started.wait_for("training-0", "training-1")
        (tmp_path / RUN / "checkpoints" / "checkpoint_step_8000").mkdir(parents=True)
        os.kill(started.pid(f"rank {victim}"), signal.SIGKILL)
        assert started.end() == 1, started.said()
    # The launcher tells the signal unless another rank's end was found first.
    assert re.search(
        f"^error: Rank {victim} was killed( by SIGKILL)?, usually because", started.said(), re.M
    )
    way_on = f"hint: The last checkpoint is step 8,000. Resume: {SCRIPT} --config demo --run new\n"
    assert way_on in started.said()


@pytest.mark.parametrize(
    ("scenario", "restarts", "starts_again", "code"),
    [("gains", 1, 2, 0), ("dies", 1, 1, 1), ("dies", 0, 0, 1), ("works", 1, 0, 5)],
)
def test_a_crash_starts_again_as_long_as_steps_are_gained(
    tmp_path, scenario, restarts, starts_again, code
):
    with tree(tmp_path, scenario, restarts=restarts) as started:
        assert started.end() == code, started.said()
    assert started.said().count("Restarting from step") == starts_again
    same = f"hint: No checkpoint was saved. Start again: {SCRIPT} --config demo --resume 7 --as new"
    assert (same in started.said()) == (scenario == "dies")


@pytest.mark.parametrize(
    ("scenario", "signals", "runs"),
    [
        ("gains", False, True),
        ("gains again", False, False),
        ("dies", False, False),
        ("works", False, True),
        ("works", True, False),
        ("trains", True, False),
    ],
)
def test_the_command_at_the_end_runs_once_unless_somebody_stops(
    tmp_path, monkeypatch, scenario, signals, runs
):
    """Not after a failure without a checkpoint either: there is nothing to lose but a person.

    A run that was complete takes no step, and somebody looks at it.
    """
    monkeypatch.setenv("ON_END", f"echo $REFOCUSED_EXIT_CODE >> {tmp_path}/ended")
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "run.yaml").touch()
    scenario, _, again = scenario.partition(" ")
    code_before = 0 if again else 5  # its mirror was late
    state = {"status": "finished", "exit_code": code_before, "step": 9}
    (tmp_path / RUN / "state.json").write_text(json.dumps(state))
    if scenario == "works":
        (tmp_path / RUN / "checkpoints" / "checkpoint_step_9").mkdir(parents=True)
    with tree(tmp_path, scenario, restarts=1) as started:
        started.wait_for("training-0", "training-1")
        if signals:
            os.kill(started.process.pid, signal.SIGINT)
        code = started.process.wait(60)
        until(lambda: started.members() == {}, said=started.said)
    ended = (tmp_path / "ended").read_text() if (tmp_path / "ended").exists() else ""
    assert ended == (f"{code}\n" if runs else ""), started.said()
    assert ("run.on_end runs in the background" in started.said()) == runs
    assert ("does not run: the run was complete before" in started.said()) == bool(again)


def test_a_restart_repeats_all_that_was_given_but_the_resume(tmp_path):
    settings = ["log.on_alarm=http://h/services/KEY", "evaluation.sample_prompt=see https://a.b/c"]
    with tree(tmp_path, "gains", *settings, restarts=1) as started:
        assert started.end() == 0, started.said()
    first, *later = map(shlex.split, (tmp_path / "given").read_text().splitlines())
    assert first == ["--config", "demo", "--resume", "none", *settings]
    assert later == [["--config", "demo", *settings]] * 2


def test_the_pause_before_a_restart_doubles_until_a_launch_gains_a_checkpoint(tmp_path):
    assert [restart_pause(number) for number in (0, 1, 2, 3, 50)] == [0, 3, 6, 12, 300]
    with tree(tmp_path, "dies", restarts=9, pause=200) as started:
        pause = "Restarting from step 0 in 3.3 min (--restarts 9).\n"
        until(lambda: pause in started.said(), said=started.said)
        monitor = [sys.executable, "-m", "refocused", "monitor", "--once", RUN]
        shown = subprocess.run(monitor, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "STARTING" in shown.stdout and "a crash in 3.3 min" in shown.stdout
        stop = [sys.executable, "-m", "refocused", "stop", RUN, "--wait"]
        subprocess.run(stop, cwd=tmp_path, check=True)
        assert started.end() == 1
    assert not (tmp_path / RUN / "state.json").exists()  # as before the start


def test_alarms_of_this_launch_reach_the_screen(tmp_path):
    def event(text, **facts):
        alarm = {"kind": "alarm", "alarm": "heat", "raised": True, "text": text}
        return json.dumps({**alarm, **facts}) + "\n"

    events = tmp_path / RUN / "logs" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text(event("of an earlier launch"))
    with tree(tmp_path, "trains") as started:
        started.wait_for("training-0", "training-1")
        time.sleep(1)  # until the supervisor has seen the run's folder
        with events.open("a") as file:
            file.write(event("GPU 4 is cool", raised=False))
            file.write(event("80 % is spent", alarm="budget_80"))
            file.write(event("GPU 5 is hot"))
            file.write(event("GPU 6 is lost", severity="critical"))
        until(lambda: "warning: GPU 5 is hot\nerror: GPU 6 is lost\n" in started.said())
        os.kill(started.process.pid, signal.SIGTERM)
        assert started.end() == 130
    assert not re.search("earlier launch|cool|spent", started.said())
