"""`run.on_end`: it waits for the mirror, and never runs before what was saved is in the bucket."""

import json
import threading
from pathlib import Path

import pytest
from ranks import until

from refocused.config.load_run import load_run
from refocused.metrics.jsonl import write_state
from refocused.monitor.sampler import on_end
from refocused.monitor.sampler.start_sampler import ON_ALARM, ON_END, begin_on_end, last_start
from refocused.system.errors import ExitCode
from refocused.system.processes import identify, this_process

COMMAND = "env > environment; echo SECRET >> ran"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that has ended; commands run in the folder above."""
    folder = tmp_path / "runs" / "tiny"
    (folder / "logs").mkdir(parents=True)
    (folder / "run.yaml").write_text("run: {}\n")
    write_state(folder / "state.json", {"status": "finished", "step": 12, "pid": 1})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_end.logs, "start_process_log", lambda name, file: None)
    for name, seconds in (("SETTLE", 0.0), ("POLL", 0.01), ("SILENT", 0.3), ("LIMIT", 0.3)):
        monkeypatch.setattr(on_end, f"{name}_SECONDS", seconds)
    return folder


def mirror(folder, *, complete, **status):
    process = this_process() if status.pop("alive", False) else None
    shown = {"complete": complete, "process": process and process.model_dump(), **status}
    write_state(folder / "mirror.json", shown)


def wait(
    folder, monkeypatch, command=COMMAND, *, mirrored=True, patience_minutes=9.0, code=0, begun=None
):
    monkeypatch.setenv(ON_END, command)
    monkeypatch.setenv(ON_ALARM, "cat >> alarms; echo >> alarms")
    facts = {"RUN": "tiny", "FOLDER": str(folder), "EXIT_CODE": code, "STEP": 12, "NODE": 0}
    on_end.wait_and_run(
        json.dumps([facts, mirrored, patience_minutes, begun or last_start(folder)])
    )


def ran():
    return Path("ran").exists()


def alarms():
    lines = Path("alarms").read_text().splitlines() if Path("alarms").exists() else []
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_command_gets_the_facts_and_its_text_stays_secret(run, monkeypatch, caplog, mirrored):
    caplog.set_level("INFO")
    if mirrored:
        mirror(run, complete=True)
    wait(run, monkeypatch, mirrored=mirrored, code=4)
    got = dict(line.partition("=")[::2] for line in Path("environment").read_text().splitlines())
    facts = {name: value for name, value in got.items() if name.startswith("REFOCUSED_")}
    assert facts == {
        "REFOCUSED_RUN": "tiny",
        "REFOCUSED_FOLDER": str(run),
        "REFOCUSED_EXIT_CODE": "4",
        "REFOCUSED_STEP": "12",
        "REFOCUSED_NODE": "0",
    }, "and no variable that holds the command"
    assert caplog.messages == ["Nothing is left to copy. Running run.on_end."] and alarms() == []


def test_it_waits_for_the_mirror_and_says_so_once_it_takes_long(run, monkeypatch, caplog):
    mirror(run, complete=False, last_error="bucket unreachable")
    waiting = threading.Thread(target=wait, args=(run, monkeypatch), kwargs={"patience_minutes": 0})
    waiting.start()
    for beat in range(20):  # the mirror reports, for longer than it may be silent
        until(alarms)
        mirror(run, complete=False, last_error="bucket unreachable", heartbeat=beat)
        waiting.join(0.03)
    assert not ran() and len(alarms()) == 1
    mirror(run, complete=True)
    waiting.join(60)
    assert ran()
    still = "run.on_end still waits for the mirror (bucket unreachable)."
    assert alarms() == [still]
    assert caplog.messages == [f"{still} The machine goes on, and costs."]


@pytest.mark.parametrize(
    "status", [{}, {"failed": {"10": "checkpoint_step_10 is damaged"}}, None], ids=str
)
def test_it_does_not_run_if_the_mirror_ends_incomplete(run, monkeypatch, status):
    if status is not None:
        mirror(run, complete=False, **status)
    wait(run, monkeypatch)
    (text,) = alarms()
    assert text.startswith("run.on_end does NOT run: the mirror has ended.") and not ran()
    assert ("is damaged" in text) == bool(status)


def test_it_does_not_run_if_the_run_was_started_again(run, monkeypatch, caplog):
    caplog.set_level("INFO")
    mirror(run, complete=False)
    me = this_process()
    starting = {"status": "starting", "pid": me.pid, "pid_started": me.started}
    starting["session_began"] = "later"
    waiting = threading.Thread(
        target=wait, args=(run, monkeypatch), kwargs={"begun": last_start(run)}
    )
    waiting.start()
    write_state(run / "state.json", starting)
    waiting.join(60)
    write_state(run / "state.json", {"status": "finished"})
    waiting = threading.Thread(
        target=wait, args=(run, monkeypatch), kwargs={"begun": last_start(run)}
    )
    waiting.start()
    (run / "run.yaml").write_text("run: {again: 1}\n")  # on a machine without rank 0
    waiting.join(60)
    assert caplog.messages == ["run.on_end does not run: the run was started again."] * 2
    assert not ran() and alarms() == []


def test_its_own_supervisor_and_a_silent_mirror_that_works_are_no_reason(run, monkeypatch):
    """Regression: a supervisor whose terminal took no more output kept the machine on."""
    me = this_process()
    supervisor = {"pid": me.pid, "started": me.started}
    write_state(run / "state.json", {"status": "stopped", "step": 12, "supervisor": supervisor})
    (run / "run.yaml").unlink()
    mirror(run, complete=False, alive=True)
    waiting = threading.Thread(target=wait, args=(run, monkeypatch))
    waiting.start()
    waiting.join(4 * on_end.SILENT_SECONDS)
    assert waiting.is_alive() and not ran()
    mirror(run, complete=True)
    waiting.join(60)
    assert ran() and alarms() == []


@pytest.mark.parametrize("what", ["trains", "mirrors"])
def test_it_waits_for_another_run_of_the_machine_and_for_its_mirror(run, monkeypatch, what):
    mirror(run, complete=True)
    me, other = this_process(), run.with_name("other")
    other.mkdir()
    status = "training" if what == "trains" else "stopped"
    write_state(other / "state.json", {"status": status, "pid": me.pid, "pid_started": me.started})
    mirror(other, complete=False, alive=what == "mirrors")
    waiting = threading.Thread(target=wait, args=(run, monkeypatch), kwargs={"patience_minutes": 0})
    waiting.start()
    until(alarms)
    waiting.join(0.1)
    assert not ran() and alarms() == [
        "run.on_end still waits for another run of this machine, other."
    ]
    write_state(other / "state.json", {"status": "stopped"})
    mirror(other, complete=False)
    waiting.join(60)
    assert ran()


@pytest.mark.parametrize(
    ("command", "reason"),
    [("exit 3 # SECRET", "exit code 3"), ("sleep 600", "the command took longer than 0.3 s")],
)
def test_a_command_that_fails_or_hangs_is_one_sentence(run, monkeypatch, caplog, command, reason):
    wait(run, monkeypatch, command, mirrored=False)
    assert caplog.messages == [f"run.on_end failed: {reason}. The machine goes on, and costs."]
    assert alarms() == [f"run.on_end failed: {reason}."]


def test_a_process_runs_it_unless_the_run_was_stopped(run, monkeypatch):
    settings = ["checkpoint.mirror=null", f"run.on_end={COMMAND}"]
    config = load_run("demo", settings, name="tiny").config
    assert begin_on_end(config, ExitCode.INTERRUPTED, step=12) == []
    assert begin_on_end(load_run("demo", []).config, ExitCode.OK, step=12) == []
    (line,) = begin_on_end(config, ExitCode.OK, step=12)
    assert line.startswith("      run.on_end runs in the background, now; to cancel it: kill ")
    pid = int(line.rpartition(" ")[2])
    assert "SECRET" not in Path(f"/proc/{pid}/cmdline").read_text()
    until(lambda: identify(pid) is None, seconds=90)
    assert ran() and (run / "logs" / "on_end.log").read_text() == ""
    log = (run / "logs" / "training.log").read_text()
    assert " on_end INFO Nothing is left to copy. Running run.on_end." in log
    (run / "logs").rename(run / "moved")
    (run / "logs").write_text("a file in its place")
    (line,) = begin_on_end(config, ExitCode.OK, step=12)
    assert "run.on_end does NOT run: its process could not be started" in line
