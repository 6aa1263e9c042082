"""The page of one or several runs: an HTML file that needs no other, with charts by uPlot."""

import dataclasses
import html
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refocused.metrics.history import StepPoint
from refocused.monitor.readings import GpuMinute
from refocused.monitor.run_status import RunView

MOST_COLUMNS = 600  # of a curve: about as many as a panel has pixels
_PLACES = ("step", "tokens", "seconds_trained", "time")  # ascending: the last of a column counts
Columns = dict[str, list[float | None]]  # of a table, by field


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport:
    """What a summary shows of a run: its figures as rows of text, and its curves."""

    view: RunView
    rows: Sequence[tuple[str, str]]  # what, and how much
    troubles: Sequence[str]  # the last warnings and failures
    samples: Sequence[tuple[int, str]] = ()  # step and text, of the first and the last
    gpus: Sequence[GpuMinute] = ()
    saved: Sequence[StepPoint] = ()  # checkpoints when they were saved
    mirrored: Sequence[StepPoint] = ()  # and when the mirror held them

    @property
    def title(self) -> str:
        """The run's name and status."""
        return f"{self.view.name}: {self.view.status}"

    @property
    def points(self) -> dict[str, Sequence[Any]]:
        """What the curves are made of."""
        steps, validations = self.view.steps, self.view.validations
        tables = {"steps": steps, "validations": validations, "gpus": self.gpus}
        return {**tables, "saved": self.saved, "mirrored": self.mirrored}

    def as_record(self) -> dict[str, Any]:
        """Return what the page embeds; times are in hours since the first one."""
        firsts = (getattr(one, "time", None) for some in self.points.values() for one in some[:1])
        began = min((time for time in firsts if time is not None), default=0.0)
        tables = {name: columns(points, began=began) for name, points in self.points.items()}
        texts = {"rows": self.rows, "troubles": self.troubles, "samples": self.samples}
        return {"name": self.view.name, "status": self.view.status, **texts, **tables}


def columns(points: Sequence[Any], *, began: float = 0.0, most: int = MOST_COLUMNS) -> Columns:
    """Return the fields of points, dataclasses of one kind, as columns of equal length.

    More than `most` points become groups of neighbours: the mean of each, and its extremes as
    `NAME_low` and `NAME_high`. Values that are unknown, not finite or no numbers are left out, as
    is a field without any other. `time` becomes hours since `began`.
    """
    size = max(1, math.ceil(len(points) / most))
    found: Columns = {}
    for name in (field.name for field in dataclasses.fields(points[0])) if points else ():
        values = [getattr(one, name) for one in points]
        numbers = [isinstance(one, int | float) and math.isfinite(one) for one in values]
        known = [
            list(itertools.compress(values[first : first + size], numbers[first : first + size]))
            for first in range(0, len(values), size)
        ]
        if name == "time":
            known = [[(value - began) / 3600 for value in group] for group in known]
        if name in _PLACES and all(known):
            found[name] = [_short(group[-1]) for group in known]
        elif name not in _PLACES and any(known):
            found[name] = [_short(statistics.fmean(group)) if group else None for group in known]
            if size > 1:
                found[f"{name}_low"] = [_short(min(one)) if one else None for one in known]
                found[f"{name}_high"] = [_short(max(one)) if one else None for one in known]
    return found


def _short(value: float) -> float:
    """Keep seven digits, and write a whole number without a point."""
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short


def page_of(reports: Sequence[RunReport], *, written: str) -> str:
    """Return the page of some runs, with their curves embedded.

    Names and text samples come from outside: JSON in a script holds no `<`, and the page shows
    text as text.
    """
    runs = json.dumps([one.as_record() for one in reports], separators=(",", ":"), allow_nan=False)
    texts = {
        "title": html.escape(", ".join(one.title for one in reports)),
        "written": html.escape(written),
        "runs": runs.replace("<", "\\u003c"),
    }
    return re.sub(
        r"\{\{([\w./]+)\}\}",
        lambda found: texts.get(found[1]) or _file(found[1]),
        _file("page.html"),
    )


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
