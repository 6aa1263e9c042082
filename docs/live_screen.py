"""Draw the live screen of a run as docs/live_screen.svg.

.venv/bin/python docs/live_screen.py [RUN] [WIDTHxHEIGHT]

Without RUN, train the demonstration in an empty folder and draw it after two thirds of its steps,
which takes about two minutes on an otherwise idle machine; a busy one shows a wrong speed.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from refocused.commands.run_selection import whole_steps
from refocused.metrics.jsonl import read_json
from refocused.monitor.run_reader import RunReader
from refocused.monitor.screen.live_screen import Dashboard

DRAWING = Path(__file__).with_suffix(".svg")
POLL_SECONDS = 0.5


async def draw(run: Path, size: tuple[int, int]) -> None:
    """Write the screen that `refocused monitor RUN` shows on a terminal of that size."""
    app = Dashboard([RunReader(run, saved_steps=whole_steps)], interval_seconds=1000)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.look()
        await pilot.pause()
        drawn = app.export_screenshot(title=f"refocused monitor {run.name}")
        # The fonts are named by their address; what shows the drawing has a fixed-width one.
        DRAWING.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def draw_demonstration(size: tuple[int, int]) -> None:
    """Train the demonstration and draw it on its way."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "refocused", "launch", "--config", "demo"]
        training = subprocess.Popen(launch, cwd=folder, stdout=subprocess.DEVNULL)
        run, share = Path(folder, "runs", "demo"), 0.0
        while training.poll() is None and share < 2 / 3:
            time.sleep(POLL_SECONDS)
            state = read_json(run / "state.json") or {}
            share = state.get("step", 0) / (state.get("total_steps") or 1)
        asyncio.run(draw(run, size))
        (run / "STOP").touch()
        training.wait()


if __name__ == "__main__":
    words = sys.argv[1:]
    sizes = [word for word in words if re.fullmatch(r"\d+x\d+", word)] or ["120x32"]
    width, height = map(int, sizes[0].split("x"))
    runs = [Path(word) for word in words if word not in sizes]
    if runs:
        asyncio.run(draw(runs[0], (width, height)))
    else:
        draw_demonstration((width, height))
