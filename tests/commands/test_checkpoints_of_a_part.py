"""The command on one of several machines, whose disk holds its part of each step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte
from checkpoints.two_machines import Machines
from commands.run_samples import SampleRun
from thread_ranks import results

from refocused.checkpoints.step.checkpoint_manifest import COMMITTED


@pytest.fixture
def machines(tmp_path: Path, sample_run: SampleRun) -> Machines:
    found = Machines(tmp_path)
    results(found.save(10))
    sample_run.folder.mkdir(parents=True, exist_ok=True)
    return found


def be_on(node: int, machines: Machines, run: SampleRun) -> Path:
    """Let the run's folder be that of one machine; return its step."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    shutil.copytree(machines.folders[node], run.checkpoints)
    return run.checkpoints / "checkpoint_step_10"


def test_a_part_is_called_one(machines: Machines, sample_run: SampleRun) -> None:
    path = be_on(1, machines, sample_run)
    code, out, _ = sample_run.command("list")
    assert code == 0
    assert out.splitlines()[1].split("   ")[3].strip() == "node 1 of 2"
    assert "incomplete: local: node 1 of 2: its part" in out
    code, out, _ = sample_run.command("verify", "all", "--deep")
    assert code == 0
    assert "checkpoint_step_10   local node 1 of 2: its part   bucket -" in out
    flip_byte(path / "zero/rank_1.pt")
    code, out, _ = sample_run.command("verify", "10", "--deep")
    assert code == 3 and "zero/rank_1.pt has CRC-32C" in out


def test_each_machine_sends_its_part_and_the_last_word_is_the_firsts(
    machines: Machines, sample_run: SampleRun
) -> None:
    sample_run.tell_of_mirror()
    for node, code in ((0, 5), (1, 5), (0, 0), (1, 0)):
        be_on(node, machines, sample_run)
        found, out, err = sample_run.command("upload", "all")
        assert (found, err) == (code, ""), out
        assert ("parts of other machines are missing: 10" in out) == (code == 5)
        assert sample_run.there(10, COMMITTED).exists() == (code == 0)
    (entry,) = sample_run.command_json("list")["steps"]
    assert (entry["local"], entry["bucket"]) == ("node 1 of 2: its part", "ok")


def test_a_download_makes_a_part_whole(machines: Machines, sample_run: SampleRun) -> None:
    sample_run.tell_of_mirror()
    for node in (0, 1, 0, 1):
        path = be_on(node, machines, sample_run)
        sample_run.command("upload", "all")
    assert sample_run.command("download", "10")[0] == 0
    assert (path / "zero/rank_0.pt").exists() and not (path / "part.json").exists()
    (entry,) = sample_run.command_json("list")["steps"]
    assert (entry["local"], entry["bucket"]) == ("ok", "ok")
