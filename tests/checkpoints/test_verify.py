from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, make_step

from refocused.checkpoints.step.step_directory import StepDirectory
from refocused.checkpoints.step.verify import FileProblem, describe, verify

SHARD = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def step(tmp_path: Path) -> StepDirectory:
    return make_step(tmp_path, 20)


def test_a_whole_step_has_no_problem(step: StepDirectory) -> None:
    assert verify(step, deep=True) == []


def test_a_flipped_byte_is_found_by_the_deep_look_only(step: StepDirectory) -> None:
    flip_byte(step.path / SHARD)
    assert verify(step, deep=False) == []
    [problem] = verify(step, deep=True)
    assert problem.file == SHARD
    assert problem.problem.startswith("has CRC-32C")


def test_a_truncated_and_an_emptied_file_are_found_by_their_size(step: StepDirectory) -> None:
    (step.path / SHARD).write_bytes((step.path / SHARD).read_bytes()[:400])
    step.trainer.write_bytes(b"")
    assert verify(step, deep=False) == [
        FileProblem("trainer.json", "has 0 bytes, not 1,000"),
        FileProblem(SHARD, "has 400 bytes, not 1,000"),
    ]


def test_a_missing_file_is_found(step: StepDirectory) -> None:
    step.path.joinpath("ranks/rank_00001.pt").unlink()
    assert verify(step, deep=False) == [FileProblem("ranks/rank_00001.pt", "is missing")]


def test_a_file_that_nobody_vouches_for_is_found_but_not_a_hidden_one(step: StepDirectory) -> None:
    ((step.path / "zero") / "zero_pp_rank_2_mp_rank_00_model_states.pt").write_bytes(b"x")
    ((step.path / "zero") / ".nfs0001").write_bytes(b"x")
    assert verify(step, deep=False) == [
        FileProblem(
            "zero/zero_pp_rank_2_mp_rank_00_model_states.pt", "is there but not in the manifest"
        )
    ]


def test_a_rank_can_verify_its_own_files(step: StepDirectory) -> None:
    flip_byte(step.path / SHARD)
    assert verify(step, deep=True, files=["trainer.json"]) == []
    assert [problem.file for problem in verify(step, deep=True, files=[SHARD])] == [SHARD]
    assert verify(step, deep=True, files=["zero/none"]) == [
        FileProblem("zero/none", "is not in the manifest")
    ]


def test_a_file_in_place_of_a_folder_is_a_missing_file(step: StepDirectory) -> None:
    for path in (step.path / "zero").iterdir():
        path.unlink()
    (step.path / "zero").rmdir()
    (step.path / "zero").write_bytes(b"")
    assert FileProblem(SHARD, "is missing") in verify(step, deep=False)


def test_problems_are_told_with_their_number() -> None:
    one = FileProblem("a", "is missing")
    assert describe([one]) == "a is missing"
    assert describe([one, one, one]) == "a is missing (and 2 more)"
