"""Draw the live screen of a run as docs/live_screen.svg.

python docs/live_screen.py [RUN] [WIDTHxHEIGHT]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from refocused.commands.run_selection import whole_steps
from refocused.monitor.run_reader import RunReader
from refocused.monitor.screen.live_screen import Dashboard

FOLDER = Path(__file__).parent


async def draw(run: Path, size: tuple[int, int], out: Path) -> None:
    """Write the screen that `monitor.py RUN` shows on a terminal of that size."""
    app = Dashboard([RunReader(run, saved_steps=whole_steps)], interval_seconds=1000)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.look()
        await pilot.pause()
        out.write_text(app.export_screenshot(title=f"monitor.py {run.name}"))


if __name__ == "__main__":
    run = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER.parent / "runs" / "demo")
    width, height = map(int, (sys.argv[2] if len(sys.argv) > 2 else "120x32").split("x"))
    asyncio.run(draw(run, (width, height), FOLDER / "live_screen.svg"))
