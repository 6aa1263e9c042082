"""Notes, environment, signals and summary shared by ranks and launcher."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import Any, cast

import pytest
from run_fakes import Clock, config_of
from thread_ranks import on_two_ranks, results

from refocused.system.errors import ExitCode, TrainingError
from refocused.system.processes import ProcessIdentity, this_process
from refocused.system.world import World
from refocused.train.lifecycle import session
from refocused.train.lifecycle.launch_session import (
    ENDING,
    STARTING,
    STOP_SIGNALS,
    Launch,
    Notices,
    Signals,
    launch_of,
    write_summary,
)
from refocused.train.lifecycle.session import Ancestors, Session, stopped_ranks
from refocused.train.step.stopping import StopReason, StopRequest


def begun(launch, rank):
    """The session of a rank of this launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "launch_of", lambda environment: launch)
        return Session(Signals(speaks=False), rank)


@pytest.fixture
def launch():
    created = Launch(began_seconds=12.5, grace_seconds=30.0, command="again")
    yield created
    created.end()


def test_ranks_know_their_supervisor_and_it_reads_their_last_notes(launch):
    assert launch_of(launch.environment) == launch
    assert launch.supervisor == this_process()
    assert launch_of({}) is None
    elsewhere = launch.model_copy(update={"host": "node-7"})
    assert launch_of(elsewhere.environment) is None
    begun(launch, 1).report(exit_code=1)
    first = begun(launch, 0)
    first.report(run="runs/a")
    first.report(training=True)
    os.write(launch.open_notes(), b'{"rank": 0, "proc')  # one that is being written
    assert [(note.rank, note.exit_code, note.run, note.training) for note in launch.notes()] == [
        (0, None, "runs/a", True),
        (1, 1, None, False),
    ]


def test_a_rank_that_cannot_report_does_not_train(launch):
    begun(None, 0).report(exit_code=0)
    unreachable = launch.model_copy(update={"notes_file": 99_999})
    with pytest.raises(
        TrainingError, match=f"cannot report to its supervisor, process {os.getpid()}"
    ):
        begun(unreachable, 0)
    # Without its supervisor a rank ends by itself, and nobody reads notes.
    dead = ProcessIdentity(pid=1, started=999)
    begun(unreachable.model_copy(update={"supervisor": dead}), 0).report(exit_code=130)


class EndedError(Exception):
    """Raised instead of exiting."""


@pytest.fixture
def handlers(monkeypatch):
    """Restore the signal handlers, and prevent an exit."""

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_recorded_and_answered_on_the_terminal(number, handlers, capfd):
    silent, signals = Signals(speaks=False), Signals(speaks=True)
    silent.receive(number)
    signals.install()
    assert (silent.asked, signals.asked) == (True, False)
    os.kill(os.getpid(), number)
    assert signals.asked
    assert capfd.readouterr().err == f"\n{STARTING.first}\n"


def test_nohup_ignores_the_end_of_the_terminal(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals(speaks=True)
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.asked


def test_a_burst_of_signals_counts_once_and_the_third_ends_the_process(handlers, capfd):
    clock = Clock()
    signals = Signals(speaks=True, clock=clock)
    signals.notices = Notices("first")
    for _ in range(30):  # over 30 s, as the launcher and the terminal may repeat them
        signals.receive(signal.SIGTERM)
        clock.now += 1.0
    signals.notices = ENDING  # the message depends on the phase
    clock.now += 5.0
    signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == f"\nfirst\n\n{ENDING.again}\n"
    assert "lost" not in ENDING.again and "sav" not in ENDING.first
    clock.now += 5.0
    with pytest.raises(EndedError, match="1"):
        signals.receive(signal.SIGINT)
    assert capfd.readouterr().err == f"\n{ENDING.at_once}\n"


def test_a_closed_terminal_does_not_prevent_the_note(monkeypatch):
    def gone(descriptor, content):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    signals = Signals(speaks=True)
    signals.receive(signal.SIGHUP)
    assert signals.asked


def test_a_finished_run_has_a_summary(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"run": "one", "status": "stopped"}))
    assert write_summary(tmp_path) == ""
    assert (tmp_path / "SUMMARY.md").read_text().startswith("# one: stopped\n")
    assert (tmp_path / "summary.html").is_file()
    (tmp_path / ".SUMMARY.md.part").mkdir()
    trouble = write_summary(tmp_path)
    assert "SUMMARY.md was not written" in trouble and "Is a directory" in trouble
    assert f"launch/monitor.py {tmp_path} --summary" in trouble


RANKED = {"RANK": "0"}
DEEPSPEED = {41: "python -u -m deepspeed.launcher.launch train.py", 40: "python /bin/deepspeed x"}


class Machine:
    """A fake of the kernel's process table, in which a test changes parents."""

    def __init__(self, folder):
        self.folder = folder

    def put(self, pid, parent, command="", **more):
        place = self.folder / str(pid)
        place.mkdir(exist_ok=True)
        state = more.pop("state", "S")
        (place / "stat").write_text(f"{pid} (a (name) of 3) {state} {parent} 1 1 0 0")
        (place / "cmdline").write_text(command.replace(" ", "\0") + "\0" * bool(command))
        (place / "environ").write_text("".join(f"{name}={more[name]}\0" for name in more))

    def chain(self, commands):
        """This process below others, nearest first; the last one's parent is process 1."""
        pids = [*commands, 1]
        self.put("self", pids[0])
        for pid, parent in zip(commands, pids[1:], strict=False):
            self.put(pid, parent, commands[pid])

    def ancestors(self, launch=None, environment=RANKED):
        return Ancestors(launch, environment=environment, processes=self.folder)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("commands", "environment"),
    [
        (DEEPSPEED, RANKED),
        ({41: "python -m torch.distributed.run train.py", 40: "-bash"}, RANKED),
        ({41: "python /bin/torchrun train.py", 40: "bash", 39: "sshd:"}, RANKED),
        ({41: "slurmstepd: [12.0]"}, {"SLURM_PROCID": "1"}),
        ({41: "/bin/bash -e ./rank.sh", 40: "slurmstepd: [12.0]"}, RANKED),
        ({41: "orted --hnp"}, {"OMPI_COMM_WORLD_RANK": "1"}),
    ],
)
def test_the_end_of_any_ancestor_is_noticed(commands, environment, machine):
    for ended in (pid for pid in commands if commands[pid] not in ("-bash", "bash", "sshd:")):
        machine.chain(commands)
        family = machine.ancestors(environment=environment)
        assert not family.gone
        below = "self" if ended == 41 else ended + 1
        machine.put(below, 1, "" if below == "self" else commands[int(below)])
        assert family.gone, ended


@pytest.mark.parametrize(
    "commands",
    [
        {41: "-bash"},
        {41: "bash --init-file /shell/integration.sh", 40: "node server.js"},
        {41: "zsh -l", 40: "tmux"},
        {41: "bash train_here.sh", 40: "bash"},
        {41: "python any.py"},
    ],
)
def test_a_manually_started_rank_survives_its_shell(commands, machine):
    # A launcher counts only for a rank.
    for environment in ({},) if commands[41] == "python any.py" else ({}, RANKED):
        machine.chain(commands)
        family = machine.ancestors(environment=environment)
        if 40 in commands:
            machine.put(41, 1, commands[41])
        else:
            machine.put("self", 1)
        assert not family.gone
        assert family.command_line == [] and family.environment == {}


def test_a_launcher_that_exited_before_the_rank_started_is_noticed(machine):
    machine.put(1, 0, "/sbin/init")
    machine.chain({41: DEEPSPEED[41]})
    assert machine.ancestors().gone
    # A container's first process.
    machine.put(1, 0, "python /bin/deepspeed x", CUDA_VISIBLE_DEVICES="2,3")
    family = machine.ancestors()
    assert not family.gone
    assert family.command_line == ["python", "/bin/deepspeed", "x"]
    assert family.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}


@pytest.mark.parametrize("own", ["CROSS_SIZE", "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("above", [{}, {41: "/bin/sh wrapper.sh"}])
def test_a_parent_that_launched_nothing_is_noticed_at_first_sight(own, above, machine):
    environment = {**RANKED, own: "1"}
    for first in ("/sbin/init", "bash", "sleep infinity", "/usr/bin/tini -- sleep 9"):
        machine.put(1, 0, first)
        machine.chain(above) if above else machine.put("self", 1)
        assert machine.ancestors(environment=environment).gone
        assert not machine.ancestors().gone  # a person may have set RANK, and left
    machine.put(1, 0, "python /bin/torchrun train.py")  # of a container
    assert not machine.ancestors(environment=environment).gone
    machine.chain({41: "/usr/lib/systemd/systemd --user"})
    assert machine.ancestors(environment=environment).gone


def test_the_end_of_the_supervisor_is_noticed(machine):
    machine.chain(DEEPSPEED)
    launch = Launch(began_seconds=0.0, grace_seconds=1.0, command="again")
    assert not machine.ancestors(launch).gone
    ended = ProcessIdentity(pid=launch.supervisor.pid, started=1)
    assert machine.ancestors(launch.model_copy(update={"supervisor": ended})).gone
    launch.end()


def test_the_kernels_process_table_can_be_read():
    run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"test-{os.getpid()}"}
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, env={**run, "RANK": "3"}, stdin=subprocess.PIPE) as child:
        assert list(stopped_ranks(run)) == []
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert list(stopped_ranks(run)) == [(3, child.pid)]
        assert list(stopped_ranks({**run, "MASTER_PORT": "1"})) == []
        assert list(stopped_ranks({})) == []
        child.kill()
    assert not Ancestors(None, environment=RANKED).gone


NONE = StopReason.NONE


def request(folder, world=None, signals=None, gone=None, **limits):
    """A request of a session that began at second 100."""
    return StopRequest(
        world or World(),
        began_seconds=100.0,
        stop_file=folder / "STOP",
        signalled=lambda: signals is not None and signals.asked,
        orphaned=lambda: bool(gone),
        **{"config": config_of(), **limits},
    )


@dataclasses.dataclass
class Spending:
    """A reporter that knows the cost, and records the warnings."""

    usd: float
    said: list[str] = dataclasses.field(default_factory=list)

    def booked(self, state):
        return dataclasses.replace(state, cost_usd=self.usd)

    def event(self, kind, text):
        assert kind == "budget_warning"
        self.said.append(text)


def budget(usd, **run):
    return config_of(cost={"budget_usd": usd}, run=run)


def test_each_stop_reason_is_reported(tmp_path):
    gone: list[bool] = []
    stop = request(tmp_path, gone=gone)
    assert not stop.agreed()
    stop.leave_if_asked()
    (tmp_path / "STOP").touch()
    assert stop.agreed() is StopReason.STOP_FILE
    assert stop.agreed().exit_code == ExitCode.INTERRUPTED
    (tmp_path / "STOP").unlink()
    stop = request(tmp_path, gone=gone)
    assert stop.agreed() is NONE
    gone.append(True)
    assert stop.agreed() is StopReason.PARENT_GONE


def test_a_signal_takes_precedence_over_a_limit(tmp_path):
    signals, now, spending = Signals(speaks=False), 0.0, cast("Any", Spending(0.0))
    limits = {"config": budget(9.0, time_limit_hours=0.5), "clock": lambda: now}

    def begun():
        return request(tmp_path, signals=signals, reporter=spending, **limits)

    stop = begun()
    for seconds, reason in ((1899.0, NONE), (1900.0, StopReason.TIME_LIMIT)):
        now = seconds
        assert stop.agreed() is reason
    assert request(tmp_path, **limits).agreed() is NONE  # before training
    spending.usd, stop = 9.0, begun()
    assert stop.agreed() is StopReason.BUDGET
    assert stop.agreed().exit_code == ExitCode.LIMIT_REACHED
    now = spending.usd = 0.0
    assert stop.agreed() is StopReason.BUDGET  # what was said stands
    signals.receive(signal.SIGTERM)
    assert [stop.agreed(), stop.agreed()] == [StopReason.SIGNAL] * 2


def test_two_ranks_agree_on_the_largest_reason(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    (tmp_path / "1" / "STOP").touch()

    def action(world):
        signals = Signals(speaks=False)
        # Rank 0 looks for the file and at the limits, rank 1 does not.
        spending = cast("Any", Spending(9.0 * world.rank))
        folder = tmp_path / str(world.rank)
        stop = request(folder, world, config=budget(9.0), reporter=spending)
        assert stop.agreed() is NONE
        stop = request(tmp_path / "1", world, signals)
        before = stop.agreed()
        if world.rank == 1:
            signals.receive(signal.SIGTERM)
        return [before, stop.agreed()]

    expected = [StopReason.STOP_FILE, StopReason.SIGNAL]
    assert results(on_two_ranks(action)) == [expected, expected]


def test_a_notice_to_any_machine_stops_all_and_is_announced_once(tmp_path, caplog):
    def action(world):
        given: list[str | None] = [None]
        stop = request(tmp_path, world)
        stop.notice = lambda: given[0]
        before = stop.agreed()
        if world.rank == 1:
            given[0] = "GCE preempts this machine"
        return [before, stop.agreed(), stop.agreed()]

    expected = [NONE, StopReason.SPOT_NOTICE, StopReason.SPOT_NOTICE]
    assert results(on_two_ranks(action)) == [expected, expected]
    assert StopReason.SPOT_NOTICE.exit_code == ExitCode.INTERRUPTED
    (said,) = caplog.messages
    assert said.startswith("Spot notice to ")
    assert said.endswith(": GCE preempts this machine. The run saves and stops.")


def test_the_budget_warns_twice_and_then_stops(tmp_path):
    def at(*dollars):
        spending = cast("Any", Spending(0.0))
        stop = request(tmp_path, config=budget(200.0), reporter=spending)
        reasons = []
        for spending.usd in dollars:
            reasons.append(stop.agreed())
        return reasons, spending.said

    reasons, said = at(0.0, 159.0, 160.0, 170.0, 189.9)
    assert reasons == [NONE] * 5
    assert [text.partition(".00,")[0] for text in said] == ["The run has cost $160"]
    assert "$160.00, 80% of cost.budget_usd=200.00" in said[0]
    reasons, said = at(170.0, 190.0, 200.0, 201.0)
    assert reasons == [NONE, NONE, StopReason.BUDGET, StopReason.BUDGET]
    assert len(said) == 2 and "95%" in said[1]
    assert len(at(192.0, 192.0)[1]) == 1  # resumed near its end
