from __future__ import annotations

import io
from pathlib import Path

import pytest
from commands.run_samples import SampleRun

from refocused.checkpoints.step.branches import checkpoint_paths
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_step, set_aside


class Terminal(io.StringIO):
    """Standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def test_the_newest_and_the_best_stay(sample_run: SampleRun) -> None:
    for step, loss in ((900, 3.0), (1000, 2.0), (8000, None), (9500, 2.5), (10000, 2.6)):
        sample_run.save(step, validation_loss=loss)
    content = sample_run.command_json("prune", "--keep", "2", "--yes")
    assert (content["removed"], content["kept"]) == ([900, 8000], [1000, 9500, 10000])
    assert content["bytes"] == 14000
    assert sample_run.local_steps() == [1000, 9500, 10000]


def test_two_stay_whatever_is_asked(sample_run: SampleRun) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    assert sample_run.command("prune", "--keep", "1", "--yes")[0] == 0
    assert sample_run.local_steps() == [20, 30]


def test_a_broken_step_does_not_count_among_those_kept(sample_run: SampleRun) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    sample_run.save(40).trainer.unlink()
    assert sample_run.command("prune", "--keep", "2", "--yes")[0] == 0
    assert sample_run.local_steps() == [20, 30, 40]


def test_what_the_mirror_lacks_is_never_removed(sample_run: SampleRun) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        saved = sample_run.save(step)
        if step in (10, 30, 40):
            sample_run.mirror(saved)
    sample_run.there(30, COMMITTED).unlink()
    again = sample_run.checkpoints / "checkpoint_step_40"
    remove_step(again)
    sample_run.save(40, seed=99, created="2026-11-28T00:00:00Z")  # the bucket has another save
    content = sample_run.command_json("prune", "--keep", "2", "--yes")
    assert (content["removed"], content["unmirrored"]) == ([10], [20, 30, 40])
    assert sample_run.local_steps() == [20, 30, 40, 50, 60]


def test_a_bucket_that_cannot_be_asked_keeps_everything(sample_run: SampleRun) -> None:
    for step in (10, 20, 30):
        sample_run.mirror(sample_run.save(step))
    sample_run.bucket.rename("away")
    code, out, err = sample_run.command("prune", "--keep", "2", "--yes")
    assert (code, out) == (1, "")
    assert "does not exist" in err
    assert sample_run.local_steps() == [10, 20, 30]


def test_a_dry_run_says_what_would_go_and_leaves_it(sample_run: SampleRun) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    code, out, _ = sample_run.command("prune", "--keep", "2", "--dry-run")
    assert code == 0
    assert out.splitlines() == [
        "would be removed: 10",
        "kept: 20, 30",
        "runs/one/checkpoints: 1 of 3 steps, 7.0 kB would be removed",
    ]
    assert sample_run.local_steps() == [10, 20, 30]


def test_without_a_terminal_nothing_goes_unless_told_so_before(
    sample_run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, _, err = sample_run.command("prune", "--keep", "2")
    assert code == 2
    assert "add --yes" in err
    assert sample_run.local_steps() == [10, 20, 30]


@pytest.mark.parametrize(("answer", "left"), [("y\n", [20, 30]), ("\n", [10, 20, 30])])
def test_on_a_terminal_it_is_asked(
    sample_run: SampleRun, monkeypatch: pytest.MonkeyPatch, answer: str, left: list[int]
) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    code, _, err = sample_run.command("prune", "--keep", "2")
    assert code == (0 if left == [20, 30] else 1)
    told = "This will remove 1 of 3 steps, 7.0 kB in runs/one/checkpoints: 10. Go on? [y/N]"
    assert told in err
    assert sample_run.local_steps() == left


def test_in_the_bucket_the_same_stay_and_what_is_on_its_way_too(sample_run: SampleRun) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        changes = {"validation_loss": 1.0} if step == 10 else {}
        tiers = ["epoch"] if step == 20 else ["rolling"]
        sample_run.mirror(sample_run.save(step, tiers=tiers, **changes), keep=step > 50)
    sample_run.there(30, COMMITTED).unlink()  # half of an upload that nobody finishes
    content = sample_run.command_json("prune", "--remote", "--keep", "2", "--yes")
    assert (content["removed"], content["kept"]) == ([30, 40], [10, 20, 50, 60])
    assert content["where"] == f"{sample_run.bucket}/one/checkpoints"
    assert not sample_run.there(40).exists()
    assert sample_run.local_steps() == [60]
    listed = sample_run.command_json("list")
    assert [step["step"] for step in listed["steps"]] == [10, 20, 50, 60]
    assert listed["bucket_bytes"] > 4 * 7000


def test_pruning_a_bucket_that_is_not_known_is_refused(sample_run: SampleRun) -> None:
    sample_run.save(10)
    code, _, err = sample_run.command("prune", "--remote", "--keep", "2", "--yes")
    assert code == 2
    assert "has no mirror. Name the bucket" in err


def test_a_disk_that_does_not_let_go_is_told(
    sample_run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30, 40):
        sample_run.save(step)
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name == "checkpoint_step_10":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    content = sample_run.command_json("prune", "--keep", "2", "--yes", code=1)
    assert (content["removed"], content["failed"]) == ([20], {"10": "Permission denied"})
    assert content["bytes"] == 7000


def test_how_many_stay_has_to_be_said(sample_run: SampleRun) -> None:
    with pytest.raises(SystemExit) as end:
        sample_run.command("prune")
    assert end.value.code == 2


def test_what_was_set_aside_is_shown_and_removed_without_counting_as_kept(
    sample_run: SampleRun,
) -> None:
    for step in (10, 20, 30):
        sample_run.save(step)
    aside = [
        set_aside(sample_run.save(40).path),
        sample_run.save(50).path.rename(
            sample_run.checkpoints / "superseded-checkpoint_step_50-ab"  # by an earlier version
        ),
    ]
    names = [path.name for path in aside]
    assert [name.partition("checkpoint")[0] for name in names] == [".bad-", "superseded-"]
    size = sum(file.stat().st_size for path in aside for file in path.rglob("*"))
    size -= sum(folder.stat().st_size for path in aside for folder in path.rglob("*/"))
    assert sample_run.command_json("list")["disk_bytes"]["aside"] == size
    code, out, _ = sample_run.command("list")
    steps = [line.split()[0] for line in out.splitlines() if line[:1].isdigit()]
    assert (code, steps) == (0, ["30", "20", "10"])
    assert " set aside (checkpoints prune removes it)" in out
    content = sample_run.command_json("prune", "--keep", "2", "--dry-run")
    step_bytes = sample_run.command_json("list")["steps"][0]["size"]
    assert (content["aside"], content["bytes"]) == (names, size + step_bytes)
    assert all(path.exists() for path in aside)
    code, out, _ = sample_run.command("prune", "--keep", "2", "--yes")
    assert code == 0 and f"removed: {names[0]}, {names[1]}" in out
    assert sample_run.local_steps() == [20, 30]
    assert not any(path.exists() for path in aside)
    again = sample_run.command_json("prune", "--keep", "2")
    assert (again["removed"], again["aside"]) == ([], [])


def test_what_was_set_aside_alone_is_asked_about(sample_run: SampleRun) -> None:
    sample_run.save(10)
    aside = set_aside(sample_run.save(20).path)
    code, _, err = sample_run.command("prune", "--keep", "2")
    assert code == 2 and f"remove 0 of 1 steps and {aside.name}" in err
    assert aside.exists()


def test_the_steps_of_a_branch_that_was_left_go_but_for_epochs(sample_run: SampleRun) -> None:
    for step in (10, 20):
        sample_run.save(step)
    sample_run.save(30)
    sample_run.save(40, tiers=["epoch"])
    sample_run.save(25, branch=2, ancestry=((1, 20),))
    content = sample_run.command_json("prune", "--keep", "9", "--yes")
    assert (content["removed"], content["aside"]) == ([], ["checkpoint_step_30"])
    assert list(checkpoint_paths(sample_run.checkpoints)) == [
        *(f"checkpoint_step_{step}" for step in (10, 20, 40)),
        "branch-2/checkpoint_step_25",
    ]
