from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner
from checkpoints.step_samples import reseal
from thread_ranks import on_two_ranks, results

from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.checkpoint_manifest import RunFacts
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.data.order.position import Position
from refocused.engine.state_files import UnreadableFileError
from refocused.system.errors import CheckpointError
from refocused.system.world import World
from refocused.train.step.state import TrainState

STATE = TrainState(
    step=10,
    tokens=1234,
    position=Position(1, 6),
    loss=2.5,
    validation_loss=2.75,
    best_loss=2.75,
    best_step=10,
    seconds=9.0,
    validation_step=10,
)


def save(
    folder: Path,
    *,
    owner: FakeOwner | None = None,
    facts: RunFacts = FACTS,
    world: World | None = None,
    **changes: Any,
) -> Path:
    checkpointer = Checkpointer(folder, world=world or World(), facts=facts)
    state = dataclasses.replace(STATE, **changes)
    return checkpointer.save(owner or FakeOwner(), state.as_record(), files_done=4).step.path


def load(folder: Path, *, owner: FakeOwner | None = None, facts: RunFacts = FACTS) -> Any:
    owner = owner or FakeOwner()
    checkpointer = Checkpointer(folder, world=World(), facts=facts)
    step = read_step(folder / "checkpoint_step_10")
    exact = changes_since(step, facts=facts, world_size=1, allowed=()).way == "exact"
    record = checkpointer.load(owner, step, exact=exact)
    return TrainState.from_record(record), owner.loaded


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, owner=FakeOwner(content=b"trained"))
    assert path == tmp_path / "checkpoint_step_10"
    assert load(tmp_path) == (STATE, b"trained")


def test_the_manifest_tells_all_about_the_step_and_every_file_in_it(tmp_path: Path) -> None:
    step = read_step(save(tmp_path))
    manifest = step.manifest
    assert manifest.model_dump(exclude={"files", "created"}) == {
        "schema_version": 2,
        "run": "sample",
        "run_id": "",
        "branch": 1,
        "ancestry": (),
        "name": "checkpoint_step_10",
        "step": 10,
        "epoch": 1,
        "files_done": 4,
        "world_size": 1,
        "zero_stage": 3,
        "dtype": "bf16",
        "versions": {"torch": "2.13"},
        "tiers": ("rolling",),
        "data_fingerprint": "f00d",
        "data_order": "seed 1",
        "data_mixture": "",
        "parameters": 1000,
        "validation_loss": 2.75,
        "loss": 2.5,
        "tokens": 1234,
    }
    assert abs(manifest.created.timestamp() - time.time()) < 60
    assert set(manifest.files) == {
        *("trainer.json", "run.yaml", "model.json"),
        *("zero/rank_0.pt", "zero/notes_0.txt", "ranks/rank_00000.pt"),
    }
    assert verify(step, deep=True) == []
    assert step.run.read_text() == FACTS.run_yaml
    assert step.model.read_text() == FACTS.model_json
    assert json.loads(step.trainer.read_text()) == STATE.as_record()


def test_the_tokenizer_travels_in_the_step(tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, tokenizer_json=b"{}")
    step = read_step(save(tmp_path, facts=facts))
    assert step.tokenizer.read_bytes() == b"{}"
    assert step.manifest.files["tokenizer.json"].size == 2
    assert load(tmp_path, facts=facts)[0] == STATE


def test_a_loss_that_is_not_finite_is_saved_and_counts_as_none(tmp_path: Path) -> None:
    save(tmp_path, validation_loss=float("nan"))
    assert read_step(tmp_path / "checkpoint_step_10").manifest.validation_loss is None


def test_both_ranks_write_into_one_step(tmp_path: Path) -> None:
    def action(world: World) -> Path:
        owner = FakeOwner(world.rank, content=b"part %d" % world.rank)
        return save(tmp_path, owner=owner, world=world)

    assert results(on_two_ranks(action)) == [tmp_path / "checkpoint_step_10"] * 2
    step = read_step(tmp_path / "checkpoint_step_10")
    assert {"zero/rank_0.pt", "zero/rank_1.pt"} < set(step.manifest.files)
    assert step.manifest.world_size == 2
    assert verify(step, deep=True) == []


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_both_and_leaves_nothing(
    tmp_path: Path, failing: int
) -> None:
    def action(world: World) -> Path:
        owner = FakeOwner(world.rank, disk_is_full=world.rank == failing)
        return save(tmp_path, owner=owner, world=world)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError)
        message = str(ended.error)
        assert message.startswith("checkpoint_step_10 was not saved: No space left on device (")
        assert f"zero/rank_{failing}.pt; " in message
        assert " GB free)" in message
        assert "Make room on that disk, or lower checkpoint.keep" in message
    assert left_in(tmp_path) == []


def test_a_file_that_did_not_reach_the_disk_whole_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not saved whole: .*zero/rank_0\.pt"):
        save(tmp_path, owner=FakeOwner(tells_too_much=True))
    assert left_in(tmp_path) == []


def test_a_saved_step_is_never_rewritten(tmp_path: Path) -> None:
    save(tmp_path, owner=FakeOwner(content=b"first"))
    with pytest.raises(CheckpointError, match="checkpoint_step_10 exists already"):
        save(tmp_path, owner=FakeOwner(content=b"second"))
    assert left_in(tmp_path) == ["checkpoint_step_10"]
    assert load(tmp_path)[1] == b"first"


def test_a_save_that_will_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, world=World(), facts=FACTS)
    checkpointer.save(FakeOwner(content=b"x" * 100_000), STATE.as_record(), files_done=0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=110_000))
    later = dataclasses.replace(STATE, step=20).as_record()
    with pytest.raises(CheckpointError, match=r"_step_20 was not saved: .* lower") as told:
        checkpointer.save(FakeOwner(), later, files_done=0)
    assert str(tmp_path) in str(told.value)
    assert left_in(tmp_path) == ["checkpoint_step_10"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=130_000))
    assert checkpointer.save(FakeOwner(), later, files_done=0).step.path.exists()


def test_a_folder_that_cannot_be_made_fails_the_save_on_both_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def action(world: World) -> Path:
        return save(tmp_path / "file" / "checkpoints", owner=FakeOwner(world.rank), world=world)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert "checkpoint_step_10 was not saved: Not a directory" in str(ended.error)


def test_a_disk_that_refuses_the_clean_up_too_fails_the_save_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)

    def action(world: World) -> Path:
        owner = FakeOwner(world.rank, disk_is_full=world.rank == 1)
        return save(tmp_path, owner=owner, world=world)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError), ended.error
        assert "No space left on device" in str(ended.error)
    assert [name[:5] for name in left_in(tmp_path)] == [".tmp-"]  # the next start removes it


@pytest.mark.parametrize("in_background", [False, True])
def test_a_file_that_cannot_be_read_back_fails_the_save_on_both_ranks(
    tmp_path: Path, in_background: bool
) -> None:
    def action(world: World) -> object:
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        owner = FakeOwner(world.rank, writes_an_object=world.rank == 1)
        if not in_background:
            return checkpointer.save(owner, STATE.as_record(), files_done=0)
        checkpointer.begin(owner, STATE.as_record(), files_done=0)
        return checkpointer.finish(wait=True)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, UnreadableFileError), ended.error
        text = str(ended.error)
        assert "checkpoint_step_10 was not saved, since what rank 1 wrote cannot" in text
        assert "zero/rank_1.pt cannot be loaded: it holds pathlib" in text
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("ranks", [2, 1], ids=["exact", "resharded"])
def test_a_file_that_one_rank_cannot_load_is_named_before_any_rank_loads(
    tmp_path: Path, ranks: int
) -> None:
    shard = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    results(on_two_ranks(lambda world: save(tmp_path, owner=FakeOwner(world.rank), world=world)))
    reseal(tmp_path / "checkpoint_step_10", shard, b"no such file")
    owners = [FakeOwner(rank) for rank in range(ranks)]

    def action(world: World) -> object:
        step = read_step(tmp_path / "checkpoint_step_10")
        checkpointer = Checkpointer(tmp_path, world=world, facts=FACTS)
        return checkpointer.load(owners[world.rank], step, exact=ranks == 2)

    errors = [one.error for one in on_two_ranks(action)] if ranks == 2 else []
    if ranks == 1:
        with pytest.raises(CheckpointError) as told:
            action(World())
        errors = [told.value]
    for error in errors:
        assert isinstance(error, CheckpointError), error
        assert f"checkpoint_step_10 cannot be loaded: {shard} cannot be" in str(error)
        assert str(error).startswith("rank 1: ") is (ranks == 2)
    assert [owner.loaded for owner in owners] == [None] * ranks


def test_ranks_that_did_not_save_it_divide_a_step_anew(tmp_path: Path) -> None:
    results(on_two_ranks(lambda world: save(tmp_path, owner=FakeOwner(world.rank), world=world)))
    load(tmp_path, owner=(owner := FakeOwner()))
    assert owner.resharded_from == 2
    save(tmp_path / "alone")
    load(tmp_path / "alone", owner=(owner := FakeOwner()))
    assert owner.resharded_from is None


def test_what_is_loaded_has_to_be_of_the_manifests_step(tmp_path: Path) -> None:
    class Lost(FakeOwner):
        def load_shards(self, folder: Path) -> None:
            self.steps_made = 9

    save(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 10, and .* has made 9 updates"):
        load(tmp_path, owner=Lost())


def test_another_runs_name_or_version_does_not_matter(tmp_path: Path) -> None:
    save(tmp_path)
    facts = dataclasses.replace(FACTS, run="other", versions={"torch": "2.99"})
    assert load(tmp_path, facts=facts)[0] == STATE
