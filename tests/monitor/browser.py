"""What a browser makes of a page, asked by a script in it."""

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HEADLESS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
HEADLESS += "--disable-background-networking --disable-component-update"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def seen_in_browser(page: Path, script: str, *, size: str) -> dict[str, Any]:
    """Open a page without a network, and return what a script in it passes to `report`."""
    report = """<script>const report = seen => {
      seen.errors = get("errors").textContent;
      seen.loaded = performance.getEntriesByType("resource").length;
      seen.wider = document.documentElement.scrollWidth - innerWidth;
      const result = element("pre", JSON.stringify(seen));
      result.id = "seen";
      document.body.append(result);
    };"""
    driven = page.with_name("driven.html")
    driven.write_text(page.read_text().replace("</body>", f"{report}{script}</script></body>"))
    profile = [f"--user-data-dir={page.with_name('profile')}", "--host-rules=MAP * ~NOTFOUND"]
    shown = subprocess.run(
        [
            *(str(CHROMIUM), *HEADLESS.split(), *profile),
            *(f"--window-size={size}", "--virtual-time-budget=9000", "--dump-dom", str(driven)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout
    assert '<pre id="seen">' in shown, shown[-2000:]
    text = html.unescape(shown.partition('<pre id="seen">')[2].partition("</pre>")[0])
    seen: dict[str, Any] = json.loads(text)
    return seen
