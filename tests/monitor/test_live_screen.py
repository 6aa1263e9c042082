"""The live screen without a terminal: what it shows, its keys, and how it fits any size."""

import asyncio
import dataclasses
import json
import os
import socket

import pytest
from monitor.watched_run import ADVICE, GPU, NOW, new_run

from refocused.monitor.readings import SystemSample, as_record
from refocused.monitor.screen.live_screen import Dashboard, gauge_lines

ERROR = "Loss is not finite on rank 2 at step 1,001 (shard_0113.npz, sequences 4096-4099). Stopped."


class Watcher:
    """A dashboard without a terminal, and what happens to it."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    async def look(self):
        self.app.look()
        await self.pilot.pause()

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def resize(self, width, height):
        await self.pilot.resize_terminal(width, height)
        await self.pilot.pause()

    @property
    def lines(self):
        strips = self.app.screen._compositor.render_strips()
        return ["".join(part.text for part in strip) for strip in strips]

    @property
    def words(self):
        return " ".join(" ".join(self.lines).split())


def watch(story, *runs, size=(80, 24), ascii_only=False):
    async def session():
        readers = [run.reader() for run in runs]
        app = Dashboard(readers, interval_seconds=1000, ascii_only=ascii_only, clock=lambda: NOW)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await story(Watcher(app, pilot))

    asyncio.run(session())


def full_run(folder, *, name="one", notes=()):
    run = new_run(folder, name)
    run.begin(run=name)
    for busy in (0.97, 0.05, 0.55):
        sample = dataclasses.replace(GPU, utilization_fraction=busy)
        run.gpus(*(dataclasses.replace(sample, index=index) for index in range(8)))
    run.line("events", NOW - 60, {"kind": "save", "text": "save  900 local 1.9 s", "step": 900})
    for text in notes:
        run.line("events", NOW - 5, {"kind": "note", "text": text})
    return run


@pytest.mark.parametrize(("size", "curves"), [((80, 24), "beside"), ((200, 60), "above")])
def test_everything_is_on_the_screen_and_follows_the_files(tmp_path, size, curves):
    run, is_tall = full_run(tmp_path, notes=["word " * 40 + "end"]), size[1] >= 30
    run.alarm(name="gpu_throttle", critical=False)
    run.alarm(name="gpu_lost")
    figures = {"learning_rate": 3e-4, "gradient_norm": 0.67, "step_seconds": 1.5, "loss": 3.1}
    figures |= {"tokens_per_second": 7e5, "mfu_fraction": 0.46, "seconds_left": 1500.0}
    run.line("training_metrics", NOW - 3, {"kind": "step", "step": 1000, **figures})
    session, work = {"start_up_seconds": 19.0}, {"first_step": 0, "forward_backward_seconds": 81.0}
    run.line("performance_metrics", NOW - 100, {"kind": "session", "step": 0, **session})
    run.line("performance_metrics", NOW - 10, {"kind": "time", "step": 1000, **work})
    run.line("events", NOW - 4, {"kind": "sample", "text": "", "sample": "def f(\n  x"})

    async def story(watcher):
        lines = watcher.lines
        bars = {line.split()[0]: line for line in lines if "\u2588" in line and "%" in line}
        assert ("GPU mem" in bars["run"]) == (not is_tall)
        assert all(f"{share}%" in "".join(bars.values()) for share in (50, 55, 61, 5))
        for part in (
            *("TRAINING", "step 1,000/2,000 50.0%", "1.5 s/step", "700,000 tok/s", "MFU 46.0%"),
            *("left 24.8 min", "ends ", "at risk 100 steps = 2.5 min", "sample: def f( x"),
            *("lr 3.00e-04 gnorm 0.67", "goodput 81.0%", "ALARM 2.0 min GPU 7: gpu_lost"),
        ):
            assert part in watcher.words
        assert all(any(f" {index}    55%" in line for line in lines) for index in range(8))
        assert sum("\u2588\u2581\u2585" in line for line in lines) == 8  # 97, 5, 55 %
        is_whole = watcher.words.count("word") == 40 and "end" in watcher.words
        assert (is_whole, "save 900 local 1.9 s" in watcher.words) == (is_tall, is_tall)
        assert "q quit" in lines[-1] and len(lines) == size[1]
        speeds = next(line for line in lines if "tokens a second" in line)
        assert ("loss" in speeds) == (curves == "beside")
        run.metrics([1010], last=1010)
        run.state(step=1010, status="training")
        run.alarm(name="gpu_lost", raised=False)
        await watcher.look()
        assert "step 1,010/2,000" in watcher.words
        assert "ALARM" not in watcher.words and "WARN" in watcher.words

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
def test_the_bar_of_the_disk_is_what_is_taken_of_it(tmp_path, free_gb, text, style):
    system = SystemSample("node1", disk_free_gb=free_gb, disk_total_gb=1000.0)
    view = dataclasses.replace(full_run(tmp_path).view(), systems=[system], gpus=[GPU])
    [line] = gauge_lines(view, width=160, rows=1)
    assert f" {text}" in line.plain.partition(" disk ")[2].partition(" budget ")[0]
    styles = {
        str(span.style) for span in line.spans if "\u2588" in line.plain[span.start : span.end]
    }
    assert styles == {"cyan", style}  # a busy GPU is no trouble


def test_the_keys_open_what_the_help_says(tmp_path):
    run, pid = full_run(tmp_path, name="first"), os.getpid()
    here = dataclasses.replace(GPU, host=socket.gethostname(), processes={pid: 48.2})
    for name in ("gpu_nvlink", "gpu_lost"):
        run.alarm(name=name)
    run.alarm(name="gpu_nvlink", raised=False)

    async def story(watcher):
        keys = [key.split()[0] for key in watcher.lines[-1].split("  ") if key.strip()]
        await watcher.press("question_mark")
        for key in keys:
            assert any(line.startswith(f" {key} ") for line in watcher.lines)
        await watcher.press("escape", "a")
        at = "Fri 15 Jan 07:58 UTC"
        since = f"ALARM 2.0 min GPU 7: gpu_lost {ADVICE} gpu_lost, node1 GPU 7: since {at} ALARM"
        assert since in watcher.words
        assert f"{ADVICE} gpu_nvlink, node1 GPU 7: {at} to {at}" in watcher.words
        run.alarm(name="gpu_ecc")
        for number in range(40):
            run.alarm(name=f"disk_{number}")
        await watcher.look()  # the page shows what is new
        assert "gpu_ecc, node1" in watcher.words and "gpu_nvlink" not in watcher.words
        await watcher.press("end")
        assert "gpu_nvlink" in watcher.words
        run.gpus(here, dataclasses.replace(GPU, index=1, processes={pid: None}))
        await watcher.look()
        await watcher.press("escape", "p")
        [row] = [line for line in watcher.lines if " 48.2 " in line]
        assert row.split()[:2] == ["0", str(pid)] and "python" in row
        [row] = [line for line in watcher.lines if line.startswith(" 1 ")]
        assert row.split() == ["1", str(pid), "-", "-", "-"]  # of another machine
        await watcher.press("escape", "n")
        assert "second" in watcher.lines[0]
        for key, first in (("", "10"), ("z", "810")):
            await watcher.press(*key)
            ends = next(line for line in watcher.lines if line.rstrip().endswith("1,000"))
            assert ends.split() == [first, "1,000", first, "1,000"]
        await watcher.press("r")
        assert [" first" in line for line in watcher.lines[1:3]] == [True, False]
        await watcher.press("up", "enter")
        assert "first" in watcher.lines[0]
        await watcher.press("r", "escape")
        assert "TRAINING" in watcher.lines[0]

    watch(story, run, full_run(tmp_path, name="second"), size=(120, 40))


@pytest.mark.parametrize(
    ("size", "name"), [((120, 40), "curve"), ((80, 24), "curve"), ((80, 24), "reason")]
)
def test_the_expected_loss_is_drawn_ahead_of_the_run(tmp_path, size, name):
    run = new_run(tmp_path)
    for step in range(10, 1001, 10):
        loss = {"loss": 3.0 + 100 / step, "tokens": step * 1_000_000, "total_steps": 2000}
        run.line("training_metrics", NOW - 10, {"kind": "step", "step": step, **loss})
    run.state(step=1000, status="training")
    curve = [[step * 1_000_000, 3.0 + 100 / step] for step in range(500, 2001, 20)]
    record = {"curve": curve} if name == "curve" else {"reason": "bytes"}
    (run.folder / "expected_loss.json").write_text(json.dumps(record))

    async def story(watcher):
        is_drawn = name == "curve"
        for key, first, last in (("", "10", "1,495"), ("z", "810", "1,095")):
            await watcher.press(*key)
            assert ("loss, val dots, expected green" in watcher.words) == is_drawn
            ends = next(line for line in watcher.lines if line.split()[:1] == [first])
            assert ends.split()[1] == (last if is_drawn else "1,000")

    watch(story, run, size=size)


def test_a_screen_without_room_says_what_is_left_out(tmp_path):
    run = full_run(tmp_path)
    run.gpus(*(dataclasses.replace(GPU, index=index) for index in range(16)))
    long = "the machine needs a reboot, and whoever rents it out has to do that: ask for another"

    async def story(watcher):
        assert "and 9 more GPUs" in watcher.lines[-3] and "save 900" in watcher.lines[-2]
        await watcher.resize(80, 30)
        run.alarm(name=long)
        await watcher.look()
        assert f"ALARM 2.0 min GPU 7: {long}" in watcher.words  # whole where there is room
        for name in ("gpu_lost", "gpu_ecc", "gpu_throttle", "gpu_power"):
            run.alarm(name=name)
        await watcher.look()
        assert sum("ALARM" in line for line in watcher.lines) == 3
        assert "and 2 more alarms (a shows all)" in watcher.words
        await watcher.resize(80, 24)
        assert sum("ALARM" in line for line in watcher.lines) == 1
        assert "and 4 more alarms" in watcher.words

    watch(story, run)


def test_why_a_run_failed_is_shown_whole_and_why_there_are_no_gpus_once(tmp_path):
    run, note = new_run(tmp_path), "This machine has no NVIDIA driver."
    run.begin(run="one", status="failed", exit_code=1)
    run.line("events", NOW - 5, {"kind": "failed", "error": ERROR})
    run.line("gpu_metrics", NOW - 5, as_record(SystemSample(host="node1", gpu_note=note)))
    run.line("events", NOW - 60, {"kind": "warning", "text": note})

    async def story(watcher):
        assert " ".join(line.strip() for line in watcher.lines[1:3]) == ERROR
        assert watcher.words.count(note) == 1

    watch(story, run)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_long_lines_are_visibly_cut_and_markup_is_shown(tmp_path, ascii_only):
    mark = "..." if ascii_only else "\u2026"

    async def story(watcher):
        lines = watcher.lines
        assert any("xxx" in line and line.rstrip().endswith(f"x{mark}") for line in lines)
        # What a run may cost is never shown by half of its digits.
        assert any("elapsed 25.2 min $20.10 of $400" in line for line in lines)
        assert "[/bold] [red]x[" in watcher.words and "\x1b" not in watcher.words

    notes = ["[/bold] [red]x[ \x1b[31m", "x" * 400]
    watch(story, full_run(tmp_path, notes=notes), size=(80, 30), ascii_only=ascii_only)


def test_ascii_is_ascii_in_every_cell(tmp_path):
    run = full_run(tmp_path, notes=["caf\u00e9 \u26a0"])
    run.line("training_metrics", NOW, {"kind": "validation", "step": 1000, "validation_loss": 3.2})

    async def story(watcher):
        for key in ("", "r", "a", "p", "question_mark"):
            await watcher.press(*([key] if key else []))
            text = "".join(watcher.lines)
            assert text.isascii(), {sign for sign in text if not sign.isascii()}
            assert ("***" in text) == (not key)
            await watcher.press("escape")

    watch(story, run, ascii_only=True)


@pytest.mark.parametrize("losses", [[], [None], [3.0]])
def test_any_size_and_few_values_are_survived(tmp_path, losses):
    run = new_run(tmp_path)
    for step, loss in enumerate(losses):
        run.line("training_metrics", NOW, {"kind": "step", "step": step, "loss": loss})
        run.line("training_metrics", NOW, {"kind": "validation", "step": step})

    async def story(watcher):
        for size in ((40, 12), (300, 80), (81, 25)):
            await watcher.resize(*size)
        assert "STARTING" in watcher.lines[0]
        assert watcher.words.count("no values yet") == (1 if losses == [3.0] else 2)

    watch(story, run, size=(20, 5))
