"""Under which id Weights & Biases knows a run, and what it was told of it.

A run there is a list of records that only grows. So a session that repeats steps after a crash
tells only what is new, and one that goes back on purpose, to take another way from an earlier
step, begins another run of the same group. What a run there lacks of the way to where a session
begins (a crash lost it, the network was away, nobody had asked) is told from the run's own file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from refocused.metrics.tail import as_record, whole_number
from refocused.system.atomic_files import replace_file
from refocused.system.strict_json import parse_json_object

_KINDS = ("step", "validation", "tasks", "sample", "histograms")
_LONGEST_NAME = 50  # of a run, in its id


@dataclasses.dataclass(frozen=True, slots=True)
class WandbNote:
    """What a session leaves to the next one on this disk.

    Attributes:
        id: Of the run at Weights & Biases.
        began: Step at which it was begun, or first met on this disk.
        told: The last step it was told of, by the kind of record.
    """

    id: str
    began: int
    told: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def is_told(self, kind: str, step: int) -> bool:
        """Whether a record of this kind and step is there already."""
        return step <= self.told.get(kind, -1)

    def with_told(self, kind: str, step: int) -> WandbNote:
        """Return the note after one more record."""
        return dataclasses.replace(self, told={**self.told, kind: step})


def continued(
    note: WandbNote | None,
    *,
    known: str | None,
    run: str,
    step: int,
    is_automatic: bool,
    token: str,
) -> WandbNote:
    """Decide under which id a session tells, and what of it is there already.

    Args:
        note: Of the session before on this disk; None: there was none.
        known: The id in the checkpoint that training starts from.
        run: The run's name, with which its ids begin.
        step: Where training starts.
        is_automatic: It starts from the newest step there is, and so repeats what came after; not
            from one that a person chose.
        token: Ends a new id; nobody else's.
    """
    if note is not None and is_automatic and note.began == step:
        return note  # it began here, and nothing was saved since
    name = run[:_LONGEST_NAME]
    if known is not None and known.rpartition("-")[0] == name:
        if note is None or note.id != known:
            # Another disk told it of all that comes before.
            note = WandbNote(known, step, dict.fromkeys(_KINDS, step)) if is_automatic else None
        if note is not None and (is_automatic or max(note.told.values(), default=0) <= step):
            return note
    return WandbNote(f"{name}-{token}", step)


def missing_records(lines: Iterable[bytes], note: WandbNote, *, step: int) -> list[dict[str, Any]]:
    """Return what a run there lacks of the way to a step, in the order of the steps.

    Args:
        lines: Of the run's metrics file. A record of an earlier step than the one before it begins
            another way, which takes the place of what lies beyond.
        note: What it was told.
        step: Where the way ends for now.
    """
    way: dict[tuple[int, str], dict[str, Any]] = {}
    newest = 0
    for record in map(as_record, lines):
        at = whole_number(record, "step") if record is not None else None
        if record is None or at is None or record.get("kind") not in _KINDS:
            continue
        if at < newest:
            way = {place: one for place, one in way.items() if place[0] <= at}
        newest = at
        way[at, record["kind"]] = record
    return [way[at, kind] for at, kind in sorted(way) if at <= step and not note.is_told(kind, at)]


def read_note(file: Path) -> WandbNote | None:
    """Read what `write_note` wrote; None: nothing, or nothing that can be read."""
    try:
        return WandbNote(**parse_json_object(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # then records are told twice, or under another id


def write_note(file: Path, note: WandbNote) -> None:
    """Replace the note.

    Raises:
        OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(dataclasses.asdict(note)).encode())
