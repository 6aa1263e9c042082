from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import make_readable_step, make_step

from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.comparison import (
    Difference,
    LossChange,
    StepContents,
    compare,
    differences,
    dotted,
    read_contents,
)
from refocused.system.errors import CheckpointError


def contents(checkpoints: Path, step: int) -> StepContents:
    catalog = Catalog(checkpoints)
    return read_contents(catalog, catalog.find(str(step), catalog.entries()))


def test_nested_settings_get_dotted_names() -> None:
    settings = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "data": {"mixture": {}}}
    assert dotted(settings) == {
        "optimizer.lr": 0.1,
        "optimizer.betas": [0.9, 0.95],
        "data.mixture": {},
    }


def test_only_what_differs_is_told_and_who_has_it() -> None:
    a = {"same": 1, "changed": 2, "gone": None}
    b = {"new": 4, "same": 1, "changed": 3}
    assert differences(a, b) == [
        Difference("changed", 2, 3),
        Difference("gone", None, None, only_in="a"),
        Difference("new", None, 4, only_in="b"),
    ]


def test_two_steps_are_put_side_by_side(tmp_path: Path) -> None:
    slow = {"optimizer": {"lr": 0.0003, "clip": 1.0}}
    fast = {"optimizer": {"lr": 0.0006, "clip": 1.0}}
    make_readable_step(tmp_path, 10, settings=slow, loss=3.0, seconds=60.0)
    make_readable_step(tmp_path, 20, settings=fast, loss=2.5, validation_loss=2.75)
    comparison = compare(contents(tmp_path, 10), contents(tmp_path, 20))
    assert comparison.settings == [Difference("optimizer.lr", 0.0003, 0.0006)]
    facts = {fact.name: (fact.a, fact.b) for fact in comparison.facts}
    assert facts["step"] == (10, 20)
    assert facts["tokens"] == (10240, 20480)
    assert facts["seconds"] == (60.0, 90.0)
    assert not facts.keys() & {"world_size", "versions.deepspeed", "files", "name", "loss"}
    assert comparison.losses[:2] == [
        LossChange("loss", 3.0, 2.5, -0.5),
        LossChange("validation_loss", None, 2.75, None),
    ]


def test_a_step_does_not_differ_from_itself(tmp_path: Path) -> None:
    make_readable_step(tmp_path, 10)
    comparison = compare(contents(tmp_path, 10), contents(tmp_path, 10))
    assert (comparison.facts, comparison.settings) == ([], [])


def test_a_broken_step_has_no_contents(tmp_path: Path) -> None:
    make_step(tmp_path, 10).model.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: incomplete: local: model\.json"):
        contents(tmp_path, 10)
