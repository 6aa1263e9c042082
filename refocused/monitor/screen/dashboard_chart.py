"""Curves drawn with characters: two by four dots a character in Braille, or one star in ASCII."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

Point = tuple[float, float | None]
LABEL_WIDTH = 8
MARK_DISTANCE = 6  # characters between two marks, at least
UNSEEN_SHARE = 0.05  # of the places, the first ones: their values do not set the scale
ENOUGH_POINTS = 40  # from which on they do not
# Unicode 15, chapter 21.1: the bits of a Braille pattern's dots, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn.

    A long run has tens of thousands of points: two lists of numbers are nothing that Python's
    garbage collector would go through again and again, as it does with pairs.

    Attributes:
        title: Above it.
        places: Of its points, ascending.
        values: At these places; None leaves a gap.
        marks: Single points drawn over it, ascending by place.
        label: Spells a value beside the axis.
    """

    title: str
    places: Sequence[float]
    values: Sequence[float | None]
    marks: Sequence[Point] = ()
    label: Callable[[float], str] = "{:.4g}".format


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """Which places and values the corners of a drawing of so many dots stand for."""

    left: float
    right: float
    bottom: float
    top: float
    columns: int
    rows: int

    def column(self, place: float) -> int:
        span = self.right - self.left
        share = (place - self.left) / span if span else 0.5
        return min(self.columns - 1, int(share * self.columns))

    def row(self, value: float) -> int:
        """Return the row of a value, from the top; of one that is out of sight, the next beyond."""
        share = (self.top - value) / (self.top - self.bottom)
        return min(self.rows, max(-1, math.floor(share * self.rows)))


def draw_curve(curve: Curve, *, width: int, height: int, ascii_only: bool) -> list[Text]:
    """Return a curve as lines of so many characters, with its title, values and places.

    Values are means over what falls into one column of dots. What the first places alone reach is
    out of sight: a loss falls far in its first steps.
    """
    body, plot = height - 2, width - LABEL_WIDTH - 1
    title = Text(curve.title[:width], style="bold")
    if body < 1 or plot < 4:
        return [title]
    ends = _ends(curve)
    if ends is None:
        return [title, *[Text()] * (body - 1), Text("  no values yet", style="dim")]
    across, down = (1, 1) if ascii_only else (2, 4)
    low, high = _values_in_sight(curve, *ends)
    room = (high - low) * 0.02 or abs(high) * 0.01 or 1.0
    frame = _Frame(
        left=ends[0],
        right=ends[1],
        bottom=low - room,
        top=high + room,
        columns=plot * across,
        rows=body * down,
    )
    dots = _line_dots(frame, curve)
    rows = [
        "".join(_character(dots, row, column, ascii_only) for column in range(plot))
        for row in range(body)
    ]
    labels = {body - 1: curve.label(low), 0: curve.label(high)}
    lines = [_labelled(row, labels.get(number, "")) for number, row in enumerate(rows)]
    for row, column in _mark_cells(frame, curve.marks, across=across, down=down):
        lines[row] = _marked(lines[row], LABEL_WIDTH + 1 + column, "o" if ascii_only else "\u2022")
    first, last = f"{ends[0]:,.0f}", f"{ends[1]:,.0f}"
    foot = f"{'':{LABEL_WIDTH + 1}}{first}{last:>{max(1, plot - len(first))}}"
    return [title, *lines, Text(foot, style="dim")]


def _ends(curve: Curve) -> tuple[float, float] | None:
    """Return the first and the last place that has a value; None: there is none."""
    line = (index for index, value in enumerate(curve.values) if value is not None)
    back = (-index for index, value in enumerate(reversed(curve.values), 1) if value is not None)
    ends = [
        curve.places[index] for index in (*itertools.islice(line, 1), *itertools.islice(back, 1))
    ]
    ends += [place for place, value in curve.marks if value is not None]
    return (min(ends), max(ends)) if ends else None


def _values_in_sight(curve: Curve, left: float, right: float) -> tuple[float, float]:
    """Return the lowest and the highest value that the frame is made for."""
    marked = [value for _, value in curve.marks if value is not None]
    values = [value for value in curve.values if value is not None] + marked
    if len(values) < ENOUGH_POINTS:
        return min(values), max(values)
    begin = left + (right - left) * UNSEEN_SHARE
    late = curve.values[bisect.bisect_left(curve.places, begin) :]
    seen = [value for value in late if value is not None]
    seen += [value for place, value in curve.marks if place >= begin and value is not None]
    return min(values), max(seen)


def _mark_cells(
    frame: _Frame, marks: Sequence[Point], *, across: int, down: int
) -> list[tuple[int, int]]:
    """Return the rows and columns of the marks' characters, not too close; the last one is there.

    A mark beside another would hide the line.
    """
    cells: list[tuple[int, int]] = []
    for place, value in reversed(marks):
        row = -1 if value is None else frame.row(value)
        column = frame.column(place) // across
        if 0 <= row < frame.rows and (not cells or cells[-1][1] - column >= MARK_DISTANCE):
            cells.append((row // down, column))
    return cells


def _line_dots(frame: _Frame, curve: Curve) -> set[tuple[int, int]]:
    """Return the dots, by row and column, of a line through the mean of each column."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, float] | None = None
    for column, mean in _column_means(frame, curve):
        if mean is None:
            before = None
            continue
        start, begin = before or (column, mean)
        last_row = frame.row(begin)
        for between in range(start, column + 1):
            share = (between - start) / (column - start) if column > start else 1.0
            row = frame.row(begin + share * (mean - begin))
            step = 1 if row >= last_row else -1
            dots.update((one, between) for one in range(last_row, row + step, step))
            last_row = row
        before = column, mean
    return dots


def _column_means(frame: _Frame, curve: Curve) -> Iterator[tuple[int, float | None]]:
    """Return each column of dots that has points, and the mean of their values; None: of none.

    The columns' borders are looked for: a long run has a hundred times as many points.
    """
    begin = 0
    while begin < len(curve.places):
        column = frame.column(curve.places[begin])
        end = bisect.bisect_right(curve.places, column, lo=begin, key=frame.column)
        values = [value for value in curve.values[begin:end] if value is not None]
        yield column, math.fsum(values) / len(values) if values else None
        begin = end


def _character(dots: set[tuple[int, int]], row: int, column: int, ascii_only: bool) -> str:
    if ascii_only:
        return "*" if (row, column) in dots else " "
    bits = sum(
        _DOTS[down][across]
        for down in range(4)
        for across in range(2)
        if (4 * row + down, 2 * column + across) in dots
    )
    return chr(_BRAILLE + bits)  # also without a dot: fonts give spaces another width


def _labelled(row: str, label: str) -> Text:
    line = Text(f"{label[:LABEL_WIDTH]:>{LABEL_WIDTH}} ", style="dim")
    return line.append(row, style="not dim cyan")


def _marked(line: Text, place: int, mark: str) -> Text:
    return Text.assemble(line[:place], (mark, "not dim yellow"), line[place + 1 :])
