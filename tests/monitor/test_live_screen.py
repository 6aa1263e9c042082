from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from monitor.watched_run import GPU, NOW, WatchedRun, new_run
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Static

from refocused.monitor.screen.live_screen import CurvePlot, Dashboard

Story = Callable[[Dashboard, Pilot[None]], Awaitable[None]]


def watch(
    runs: Sequence[WatchedRun],
    story: Story,
    *,
    size: tuple[int, int] = (80, 24),
    ascii_only: bool = False,
) -> None:
    """Run a dashboard without a terminal, and what happens to it."""

    async def session() -> None:
        app = Dashboard(
            [run.reader() for run in runs],
            interval_seconds=1000,
            ascii_only=ascii_only,
            clock=lambda: NOW,
        )
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await story(app, pilot)

    asyncio.run(session())


def screen_of(app: Dashboard) -> list[str]:
    """Return the characters on the screen, line by line."""
    return [
        "".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()
    ]


def full_run(folder: Path, *, name: str = "one", alarms: bool = True) -> WatchedRun:
    run = new_run(folder, name)
    run.begin(run=name)
    run.gpus(*(dataclasses.replace(GPU, index=index) for index in range(8)))
    run.line("events", NOW - 60, {"kind": "save", "text": "save  900 local 1.9 s", "step": 900})
    if alarms:
        run.alarm(name="gpu_throttle", critical=False)
        run.alarm(name="gpu_lost")
    return run


@pytest.mark.parametrize(("size", "curves"), [((80, 24), "beside"), ((160, 48), "above")])
def test_everything_is_on_the_screen(tmp_path: Path, size: tuple[int, int], curves: str) -> None:
    async def story(app: Dashboard, _pilot: Pilot[None]) -> None:
        lines = screen_of(app)
        text = "\n".join(lines)
        for part in ("TRAINING", "step 1,000/2,000 50.0%", "1.5 s/step", "700,000 tok/s"):
            assert part in text
        for part in ("MFU 46.0%", "left 24.8 min", "ends ", "at risk 100 steps = 2.5 min"):
            assert part in text
        assert all(f" {index}    97%" in text for index in range(8))
        assert "ALARM  2.0 min  GPU 7: gpu_lost" in text
        assert "save 900 local 1.9 s" in text
        assert "q quit" in lines[-1]
        speeds = next(line for line in lines if "tokens a second" in line)
        assert ("loss" in speeds) == (curves == "beside")
        assert len(lines) == size[1]

    watch([full_run(tmp_path)], story, size=size)


def test_new_lines_appear_and_alarms_go(tmp_path: Path) -> None:
    run = full_run(tmp_path)

    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        run.metrics([1010], last=1010)
        run.state(step=1010, status="training")
        run.alarm(name="gpu_lost", raised=False)
        app.look()
        await pilot.pause()
        text = "\n".join(screen_of(app))
        assert "step 1,010/2,000" in text
        assert "ALARM" not in text
        assert "WARN" in text

    watch([run], story)


ERROR = "Loss is not finite on rank 2 at step 1,001 (shard_0113.npz, windows 4096-4099). Stopped."


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_line_that_is_too_long_says_so(tmp_path: Path, ascii_only: bool) -> None:
    run = full_run(tmp_path, alarms=False)
    run.line("events", NOW - 5, {"kind": "note", "text": "x" * 200})
    mark = "..." if ascii_only else "\u2026"

    async def story(app: Dashboard, _pilot: Pilot[None]) -> None:
        lines = screen_of(app)
        assert any("xxx" in line and line.rstrip().endswith(f"x{mark}") for line in lines)
        # What a run may cost is never shown by half of its digits.
        assert any("elapsed 25.2 min $20.10 of $400" in line for line in lines)

    watch([run], story, ascii_only=ascii_only)


def test_why_a_run_failed_is_shown_whole(tmp_path: Path) -> None:
    run = full_run(tmp_path, alarms=False)
    run.state(step=1000, status="failed", exit_code=1)
    run.line("events", NOW - 5, {"kind": "failed", "error": ERROR})

    async def story(app: Dashboard, _pilot: Pilot[None]) -> None:
        rows = [line.strip() for line in screen_of(app)[1:3]]
        assert " ".join(rows) == ERROR

    watch([run], story)


def test_alarms_are_whole_where_there_is_room_for_all(tmp_path: Path) -> None:
    run = full_run(tmp_path, alarms=False)
    long = "the machine needs a reboot, and whoever rents it out has to do that: ask for another"
    run.alarm(name=long)

    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        text = " ".join(" ".join(screen_of(app)).split())
        assert f"ALARM 2.0 min GPU 7: {long}" in text
        for name in ("gpu_lost", "gpu_ecc", "gpu_throttle"):
            run.alarm(name=name)
        app.look()
        await pilot.pause()
        lines = screen_of(app)
        assert sum("ALARM" in line for line in lines) == 3
        assert any("and 1 more" in line for line in lines)

    watch([run], story)


def test_what_has_not_changed_is_not_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = full_run(tmp_path)
    drawn: list[str | None] = []
    render = CurvePlot.render

    def draw(plot: CurvePlot) -> Text:
        drawn.append(plot.id)
        return render(plot)

    monkeypatch.setattr(CurvePlot, "render", draw)

    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        update, updated = Static.update, list[str | None]()

        def note(widget: Static, *content: Any, **options: Any) -> None:
            updated.append(widget.id)
            update(widget, *content, **options)

        monkeypatch.setattr(Static, "update", note)
        drawn.clear()
        app.look()
        await pilot.pause()
        assert (drawn, updated) == ([], [])
        run.gpus(dataclasses.replace(GPU, temperature_celsius=70))
        app.look()
        await pilot.pause()
        assert (drawn, updated) == ([], ["gpus"])
        run.metrics([1010], last=1010)
        app.look()
        await pilot.pause()
        assert sorted(filter(None, drawn)) == ["loss", "speed"]

    watch([run], story)


def test_a_run_is_chosen_from_the_list(tmp_path: Path) -> None:
    runs = [full_run(tmp_path, name=name) for name in ("first", "second")]

    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        assert "first" in screen_of(app)[0]
        await pilot.press("n")
        await pilot.pause()
        assert "second" in screen_of(app)[0]
        await pilot.press("r")
        await pilot.pause()
        assert [" first" in line for line in screen_of(app)[1:3]] == [True, False]
        await pilot.press("up", "enter")
        await pilot.pause()
        assert "first" in screen_of(app)[0]
        await pilot.press("r")
        await pilot.pause()
        await pilot.press("escape")
        await pilot.pause()
        assert "TRAINING" in screen_of(app)[0]

    watch(runs, story)


def test_the_newest_part_of_the_curves_is_a_key_away(tmp_path: Path) -> None:
    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        def places() -> list[str]:
            return next(line for line in screen_of(app) if line.rstrip().endswith("1,000")).split()

        assert places() == ["10", "1,000", "10", "1,000"]
        await pilot.press("z")
        await pilot.pause()
        assert places() == ["810", "1,000", "810", "1,000"]

    watch([full_run(tmp_path)], story)


@pytest.mark.parametrize("keys", [(), ("r",)])
def test_ascii_is_ascii_in_every_cell(tmp_path: Path, keys: tuple[str, ...]) -> None:
    run = full_run(tmp_path, name="one")
    run.line("events", NOW, {"kind": "note", "text": "caf\u00e9 \u26a0"})

    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press(*keys)
        await pilot.pause()
        text = "".join(screen_of(app))
        assert text.isascii(), {sign for sign in text if not sign.isascii()}

    watch([run], story, ascii_only=True)


def test_words_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    run.line("events", NOW, {"kind": "note", "text": "[/bold] [red]x[ \x1b[31m"})

    async def story(app: Dashboard, _pilot: Pilot[None]) -> None:
        text = "\n".join(screen_of(app))
        assert "[/bold] [red]x[" in text
        assert "\x1b" not in text

    watch([run], story)


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (300, 80)])
def test_any_size_is_survived(tmp_path: Path, size: tuple[int, int]) -> None:
    async def story(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(81, 25)
        await pilot.pause()
        assert "TRAINING" in screen_of(app)[0]

    watch([full_run(tmp_path)], story, size=size)
