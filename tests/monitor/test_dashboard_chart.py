from __future__ import annotations

import pytest

from refocused.monitor.screen.dashboard_chart import Curve, Point, draw_curve


def curve_of(points: list[Point], marks: tuple[Point, ...] = ()) -> Curve:
    return Curve("loss", [place for place, _ in points], [value for _, value in points], marks)


def rows(points: list[Point], marks: tuple[Point, ...] = ()) -> list[str]:
    curve = curve_of(points, marks)
    return [line.plain for line in draw_curve(curve, width=29, height=7, ascii_only=True)]


def test_a_falling_line_falls_from_corner_to_corner() -> None:
    title, *body, foot = rows([(step, 10.0 - step) for step in range(10)])
    assert title == "loss"
    stars = [[place for place, sign in enumerate(line) if sign == "*"] for line in body]
    assert all(stars)
    assert stars[0][0] == 9
    assert stars[-1][-1] == 28
    assert [line[0] for line in stars] == sorted(line[0] for line in stars)
    assert body[0].startswith("      10 ")
    assert body[-1].startswith("       1 ")
    assert foot.split() == ["0", "9"]


def test_a_level_line_is_one_row() -> None:
    _, *body, _ = rows([(0, 2.0), (50, 2.0), (100, 2.0)])
    assert [line.count("*") for line in body if "*" in line] == [20]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    points: list[Point] = [(step, None if 4 < step < 15 else 2.0) for step in range(20)]
    _, *body, _ = rows(points)
    line = next(line for line in body if "*" in line)
    assert "*     " in line.rstrip()


def test_the_first_steps_do_not_set_the_scale() -> None:
    points: list[Point] = [(step, 100.0 if step < 3 else 3.0 - step / 100) for step in range(100)]
    _, *body, _ = rows(points)
    assert body[0].split()[0] == "2.95"
    assert "*" in body[0]


def test_marks_are_there_but_do_not_hide_the_line() -> None:
    points: list[Point] = [(step, 2.0) for step in range(100)]
    _, *body, _ = rows(points, tuple((step, 2.0) for step in range(0, 100, 5)))
    line = next(line for line in body if "*" in line)
    assert line.endswith("o")
    assert 2 <= line.count("o") <= 4


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(("width", "height"), [(40, 6), (9, 3), (3, 1), (0, 0), (120, 30)])
@pytest.mark.parametrize("points", [[], [(5, 1.0)], [(5, None)], [(1, 0.0), (2, -3.0)]])
def test_no_size_and_no_values_are_too_little(
    points: list[Point], width: int, height: int, ascii_only: bool
) -> None:
    lines = draw_curve(curve_of(points), width=width, height=height, ascii_only=ascii_only)
    if height >= 3:
        assert len(lines) <= height
    assert all(line.cell_len <= max(width, 15) for line in lines)
    if ascii_only:
        assert all(line.plain.isascii() for line in lines)
