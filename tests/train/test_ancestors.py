import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from refocused.system.processes import ProcessIdentity, this_process
from refocused.train.lifecycle.launch_session import Launch
from refocused.train.lifecycle.session import Ancestors, stopped_ranks

RANKED = {"RANK": "0"}
DEEPSPEED = {41: "python -u -m deepspeed.launcher.launch train.py", 40: "python /bin/deepspeed x"}


class Machine:
    """A fake of the kernel's process table, in which a test changes parents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, pid: int | str, parent: int, command: str = "", **more: str) -> None:
        place = self.folder / str(pid)
        place.mkdir(exist_ok=True)
        state = more.pop("state", "S")
        (place / "stat").write_text(f"{pid} (a (name) of 3) {state} {parent} 1 1 0 0")
        (place / "cmdline").write_text(command.replace(" ", "\0") + "\0" * bool(command))
        (place / "environ").write_text("".join(f"{name}={more[name]}\0" for name in more))

    def chain(self, commands: Mapping[int, str]) -> None:
        """This process below others, nearest first; the last one's parent is process 1."""
        pids = [*commands, 1]
        self.put("self", pids[0])
        for pid, parent in zip(commands, pids[1:], strict=False):
            self.put(pid, parent, commands[pid])

    def ancestors(
        self, launch: Launch | None = None, environment: Mapping[str, str] = RANKED
    ) -> Ancestors:
        return Ancestors(launch, environment=environment, processes=self.folder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def launch(supervisor: ProcessIdentity) -> Launch:
    return Launch(
        host="here",
        supervisor=supervisor,
        notes_file=0,
        began_seconds=0.0,
        grace_seconds=1.0,
        command="again",
        launched_seconds=0.0,
    )


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
def test_the_end_of_any_ancestor_is_noticed(
    commands: dict[int, str], environment: dict[str, str], machine: Machine
) -> None:
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
def test_a_manually_started_rank_survives_its_shell(
    commands: dict[int, str], machine: Machine
) -> None:
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


def test_a_launcher_that_exited_before_the_rank_started_is_noticed(machine: Machine) -> None:
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
def test_a_parent_that_launched_nothing_is_noticed_at_first_sight(
    own: str, above: dict[int, str], machine: Machine
) -> None:
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


def test_the_end_of_the_supervisor_is_noticed(machine: Machine) -> None:
    machine.chain(DEEPSPEED)
    assert not machine.ancestors(launch(this_process())).gone
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert machine.ancestors(launch(ProcessIdentity(pid=child.pid, started=1))).gone


def test_the_kernels_process_table_can_be_read() -> None:
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
