"""One step on the disk: its manifest and names, how it is created, read, verified and removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pydantic
import pytest
from checkpoints.step_samples import commit, fill, flip_byte, make_step, manifest_for

from refocused.checkpoints.step.branches import step_paths
from refocused.checkpoints.step.checkpoint_manifest import CheckpointManifest, parse_manifest
from refocused.checkpoints.step.staging import Staging, clean_leftovers, leftovers, remove_step
from refocused.checkpoints.step.step_directory import (
    StepDirectory,
    name_of,
    parse_name,
    rank_file,
    read_step,
)
from refocused.checkpoints.step.verify import FileProblem, describe, verify
from refocused.system.errors import CheckpointError
from refocused.system.locks import FileLock

SHARD = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def fields(step: StepDirectory) -> dict[str, object]:
    return dict(json.loads(step.manifest.to_json()))


def parsed(fields: dict[str, object]) -> CheckpointManifest:
    return parse_manifest(json.dumps(fields).encode(), where="here/manifest.json")


def test_a_manifest_survives_its_own_json(step: StepDirectory) -> None:
    manifest = step.manifest
    assert parse_manifest(manifest.to_json(), where="x") == manifest
    assert (manifest.total_bytes, manifest.alias) == (7000, "checkpoint-epoch0-step10-files1")


def test_a_manifest_without_labels_is_of_a_rolling_save(fields: dict[str, object]) -> None:
    del fields["tiers"]
    assert parsed(fields).tiers == ("rolling",)


def test_a_loss_that_is_not_finite_is_read_back_as_unknown(tmp_path: Path) -> None:
    manifest = make_step(tmp_path, 1, loss=float("nan"), validation_loss=float("inf")).manifest
    again = parse_manifest(manifest.to_json(), where="x")
    assert (again.loss, again.validation_loss) == (None, None)


def test_torn_json_is_named_with_its_length() -> None:
    with pytest.raises(CheckpointError, match=r"here is not whole JSON \(14 bytes"):
        parse_manifest(b'{"step": 12, "', where="here")


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"schema_version": 3}'])
def test_another_schema_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="this program reads 1 and 2"):
        parse_manifest(content, where="here")


OUTSIDE = [{name: {"size": 1, "crc32c": 1}} for name in ("../x", "/etc/x", "zero/../../x", "a\\b")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"tokens": None}, "tokens: Input should be a valid integer"),
        ({"tiers": ["hourly"]}, r"tiers\.0: .*rolling.*found 'hourly'"),
        *(({"files": files}, "outside its folder") for files in OUTSIDE),
    ],
)
def test_a_wrong_field_is_named(
    fields: dict[str, object], change: dict[str, object], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        parsed(fields | change)


def test_a_missing_field_is_named(fields: dict[str, object]) -> None:
    del fields["tokens"]
    with pytest.raises(CheckpointError, match="tokens: Field required"):
        parsed(fields)


def test_a_time_without_a_zone_is_refused_by_the_writer(tmp_path: Path) -> None:
    with pytest.raises(pydantic.ValidationError, match="created"):
        make_step(tmp_path, 1, created="2026-11-21T08:00:00")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (name_of(123), 123),
        ("checkpoint-epoch0-step10000-files2", 10000),
        ("final_checkpoint_step_100", 100),
        ("rolling_step_010000", 10000),
        ("checkpoint_step_0", 0),
        ("checkpoint-step1250", None),
        ("checkpoint_step_5x", None),
        (".tmp-checkpoint_step_5-ab", None),
        ("checkpoint_step_-5", None),
    ],
)
def test_both_forms_of_a_name_are_read_and_no_other(name: str, step: int | None) -> None:
    assert parse_name(name) == step


def test_steps_are_in_numeric_order_and_nothing_else_is_listed(tmp_path: Path) -> None:
    for step in (10000, 9500, 20):
        make_step(tmp_path, step)
    (tmp_path / ".tmp-checkpoint_step_7-ab").mkdir()
    (tmp_path / "checkpoint_step_007").mkdir()
    (tmp_path / "checkpoint_step_8").write_text("a file")
    assert [path.name for path in step_paths(tmp_path).values()] == [
        "checkpoint_step_20",
        "checkpoint_step_9500",
        "checkpoint_step_10000",
    ]
    assert step_paths(tmp_path / "none") == {}


def test_a_step_is_read_with_the_paths_of_its_parts(step: StepDirectory) -> None:
    again = read_step(step.path)
    assert (again, again.step) == (step, 10)
    assert all(
        path.is_file()
        for path in (step.path / "trainer.json", step.path / "run.yaml", step.path / "model.json")
    )


def test_a_copied_directory_of_another_name_is_read(step: StepDirectory, tmp_path: Path) -> None:
    assert read_step(step.path.rename(tmp_path / "kept")).step == 10


DAMAGED: dict[str, Callable[[Path], object]] = {
    "is of step 10, not of the step": lambda path: path.rename(path.with_name(name_of(30))),
    r"manifest\.json is missing": lambda path: (path / "manifest.json").unlink(),
    "checkpoint_step_10 is not a directory": remove_step,
    r"manifest\.json has CRC-32C 00000000": lambda path: (path / "manifest.json").write_bytes(b""),
    "COMMITTED is missing": lambda path: (path / "COMMITTED").unlink(),
    r"manifest\.json is not whole JSON \(0 bytes": lambda path: (
        (path / "COMMITTED").unlink(),
        (path / "manifest.json").write_bytes(b""),
    ),
}


@pytest.mark.parametrize(("problem", "damage"), DAMAGED.items(), ids=DAMAGED)
def test_a_step_that_is_none_is_refused_with_the_reason(
    step: StepDirectory, problem: str, damage: Callable[[Path], object]
) -> None:
    path = damage(step.path)
    with pytest.raises(CheckpointError, match=problem):
        read_step(path if isinstance(path, Path) else step.path)


def test_a_step_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name=name_of(5), token="ab")
    staging.create()
    fill(staging.path, seed=5)
    assert step_paths(tmp_path) == {}
    assert commit(staging, manifest_for(staging.path, 5)) == read_step(tmp_path / name_of(5))
    assert [path.name for path in tmp_path.iterdir()] == [name_of(5)]


def test_an_existing_step_is_never_rewritten(step: StepDirectory) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        make_step(step.path.parent, 10, seed=99, token="other")
    assert verify(step, deep=True) == []


@pytest.mark.parametrize(
    ("ranks", "lost", "problem"),
    [
        (2, rank_file(1), r"Step 5 was not saved whole: ranks/rank_00001\.pt is missing"),
        (3, "none", r"ranks/rank_00002\.pt is not in the manifest"),
    ],
)
def test_a_save_that_lacks_a_file_is_not_committed(
    tmp_path: Path, ranks: int, lost: str, problem: str
) -> None:
    staging = Staging(tmp_path, name=name_of(5), token="ab")
    staging.create()
    fill(staging.path, seed=5)
    manifest = manifest_for(staging.path, 5, world_size=ranks)
    (staging.path / lost).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=problem):
        commit(staging, manifest)
    assert step_paths(tmp_path) == {}
    staging.discard()
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_but_for_those_of_a_download_that_goes_on(tmp_path: Path) -> None:
    save, download, removal = (
        tmp_path / name
        for name in (".tmp-checkpoint_step_1-a", ".tmp-checkpoint_step_2-fetch", ".del-x")
    )
    for folder in (save, download, removal):
        (folder / "zero").mkdir(parents=True)
    step = make_step(tmp_path, 3).path
    assert leftovers(tmp_path) == [removal, save, download]
    lock = FileLock(tmp_path / ".fetch.lock")
    assert lock.acquire()
    assert clean_leftovers(tmp_path) == [removal, save]
    lock.release()
    assert clean_leftovers(tmp_path) == [download]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [step]


def test_a_flipped_byte_is_found_by_the_deep_look_only(step: StepDirectory) -> None:
    assert verify(step, deep=True) == []
    flip_byte(step.path / SHARD)
    assert verify(step, deep=False) == []
    [problem] = verify(step, deep=True)
    assert problem.file == SHARD
    assert problem.problem.startswith("has CRC-32C")


def folder_to_file(path: Path) -> None:
    path.unlink()
    for sibling in path.parent.iterdir():
        sibling.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("trainer.json", lambda path: path.write_bytes(b""), "has 0 bytes, not 1,000"),
        (SHARD, lambda path: path.write_bytes(b"x" * 400), "has 400 bytes, not 1,000"),
        (rank_file(1), Path.unlink, "is missing"),
        (SHARD, folder_to_file, "is missing"),
        ("zero/stray.pt", Path.touch, "is there but not in the manifest"),
    ],
)
def test_what_a_listing_shows_is_found_without_reading(
    step: StepDirectory, file: str, damage: Callable[[Path], object], problem: str
) -> None:
    (step.path / "zero" / ".nfs0001").touch()  # a hidden file does no harm
    damage(step.path / file)
    found = verify(step, deep=False)
    assert FileProblem(file, problem) in found
    assert not any(one.file.endswith(".nfs0001") for one in found)


def test_a_rank_can_verify_its_own_files(step: StepDirectory) -> None:
    flip_byte(step.path / SHARD)
    assert verify(step, deep=True, files=["trainer.json"]) == []
    assert [problem.file for problem in verify(step, deep=True, files=[SHARD])] == [SHARD]
    assert verify(step, deep=True, files=["zero/none"]) == [
        FileProblem("zero/none", "is not in the manifest")
    ]


def test_problems_are_described_with_their_number() -> None:
    one = FileProblem("a", "is missing")
    assert describe([one]) == "a is missing"
    assert describe([one, one, one]) == "a is missing (and 2 more)"
