from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from refocused.process_identity import ProcessIdentity, this_process
from refocused.training import ancestors
from refocused.training.ancestors import Ancestors
from refocused.training.launch import Launch


def chain(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    monkeypatch.setattr(ancestors, "_launcher_chain", lambda: pids)


def launch(supervisor: ProcessIdentity) -> Launch:
    return Launch(
        folder=Path("unused"),
        host="here",
        supervisor=supervisor,
        began_seconds=0.0,
        grace_seconds=1.0,
        command="again",
    )


def test_without_a_launcher_a_parents_end_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert ancestors._launcher_chain() == ()
    family = Ancestors(None)
    assert not family.gone
    assert family.command_line == [] and family.environment == {}


def test_the_end_of_the_deepspeed_command_changes_its_launchers_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain(monkeypatch, 41, 40)
    family = Ancestors(None)
    assert not family.gone
    chain(monkeypatch, 41, 1)
    assert family.gone


def test_the_end_of_the_launcher_leaves_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    chain(monkeypatch, 41, 40)
    family = Ancestors(None)
    chain(monkeypatch)
    assert family.gone


def test_a_command_that_ended_before_the_rank_began_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain(monkeypatch, 41, 1)  # process 1 here is no deepspeed
    assert Ancestors(None).gone


def test_the_end_of_the_supervisor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain(monkeypatch, 41, 40)
    assert not Ancestors(launch(this_process())).gone
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert Ancestors(launch(ProcessIdentity(pid=child.pid, started=1))).gone


def test_what_was_typed_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command,
        env={"CUDA_VISIBLE_DEVICES": "2,3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        chain(monkeypatch, 41, child.pid)
        family = Ancestors(None)
        assert family.command_line == command
        assert family.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
        child.kill()
