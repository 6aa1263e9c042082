import asyncio
import dataclasses
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from monitor.watched_run import ADVICE, GPU, NOW, WatchedRun, new_run
from textual.pilot import Pilot

from refocused.monitor.readings import SystemSample, as_record
from refocused.monitor.screen.live_screen import Dashboard, gauge_lines

ERROR = "Loss is not finite on rank 2 at step 1,001 (shard_0113.npz, sequences 4096-4099). Stopped."


class Watcher:
    """A dashboard without a terminal, and what happens to it."""

    def __init__(self, app: Dashboard, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def look(self) -> None:
        self.app.look()
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    @property
    def lines(self) -> list[str]:
        strips = self.app.screen._compositor.render_strips()
        return ["".join(part.text for part in strip) for strip in strips]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.lines).split())


def watch(
    story: Callable[[Watcher], Awaitable[None]],
    *runs: WatchedRun,
    size: tuple[int, int] = (80, 24),
    ascii_only: bool = False,
) -> None:
    async def session() -> None:
        readers = [run.reader() for run in runs]
        app = Dashboard(readers, interval_seconds=1000, ascii_only=ascii_only, clock=lambda: NOW)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await story(Watcher(app, pilot))

    asyncio.run(session())


def full_run(folder: Path, *, name: str = "one", notes: Sequence[str] = ()) -> WatchedRun:
    run = new_run(folder, name)
    run.begin(run=name)
    run.gpus(*(dataclasses.replace(GPU, index=index) for index in range(8)))
    run.line("events", NOW - 60, {"kind": "save", "text": "save  900 local 1.9 s", "step": 900})
    for text in notes:
        run.line("events", NOW - 5, {"kind": "note", "text": text})
    return run


@pytest.mark.parametrize(("size", "curves"), [((80, 24), "beside"), ((160, 48), "above")])
def test_everything_is_on_the_screen(tmp_path: Path, size: tuple[int, int], curves: str) -> None:
    run = full_run(tmp_path)
    run.alarm(name="gpu_throttle", critical=False)
    run.alarm(name="gpu_lost")

    async def story(watcher: Watcher) -> None:
        lines = watcher.lines
        bars = {line.split()[0]: line for line in lines if "\u2588" in line}
        assert ("GPU mem" in bars["run"]) == (size[1] < 30)
        assert all(f"{share}%" in "".join(bars.values()) for share in (50, 97, 61, 5))
        for part in (
            *("TRAINING", "step 1,000/2,000 50.0%", "1.5 s/step", "700,000 tok/s", "MFU 46.0%"),
            *("left 24.8 min", "ends ", "at risk 100 steps = 2.5 min", "save 900 local 1.9 s"),
            "ALARM 2.0 min GPU 7: gpu_lost",
        ):
            assert part in watcher.words
        assert all(any(f" {index}    97%" in line for line in lines) for index in range(8))
        assert "q quit" in lines[-1]
        speeds = next(line for line in lines if "tokens a second" in line)
        assert ("loss" in speeds) == (curves == "beside")
        assert len(lines) == size[1]
        run.metrics([1010], last=1010)
        run.state(step=1010, status="training")
        run.alarm(name="gpu_lost", raised=False)
        await watcher.look()
        assert "step 1,010/2,000" in watcher.words
        assert "ALARM" not in watcher.words
        assert "WARN" in watcher.words

    watch(story, run, size=size)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_a_full_run_keeps_its_figures_and_shows_the_history_of_each_gpu(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    run = full_run(tmp_path, notes=["word " * 40 + "end"])
    for busy in (0.05, 0.55):
        run.gpus(*(dataclasses.replace(GPU, index=i, utilization_fraction=busy) for i in range(8)))
    run.line("events", NOW - 4, {"kind": "sample", "text": "", "sample": "def f(\n  x"})
    figures = {"learning_rate": 3e-4, "gradient_norm": 0.67, "step_seconds": 1.5}
    run.line("training_metrics", NOW - 3, {"kind": "step", "step": 1000, "loss": 3.1, **figures})
    session, work = {"start_up_seconds": 19.0}, {"first_step": 0, "forward_backward_seconds": 81.0}
    run.line("performance_metrics", NOW - 100, {"kind": "session", "step": 0, **session})
    run.line("performance_metrics", NOW - 10, {"kind": "time", "step": 1000, **work})

    async def story(watcher: Watcher) -> None:
        assert "lr 3.00e-04 gnorm 0.67" in watcher.words
        assert "goodput 81.0%" in watcher.words
        rows = [line for line in watcher.lines if "\u2588\u2581\u2585" in line]  # 97, 5, 55 %
        assert len(rows) == 8
        assert "sample: def f( x" in watcher.words
        assert (watcher.words.count("word") == 40 and "end" in watcher.words) == (size[1] == 60)

    watch(story, run, size=size)


@pytest.mark.parametrize(
    ("free_gb", "text", "style"),
    [
        (900.0, "10%", "cyan"),
        (210.0, "79%", "cyan"),
        (200.0, "80%", "yellow"),
        (60.0, "94%", "yellow"),
        (50.0, "95%", "red"),
    ],
)
def test_the_bar_of_the_disk_is_what_is_taken_of_it(
    tmp_path: Path, free_gb: float, text: str, style: str
) -> None:
    system = SystemSample("node1", disk_free_gb=free_gb, disk_total_gb=1000.0)
    view = dataclasses.replace(full_run(tmp_path).view(), systems=[system], gpus=[GPU])
    [line] = gauge_lines(view, width=160, rows=1)
    assert f" {text}" in line.plain.partition(" disk ")[2].partition(" budget ")[0]
    styles = {
        str(span.style) for span in line.spans if "\u2588" in line.plain[span.start : span.end]
    }
    assert styles == {"cyan", style}  # a busy GPU is no trouble


def test_why_there_are_no_gpu_readings_stands_once(tmp_path: Path) -> None:
    run, note = new_run(tmp_path), "This machine has no NVIDIA driver."
    run.begin(run="one")
    run.line("gpu_metrics", NOW - 5, as_record(SystemSample(host="node1", gpu_note=note)))
    run.line("events", NOW - 60, {"kind": "warning", "text": note})

    async def story(watcher: Watcher) -> None:
        assert watcher.words.count(note) == 1

    watch(story, run, size=(120, 40))


@pytest.mark.parametrize("ascii_only", [False, True])
def test_long_lines_are_visibly_cut_and_markup_is_shown(tmp_path: Path, ascii_only: bool) -> None:
    mark = "..." if ascii_only else "\u2026"

    async def story(watcher: Watcher) -> None:
        lines = watcher.lines
        assert any("xxx" in line and line.rstrip().endswith(f"x{mark}") for line in lines)
        # What a run may cost is never shown by half of its digits.
        assert any("elapsed 25.2 min $20.10 of $400" in line for line in lines)
        assert "[/bold] [red]x[" in watcher.words and "\x1b" not in watcher.words

    notes = ["[/bold] [red]x[ \x1b[31m", "x" * 400]
    watch(story, full_run(tmp_path, notes=notes), size=(80, 30), ascii_only=ascii_only)


def test_why_a_run_failed_is_shown_whole(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    run.state(step=1000, status="failed", exit_code=1)
    run.line("events", NOW - 5, {"kind": "failed", "error": ERROR})

    async def story(watcher: Watcher) -> None:
        assert " ".join(line.strip() for line in watcher.lines[1:3]) == ERROR

    watch(story, run)


def test_alarms_are_whole_where_there_is_room_for_all(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    long = "the machine needs a reboot, and whoever rents it out has to do that: ask for another"
    run.alarm(name=long)

    async def story(watcher: Watcher) -> None:
        assert f"ALARM 2.0 min GPU 7: {long}" in watcher.words
        for name in ("gpu_lost", "gpu_ecc", "gpu_throttle", "gpu_power"):
            run.alarm(name=name)
        await watcher.look()
        assert sum("ALARM" in line for line in watcher.lines) == 3
        assert "and 2 more alarms (a shows all)" in watcher.words
        await watcher.pilot.resize_terminal(80, 24)
        await watcher.pilot.pause()
        assert sum("ALARM" in line for line in watcher.lines) == 1
        assert "and 4 more alarms" in watcher.words

    watch(story, run, size=(80, 30))


def test_all_alarms_are_on_a_page_with_their_advice(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    for name in ("gpu_nvlink", "gpu_lost"):
        run.alarm(name=name)
    run.alarm(name="gpu_nvlink", raised=False)

    async def story(watcher: Watcher) -> None:
        await watcher.press("a")
        times = "gpu_lost, node1 GPU 7: since Fri 15 Jan 07:58 UTC"

        assert f"ALARM 2.0 min GPU 7: gpu_lost {ADVICE} {times} ALARM" in watcher.words
        times = "Fri 15 Jan 07:58 UTC to Fri 15 Jan 07:58 UTC"
        assert f"{ADVICE} gpu_nvlink, node1 GPU 7: {times}" in watcher.words
        run.alarm(name="gpu_ecc")
        for number in range(9):
            run.alarm(name=f"disk_{number}")
        await watcher.look()  # the page shows what is new
        assert "gpu_ecc, node1" in watcher.words and "gpu_nvlink" not in watcher.words
        await watcher.press("end")
        assert "gpu_nvlink" in watcher.words

    watch(story, run)


def test_the_processes_on_the_gpus_are_named_where_they_run(tmp_path: Path) -> None:
    run, pid = full_run(tmp_path), os.getpid()
    here = dataclasses.replace(GPU, host=socket.gethostname(), processes={pid: 48.2})
    run.gpus(here, dataclasses.replace(GPU, index=1, processes={pid: None}))

    async def story(watcher: Watcher) -> None:
        await watcher.press("p")
        [row] = [line for line in watcher.lines if " 48.2 " in line]
        assert row.split()[:2] == ["0", str(pid)] and "python" in row
        [row] = [line for line in watcher.lines if line.startswith(" 1 ")]
        assert row.split() == ["1", str(pid), "-", "-", "-"]

    watch(story, run, size=(200, 24))


def test_every_key_is_explained_and_many_gpus_leave_room_for_it(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    run.gpus(*(dataclasses.replace(GPU, index=index) for index in range(16)))

    async def story(watcher: Watcher) -> None:
        assert "and 9 more GPUs" in watcher.lines[-3] and "save 900" in watcher.lines[-2]
        keys = [key.split()[0] for key in watcher.lines[-1].split("  ") if key.strip()]
        await watcher.press("question_mark")
        for key in keys:
            assert any(line.startswith(f" {key} ") for line in watcher.lines)

    watch(story, run)


def test_a_run_is_chosen_from_the_list(tmp_path: Path) -> None:
    async def story(watcher: Watcher) -> None:
        assert "first" in watcher.lines[0]
        await watcher.press("n")
        assert "second" in watcher.lines[0]
        await watcher.press("r")
        assert [" first" in line for line in watcher.lines[1:3]] == [True, False]
        await watcher.press("up", "enter")
        assert "first" in watcher.lines[0]
        await watcher.press("r")
        await watcher.press("escape")
        assert "TRAINING" in watcher.lines[0]

    watch(story, *(full_run(tmp_path, name=name) for name in ("first", "second")))


def test_the_newest_part_of_the_curves_is_a_key_away(tmp_path: Path) -> None:
    async def story(watcher: Watcher) -> None:
        for key, first in (("", "10"), ("z", "810")):
            await watcher.press(*key)
            ends = next(line for line in watcher.lines if line.rstrip().endswith("1,000"))
            assert ends.split() == [first, "1,000", first, "1,000"]

    watch(story, full_run(tmp_path))


@pytest.mark.parametrize("keys", [(), ("r",), ("a",), ("p",), ("question_mark",)])
def test_ascii_is_ascii_in_every_cell(tmp_path: Path, keys: tuple[str, ...]) -> None:
    run = full_run(tmp_path, notes=["caf\u00e9 \u26a0"])
    run.line("training_metrics", NOW, {"kind": "validation", "step": 1000, "validation_loss": 3.2})

    async def story(watcher: Watcher) -> None:
        await watcher.press(*keys)
        text = "".join(watcher.lines)
        assert text.isascii(), {sign for sign in text if not sign.isascii()}
        assert ("***" in text) == (not keys)

    watch(story, run, ascii_only=True)


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (300, 80)])
@pytest.mark.parametrize("losses", [[], [None], [3.0]])
def test_any_size_and_few_values_are_survived(
    tmp_path: Path, size: tuple[int, int], losses: list[float | None]
) -> None:
    run = new_run(tmp_path)
    for step, loss in enumerate(losses):
        run.line("training_metrics", NOW, {"kind": "step", "step": step, "loss": loss})
        run.line("training_metrics", NOW, {"kind": "validation", "step": step})

    async def story(watcher: Watcher) -> None:
        await watcher.pilot.resize_terminal(81, 25)
        await watcher.pilot.pause()
        assert "STARTING" in watcher.lines[0]
        assert watcher.words.count("no values yet") == (1 if losses == [3.0] else 2)

    watch(story, run, size=size)
