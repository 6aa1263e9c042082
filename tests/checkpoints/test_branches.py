"""Branches: their checkpoints, the present branch, and when a resume starts a new one."""

import json
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX, make_step, mirrored
from pytest import LogCaptureFixture

from refocused.checkpoints.mirror.lease import LEASE_FILE, Lease
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.resume_selection import select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    checkpoint_paths,
    present_branch,
    saved_steps,
)
from refocused.checkpoints.step.staging import BAD_PREFIX, checkpoints_set_aside, remove_checkpoint
from refocused.system.errors import CheckpointError
from refocused.system.processes import this_process

SECOND = {"branch": 2, "ancestry": ((1, 20),)}
Chosen = tuple[str | None, int, tuple[tuple[int, int], ...]]


def record(local: Path, branch: Branch) -> None:
    """Write `state.json` as a run on a branch does."""
    local.parent.mkdir(exist_ok=True)
    (local.parent / "state.json").write_text(json.dumps({"step": 1, **branch.as_record()}))


def chosen(catalog: Catalog, request: str = "auto") -> Chosen:
    selection = select_checkpoint(catalog, request)
    name = selection.checkpoint.name if selection.checkpoint is not None else None
    return name, selection.branch.number, selection.branch.ancestry


def test_a_branch_includes_its_ancestors_steps_up_to_the_fork() -> None:
    branch = Branch(run_id="a", number=3, ancestry=((1, 100), (2, 150)))
    assert [branch.holder(step) for step in (100, 101, 150, 151)] == [1, 2, 2, 3]
    names = ("branch-2/checkpoint_step_120", "branch-2/checkpoint_step_160", "checkpoint_step_101")
    assert [branch.step_of(name) for name in names] == [120, None, None]
    assert branch.fork(400, number=4).ancestry == ((1, 100), (2, 150), (3, 400))
    assert branch.fork(120, number=4).ancestry == ((1, 100), (2, 120))
    assert branch.fork(100, number=4).ancestry == ((1, 100),)
    assert branch.fork(None, number=4) == Branch(run_id="a", number=4)


def test_the_present_branch_is_the_recorded_one_or_the_highest(local: Path) -> None:
    assert present_branch(local) == FIRST_BRANCH
    for step in (10, 20, 30):
        make_step(local, step, run_id="a")
    make_step(local, 25, run_id="a", **SECOND)
    second = Branch(run_id="a", number=2, ancestry=((1, 20),))
    assert present_branch(local) == second
    assert saved_steps(local) == [10, 20, 25]
    record(local, Branch(run_id="a"))
    assert saved_steps(local) == [10, 20, 30]
    (local.parent / "state.json").write_text("{torn")
    assert present_branch(local) == second
    assert list(checkpoint_paths(local))[-1] == "branch-2/checkpoint_step_25"


def test_checkpoints_of_other_branches_are_listed_but_not_latest_or_best(local: Path) -> None:
    make_step(local, 20, run_id="a", validation_loss=2.0)
    make_step(local, 30, run_id="a", validation_loss=1.0)
    make_step(local, 25, run_id="a", **SECOND)
    entries = Catalog(local).entries()
    assert [(entry.name, entry.notes) for entry in entries] == [
        ("checkpoint_step_30", ("branch 1, which the run left; ignored by resume",)),
        ("checkpoint_step_20", ("best",)),
        ("branch-2/checkpoint_step_25", ("latest",)),
    ]


def lead(bucket: FaultyBucket, branch: Branch, step: int, *, token: str = "other") -> None:
    """Train a branch on another machine, and release the lease."""
    lease = Lease(bucket, PREFIX, token=token, training=this_process())
    assert lease.renew() is None
    lease.lead(lambda: (branch, step))
    lease.release()


def test_a_newer_head_elsewhere_is_followed(
    local: Path, bucket: FaultyBucket, catalog: Catalog, caplog: LogCaptureFixture
) -> None:
    """Regression: a machine with an old `state.json` went on with the branch that was left."""
    first, second = Branch(run_id="a"), Branch(run_id="a", number=2, ancestry=((1, 20),))
    for step in (10, 20, 30):
        mirrored(bucket, make_step(local, step, run_id="a"))
    record(local, first)
    lead(bucket, first, 30, token="first")
    assert chosen(catalog) == ("checkpoint_step_30", 1, ()) and not caplog.text
    lead(bucket, second, 20)  # it has saved nothing yet
    assert chosen(catalog) == ("checkpoint_step_20", 2, ((1, 20),))
    assert "following its branch 2 (from step 20) in place of this machine's branch 1" in (
        caplog.text
    )
    assert chosen(Catalog(local.parents[1] / "new", bucket, PREFIX))[1] == 2
    elsewhere = local.parents[1] / "other" / "checkpoints"
    mirrored(bucket, make_step(elsewhere, 25, run_id="a", **SECOND))
    bucket.delete(f"{PREFIX}/{LEASE_FILE}")  # as if it had never been written
    assert chosen(catalog)[0] == "branch-2/checkpoint_step_25"
    lead(bucket, second, 25, token="this")
    state = {**second.fork(10, number=3).as_record(), "lease": "this"}  # it could not write it
    (local.parent / "state.json").write_text(json.dumps(state))
    assert chosen(catalog) == ("checkpoint_step_10", 3, ((1, 10),))


def test_a_disk_that_comes_back_follows_the_machine_that_went_on_without_it(
    local: Path, bucket: FaultyBucket, catalog: Catalog, caplog: LogCaptureFixture
) -> None:
    """Regression: its own save of a step was taken for the mirror's, which is another one."""
    first = Branch(run_id="a")
    for step in (10, 20, 30, 40, 50):
        saved = make_step(local, step, run_id="a")
        if step <= 20:
            mirrored(bucket, saved)
    record(local, first)
    assert chosen(catalog) == ("checkpoint_step_50", 1, ())
    theirs = [
        mirrored(bucket, make_step(local.parents[1] / "other" / "checkpoints", step, seed=step + 1))
        for step in (30, 40)
    ]
    lead(bucket, first, 40)
    selection = select_checkpoint(catalog, "auto")
    assert selection.checkpoint is not None and selection.branch == first
    assert selection.checkpoint.manifest == theirs[-1].manifest
    assert "checkpoint_step_50: unusable: local: another machine has trained this" in caplog.text
    (replaced,) = checkpoints_set_aside(local)
    assert replaced.name.startswith(f"{BAD_PREFIX}checkpoint_step_40-"), "nothing is lost"
    # Their names are used again.
    assert selection.corrupt == tuple(local / f"checkpoint_step_{step}" for step in (50, 30))
    assert chosen(catalog, "20")[:2] == ("checkpoint_step_20", 2)


@pytest.mark.parametrize("saves", [False, True])
def test_of_two_heads_none_is_continued(
    saves: bool, local: Path, bucket: FaultyBucket, catalog: Catalog
) -> None:
    for step in (10, 20, 30):
        mirrored(bucket, make_step(local, step, run_id="a"))
    record(local, Branch(run_id="a", number=2, ancestry=((1, 10),)))
    if saves:
        elsewhere = local.parents[1] / "other" / "checkpoints"
        mirrored(bucket, make_step(elsewhere, 25, run_id="a", **SECOND))
    else:
        lead(bucket, Branch(run_id="a", number=2, ancestry=((1, 20),)), 20)
    for request in ("auto", "10", "none"):
        with pytest.raises(CheckpointError, match=r"2 \(from step 10\).*2 \(from step 20\)"):
            select_checkpoint(catalog, request)
    assert catalog.entries(), "they can be listed all the same"
    (local.parent / "state.json").unlink()
    assert chosen(catalog)[2] == ((1, 20),)


@pytest.mark.parametrize("request_", ["auto", "10", "none"])
@pytest.mark.parametrize("is_saved", [True, False])
def test_another_run_of_the_same_name_in_the_mirror_is_rejected(
    local: Path, bucket: FaultyBucket, catalog: Catalog, request_: str, is_saved: bool
) -> None:
    remove_checkpoint(mirrored(bucket, make_step(local, 30, run_id="theirs")).path)
    if is_saved:
        make_step(local, 10, run_id="mine")
    else:
        record(local, Branch(run_id="mine"))
    message = r"another run of this name \(id theirs; the run in .* is mine"
    with pytest.raises(CheckpointError, match=message):
        select_checkpoint(catalog, request_)
    assert saved_steps(local) == [10] * is_saved


def test_only_completed_checkpoints_start_a_branch(
    local: Path, bucket: FaultyBucket, catalog: Catalog
) -> None:
    for step in (10, 20):
        mirrored(bucket, make_step(local, step, run_id="a"))
    (local / "checkpoint_step_20" / "trainer.json").unlink()
    only_here = select_checkpoint(Catalog(local), "auto")  # its name is reused
    assert only_here.branch.number == 1
    assert only_here.corrupt == (local / "checkpoint_step_20",)
    remove_checkpoint(local / "checkpoint_step_20")
    there = bucket.steps / "checkpoint_step_20"
    (there / "trainer.json").unlink()
    assert chosen(catalog) == ("checkpoint_step_10", 2, ((1, 10),))
    (there / "COMMITTED").unlink()  # an upload that never finished
    assert chosen(catalog) == ("checkpoint_step_10", 1, ())


def test_steps_before_the_fork_are_never_repeated_on_the_branch(local: Path) -> None:
    """Regression: with its fork damaged, branch 2 saved step 20 in the folder of branch 1."""
    for step in (10, 20):
        make_step(local, step, run_id="a")
    record(local, Branch(run_id="a", number=2, ancestry=((1, 20),)))
    assert chosen(Catalog(local)) == ("checkpoint_step_20", 2, ((1, 20),))
    (local / "checkpoint_step_20" / "trainer.json").unlink()
    assert chosen(Catalog(local)) == ("checkpoint_step_10", 3, ((1, 10),))
    for step in (10, 20):
        remove_checkpoint(local / f"checkpoint_step_{step}")
    assert chosen(Catalog(local)) == (None, 3, ())
