"""Machines with own disks save, resume and mirror together."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
from checkpoints.fake_owner import FACTS
from checkpoints.step_samples import PREFIX, copied, flip_byte
from checkpoints.two_machines import OF_ALL, Machines, PartOwner
from thread_ranks import results

from refocused.checkpoints.mirror.copies import verify_remote
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import decide_together, select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import (
    Checkpoint,
    Part,
    in_use,
    read_checkpoint,
    saved_steps,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, CheckpointManifest
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.retention import prune
from refocused.checkpoints.step.shard_exchange import plan_deliveries, wanted_files
from refocused.checkpoints.step.staging import Staging
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import CheckpointError
from refocused.system.world import World

TEN = "checkpoint_step_10"


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


@pytest.fixture
def saved(machines: Machines) -> Machines:
    """Two machines with their parts of step 10."""
    results(machines.save(10))
    return machines


def names(machines: Machines) -> list[list[str]]:
    """Return the names in both folders, without the lock of downloads."""
    return [
        sorted(path.name for path in folder.iterdir() if path.name != ".fetch.lock")
        for folder in machines.folders
    ]


def load(machines: Machines, *, exact: bool) -> list[PartOwner]:
    def action(world: World, folder: Path) -> PartOwner:
        owner = PartOwner(world.rank)
        checkpointer = Checkpointer(folder, world=world, metadata=FACTS)
        checkpointer.load(owner, read_checkpoint(folder / TEN), exact=exact)
        return owner

    loaded = results(machines.do(action))
    assert names(machines) == [[TEN]] * 2  # no leftovers
    return loaded


def choose(
    machines: Machines, remote: RemoteCheckpoints | None, request: str = "auto"
) -> int | None:
    def action(world: World, folder: Path) -> int | None:
        def catalog() -> Catalog:
            return Catalog(folder, remote.bucket if remote else None, PREFIX)

        found = decide_together(world, catalog, lambda whole: select_checkpoint(whole, request))
        return None if found.checkpoint is None else found.checkpoint.step

    first, second = results(machines.do(action))
    assert first == second
    return first  # type: ignore[no-any-return]


def test_each_machine_has_its_part_under_the_same_manifest(saved: Machines) -> None:
    first, second = saved.part(0, 10).manifest, saved.part(1, 10).manifest
    assert first == second
    assert {name: record.node for name, record in first.files.items()} == {
        **dict.fromkeys(("model.json", "run.yaml", "trainer.json", OF_ALL), 0),
        **{f"ranks/rank_0000{node}.pt": node for node in range(2)},
        **{f"zero/notes_{node}.txt": node for node in range(2)},
        **{f"zero/rank_{node}.pt": node for node in range(2)},
    }
    for node in range(2):
        step = saved.part(node, 10)
        assert step.part == Part(node=node, nodes=2)
        assert verify(step, deep=True) == []
        assert not (step.path / f"zero/rank_{1 - node}.pt").exists()
        flip_byte(step.path / f"zero/rank_{node}.pt")
        assert [problem.file for problem in verify(step, deep=True)] == [f"zero/rank_{node}.pt"]
    assert "node" not in first.files["model.json"].model_dump_json()  # as on one machine
    (entry,) = Catalog(saved.folders[1]).entries()
    assert entry.local == "node 1 of 2: its part" and entry.sound_here and not entry.usable


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_machine_fails_the_save_on_all(machines: Machines, full: int) -> None:
    for rank in machines.save(10, full=full):
        assert isinstance(rank.error, CheckpointError)
        assert "No space left on device" in str(rank.error)
    assert names(machines) == [[], []]
    results(machines.save(10))
    assert [verify(machines.part(node, 10), deep=True) for node in range(2)] == [[], []]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_machine_that_cannot_publish_undoes_the_others(
    saved: Machines, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    publish = Staging.publish

    def fails(staging: Staging, manifest: CheckpointManifest) -> Checkpoint:
        if staging.part == Part(node=failing, nodes=2):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(staging.path))
        return publish(staging, manifest)

    monkeypatch.setattr(Staging, "publish", fails)
    for rank in saved.save(20):
        assert "checkpoint_step_20 was not saved: Input/output error" in str(rank.error)
        assert (", rank 1: " in str(rank.error)) == (failing == 1)
    assert names(saved) == [[TEN]] * 2


def test_each_rank_loads_its_own_part_and_the_shared_files(saved: Machines) -> None:
    for rank, owner in enumerate(load(saved, exact=True)):
        assert owner.loaded == f"weights of {rank}".encode()
        assert owner.resharded_from is None
        assert owner.seen == ("mp_rank_00_model_states.pt", f"notes_{rank}.txt", f"rank_{rank}.pt")
    assert not (saved.folders[1] / TEN / OF_ALL).exists()


def test_resharded_states_reach_every_machine(saved: Machines) -> None:
    for owner in load(saved, exact=False):
        assert owner.resharded_from == 2
        assert {"rank_0.pt", "rank_1.pt"} <= set(owner.seen)


def test_a_file_corrupted_in_transfer_is_rejected(saved: Machines) -> None:
    flip_byte(saved.part(0, 10).path / "zero/rank_0.pt")
    with pytest.raises(
        CheckpointError, match=r"zero/rank_0\.pt was corrupted on its way from another machine"
    ):
        load(saved, exact=False)


def test_files_come_from_a_machine_that_has_them(saved: Machines) -> None:
    held = frozenset({"a", "b"}), frozenset({"c"})
    wanted = {0: frozenset({"a", "c"}), 1: frozenset({"b", "c"})}
    assert plan_deliveries(held, wanted) == {"b": 0, "c": 1}
    with pytest.raises(CheckpointError, match="No machine has d"):
        plan_deliveries(held, {0: frozenset({"d"})})
    manifest = saved.part(0, 10).manifest
    assert "zero/rank_0.pt" not in wanted_files(manifest, [0, 1], exact=True)[1]
    for nodes in ([0, 0], [0, 1, 1]):  # ranks on other machines than before read all files
        assert wanted_files(manifest, nodes, exact=True)[0] == frozenset(manifest.files)


def test_a_checkpoint_is_complete_with_every_machines_part(machines: Machines) -> None:
    assert choose(machines, None) is None
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* to resume from"):
        choose(machines, None, "latest")  # raised on all machines
    results(machines.save(10, 20))
    assert choose(machines, None) == 20
    shutil.rmtree(machines.folders[1] / "checkpoint_step_20")
    assert choose(machines, None) == 10
    with pytest.raises(CheckpointError, match="the part of node 1 is missing"):
        choose(machines, None, "20")


def test_a_flipped_byte_on_any_machine_is_found(
    machines: Machines, remote: RemoteCheckpoints
) -> None:
    results(machines.save(10, 20))
    machines.mirror(remote, 20)
    flip_byte(machines.part(1, 20).path / "zero/rank_1.pt")
    assert choose(machines, None) == 10
    untouched = machines.part(0, 20).path.stat().st_ino
    assert choose(machines, remote) == 20
    assert machines.part(0, 20).path.stat().st_ino == untouched
    assert verify(machines.part(1, 20), deep=True) == []


def test_a_machine_with_a_lost_disk_downloads_its_part(
    saved: Machines, remote: RemoteCheckpoints
) -> None:
    saved.mirror(remote, 10)
    shutil.rmtree(saved.folders[1])
    assert choose(saved, remote) == 10
    part = saved.part(1, 10)
    assert part.part == Part(node=1, nodes=2) and verify(part, deep=True) == []
    assert not (part.path / "zero/rank_0.pt").exists()
    assert load(saved, exact=True)[1].loaded == b"weights of 1"


def test_different_saves_of_one_step_are_not_mixed(machines: Machines) -> None:
    results(machines.save(10, 20))
    other = machines.folders[1].with_name("older")
    machines.part(1, 20).path.rename(other)
    shutil.rmtree(machines.part(0, 20).path)
    results(machines.save(20))
    shutil.rmtree(machines.part(1, 20).path)
    other.rename(machines.folders[1] / "checkpoint_step_20")
    assert choose(machines, None) == 10


def test_the_marker_is_written_after_every_part(saved: Machines, remote: RemoteCheckpoints) -> None:
    first, second = saved.part(0, 10), saved.part(1, 10)
    assert not copied(remote, second)
    assert remote.objects(TEN) == {}  # node 0 removes the other copy
    assert not copied(remote, first)
    assert not copied(remote, first)
    assert COMMITTED not in remote.objects(TEN)
    assert not copied(remote, second)
    assert copied(remote, first)
    assert copied(remote, second)
    assert verify_remote(remote, TEN, deep=True) == []
    assert set(remote.objects(TEN)) - {COMMITTED, "manifest.json"} == set(first.manifest.files)


def test_parts_of_another_save_are_replaced(saved: Machines, remote: RemoteCheckpoints) -> None:
    saved.mirror(remote, 10)
    for node in range(2):
        shutil.rmtree(saved.part(node, 10).path)
    results(saved.save(10))
    remote.unmark(TEN)
    first, second = saved.part(0, 10), saved.part(1, 10)
    assert not copied(remote, second)
    assert remote.manifest(TEN) != second.manifest
    saved.mirror(remote, 10)
    assert remote.manifest(TEN) == first.manifest


def test_old_checkpoints_are_removed_from_every_disk(machines: Machines) -> None:
    results(machines.save(10, 20, 30, 40))
    (machines.part(1, 40).path / "zero/rank_1.pt").unlink()  # so the newest two are 20 and 30
    reading = contextlib.ExitStack()
    reading.enter_context(in_use(machines.part(1, 10).path))

    def action(world: World, folder: Path) -> list[str]:
        return prune(folder, world, keep=2)

    with reading:
        assert results(machines.do(action)) == [[], []]
    assert results(machines.do(action)) == [[TEN]] * 2
    assert [saved_steps(folder) for folder in machines.folders] == [[20, 30, 40]] * 2
