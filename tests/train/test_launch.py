from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from refocused.system.processes import ProcessIdentity, this_process
from refocused.train.lifecycle.launch_session import Launch, Presence, launch_of, marked_processes


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    created = Launch.create(began_seconds=12.5, grace_seconds=30.0, command="again")
    yield created
    created.remove()


def test_ranks_read_what_the_supervisor_wrote(launch: Launch) -> None:
    assert launch_of(launch.environment) == launch
    assert launch.supervisor == this_process()
    assert launch_of({}) is None


def test_a_launch_of_another_machine_is_none(launch: Launch, tmp_path: Path) -> None:
    elsewhere = launch.model_copy(update={"host": "node-7"})
    (launch.folder / "launch.json").write_text(elsewhere.model_dump_json())
    assert launch_of(launch.environment) is None
    assert launch_of({"REFOCUSED_LAUNCH": str(tmp_path / "gone")}) is None


def test_the_supervisor_hears_what_ranks_say(launch: Launch) -> None:
    assert launch.notes() == []
    first, second = Presence(launch, 0), Presence(launch, 1)
    assert [(note.rank, note.run, note.exit_code) for note in launch.notes()] == [
        (0, None, None),
        (1, None, None),
    ]
    assert all(note.alive for note in launch.notes())
    first.report(run="runs/a", training=True)
    first.leave(130)
    second.report(reason="SIGNAL")
    one, two = launch.notes()
    assert (one.run, one.training, one.exit_code) == ("runs/a", True, 130)
    assert (two.exit_code, two.reason) == (None, "SIGNAL")


def test_a_note_that_cannot_be_written_stops_nobody(launch: Launch) -> None:
    presence = Presence(launch, 0)
    launch.remove()
    presence.report(training=True)
    presence.leave(0)


def test_ranks_clean_up_after_a_supervisor_that_was_killed(launch: Launch) -> None:
    Presence(launch, 0).leave(130)
    assert launch.folder.exists()
    orphaned = launch.model_copy(update={"supervisor": ProcessIdentity(pid=1, started=999)})
    Presence(orphaned, 0).leave(130)
    assert not launch.folder.exists()


def test_what_a_launch_left_of_which_all_was_killed_is_removed_by_the_next(launch: Launch) -> None:
    def next_start() -> None:
        Launch.create(began_seconds=13.5, grace_seconds=30.0, command="again").remove()

    presence = Presence(launch, 0)
    dead = launch.model_copy(update={"supervisor": ProcessIdentity(pid=1, started=999)})
    (launch.folder / "launch.json").write_text(dead.model_dump_json())
    next_start()
    assert launch.folder.exists()  # its rank is saving
    presence.report(process=ProcessIdentity(pid=2, started=999))
    elsewhere = dead.model_copy(update={"host": "node-7"})
    (launch.folder / "launch.json").write_text(elsewhere.model_dump_json())
    next_start()
    assert launch.folder.exists()
    (launch.folder / "launch.json").write_text(dead.model_dump_json())
    next_start()
    assert not launch.folder.exists()


def test_without_a_supervisor_notes_go_nowhere() -> None:
    Presence(None, 0).leave(0)


def test_processes_of_a_launch_are_found_by_their_environment(launch: Launch) -> None:
    environment = {**os.environ, **launch.environment}
    shell = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(60)' & wait"
    with subprocess.Popen(["sh", "-c", shell], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = marked_processes(launch.folder)
        assert process.pid in [one.pid for one in found]
        assert len(found) == 2
        for one in found:
            os.kill(one.pid, 9)
        while any(one.alive for one in found):
            time.sleep(0.01)
    assert marked_processes(launch.folder) == []
