"""Curves drawn with characters: two by four dots a character in Braille, or one star in ASCII."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

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

    Attributes:
        title: Above it.
        points: Places and values, ascending by place; a value None leaves a gap.
        marks: Single points drawn over it.
        label: Spells a value beside the axis.
    """

    title: str
    points: Sequence[Point]
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
    places = [place for place, value in (*curve.points, *curve.marks) if value is not None]
    if body < 1 or plot < 4:
        return [title]
    if not places:
        return [title, *[Text()] * (body - 1), Text("  no values yet", style="dim")]
    across, down = (1, 1) if ascii_only else (2, 4)
    low, high = _values_in_sight(curve, min(places), max(places))
    room = (high - low) * 0.02 or abs(high) * 0.01 or 1.0
    frame = _Frame(
        left=min(places),
        right=max(places),
        bottom=low - room,
        top=high + room,
        columns=plot * across,
        rows=body * down,
    )
    dots = _line_dots(frame, curve.points)
    rows = [
        "".join(_character(dots, row, column, ascii_only) for column in range(plot))
        for row in range(body)
    ]
    labels = {body - 1: curve.label(low), 0: curve.label(high)}
    lines = [_labelled(row, labels.get(number, "")) for number, row in enumerate(rows)]
    for row, column in _mark_cells(frame, curve.marks, across=across, down=down):
        lines[row] = _marked(lines[row], LABEL_WIDTH + 1 + column, "o" if ascii_only else "\u2022")
    ends = f"{min(places):,.0f}", f"{max(places):,.0f}"
    foot = f"{'':{LABEL_WIDTH + 1}}{ends[0]}{ends[1]:>{max(1, plot - len(ends[0]))}}"
    return [title, *lines, Text(foot, style="dim")]


def _values_in_sight(curve: Curve, left: float, right: float) -> tuple[float, float]:
    """Return the lowest and the highest value that the frame is made for."""
    pairs = [pair for pair in (*curve.points, *curve.marks) if pair[1] is not None]
    begin = left + (right - left) * UNSEEN_SHARE if len(pairs) >= ENOUGH_POINTS else left
    seen = [value for place, value in pairs if place >= begin and value is not None]
    low = min(value for _, value in pairs if value is not None)
    return min(low, *seen), max(seen)


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


def _line_dots(frame: _Frame, points: Sequence[Point]) -> set[tuple[int, int]]:
    """Return the dots, by row and column, of a line through the mean of each column."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, float] | None = None
    for column, group in itertools.groupby(points, key=lambda point: frame.column(point[0])):
        values = [value for _, value in group if value is not None]
        if not values:
            before = None
            continue
        mean = math.fsum(values) / len(values)
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
