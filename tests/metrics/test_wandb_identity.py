from __future__ import annotations

import json
from pathlib import Path

import pytest

from refocused.metrics.wandb import WandbNote, continued, missing_records, read_note, write_note

NEW = "run-2-new0"
HERE = WandbNote("run-2-abcd", 0, {"step": 17, "validation": 10})


def decide(
    note: WandbNote | None, known: str | None, *, step: int, is_automatic: bool = True
) -> WandbNote:
    return continued(
        note, known=known, run="run-2", step=step, is_automatic=is_automatic, token="new0"
    )


def test_a_first_session_gets_an_id_of_its_own() -> None:
    assert decide(None, None, step=0) == WandbNote(NEW, 0)


def test_a_resume_goes_on_under_its_id_and_knows_what_was_told() -> None:
    assert decide(HERE, "run-2-abcd", step=10) == HERE
    assert decide(HERE, "run-2-abcd", step=20) == HERE


def test_a_resume_on_another_disk_goes_on_under_the_checkpoints_id() -> None:
    note = decide(None, "run-2-abcd", step=10)
    assert (note.id, note.began) == ("run-2-abcd", 10)
    for kind in ("step", "validation", "tasks", "sample"):  # that disk told it of all before
        assert note.is_told(kind, 10)
        assert not note.is_told(kind, 11)


def test_a_crash_before_the_first_save_goes_on_too() -> None:
    assert decide(HERE, None, step=0) == HERE
    begun_later = WandbNote("run-2-efgh", 10, {"step": 12})
    assert decide(begun_later, None, step=10) == begun_later


@pytest.mark.parametrize("known", ["run-2-abcd", None])
def test_a_start_from_an_earlier_step_on_purpose_is_another_run_there(known: str | None) -> None:
    assert decide(HERE, known, step=10, is_automatic=False) == WandbNote(NEW, 10)
    assert decide(None, known, step=10, is_automatic=False) == WandbNote(NEW, 10)
    assert decide(HERE, None, step=0, is_automatic=False) == WandbNote(NEW, 0)


def test_a_step_that_a_person_names_goes_on_where_nothing_comes_after_it() -> None:
    assert decide(HERE, "run-2-abcd", step=17, is_automatic=False) == HERE
    assert decide(HERE, "run-2-abcd", step=16, is_automatic=False) == WandbNote(NEW, 16)


def test_a_checkpoint_of_another_run_does_not_bring_its_id() -> None:
    for other in ("run-abcd", "run-2-3-abcd", "other"):
        assert decide(None, other, step=10) == WandbNote(NEW, 10)


def test_a_crash_of_the_other_way_goes_on_with_it() -> None:
    other = decide(HERE, "run-2-abcd", step=10, is_automatic=False).with_told("step", 12)
    assert decide(other, "run-2-abcd", step=10) == other


def test_each_kind_of_record_is_known_by_itself() -> None:
    assert HERE.is_told("step", 17)
    assert not HERE.is_told("step", 18)
    assert not HERE.is_told("validation", 17)
    assert not HERE.is_told("sample", 0)
    assert HERE.with_told("validation", 17).is_told("validation", 17)


def lines(*records: tuple[str, object, int]) -> list[bytes]:
    return [
        json.dumps({"kind": kind, "step": step, "way": way}).encode() + b"\n"
        for kind, step, way in records
    ]


def missing(content: list[bytes], note: WandbNote, *, step: int) -> list[tuple[str, int, int]]:
    found = missing_records(content, note, step=step)
    return [(one["kind"], one["step"], one["way"]) for one in found]


def test_what_is_missing_is_the_way_taken_up_to_where_training_starts() -> None:
    content = lines(
        ("step", 1, 1),
        ("step", 2, 1),
        ("validation", 2, 1),
        ("step", 3, 1),
        ("step", 4, 1),
        ("step", 3, 2),  # went back to 2
        ("step", 4, 2),
        ("step", 5, 2),
    )
    content.insert(4, b'{"kind": "step", "st')
    way = [("step", 1, 1), ("step", 2, 1), ("validation", 2, 1), ("step", 3, 2), ("step", 4, 2)]
    assert missing(content, WandbNote("a", 0), step=4) == way
    note = WandbNote("a", 0, {"step": 3, "validation": 1})
    assert missing(content, note, step=4) == [("validation", 2, 1), ("step", 4, 2)]
    assert missing(content, WandbNote("a", 0, {"step": 4, "validation": 4}), step=4) == []


def test_a_way_that_has_not_come_as_far_yet_ends_where_it_is() -> None:
    content = lines(("step", 2, 1), ("step", 4, 1), ("step", 6, 1), ("step", 4, 2))
    assert missing(content, WandbNote("a", 0), step=6) == [("step", 2, 1), ("step", 4, 2)]


def test_lines_that_are_of_no_step_are_passed_over() -> None:
    content = [*lines(("alarm", 1, 1), ("step", None, 1), ("step", True, 1)), b"[1]\n", b"\xff\n"]
    assert missing(content, WandbNote("a", 0), step=6) == []


def test_a_note_survives_and_a_torn_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "wandb" / "note.json"
    assert read_note(file) is None
    write_note(file, HERE)
    assert read_note(file) == HERE
    for torn in (b"", b"[]", b'{"id": "x"}', b'{"id": "x", "began": 1, "more": 2}', b"\xff"):
        file.write_bytes(torn)
        assert read_note(file) is None


def test_the_id_of_a_run_with_a_long_name_is_known_again() -> None:
    name = "n" * 100
    first = continued(None, known=None, run=name, step=0, is_automatic=True, token="aaaa")
    again = continued(None, known=first.id, run=name, step=5, is_automatic=True, token="bbbb")
    assert (len(first.id), again.id) == (55, first.id)
