"""The summary of a run as one HTML file that needs nothing else: no network, no scripts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Protocol

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; }
td { padding: 0.15rem 1.5rem 0.15rem 0; border-bottom: 1px solid #8884; }
td:first-child { opacity: 0.7; }
img { max-width: 100%; margin: 1.5rem 0; }
"""


class Told(Protocol):
    """What the page shows."""

    @property
    def title(self) -> str:
        """Name and status."""

    @property
    def rows(self) -> Sequence[tuple[str, str]]:
        """What and how much, in order."""

    @property
    def troubles(self) -> Sequence[str]:
        """Warnings and failures."""

    @property
    def written(self) -> str:
        """The time of the page."""


def render_page(told: Told, picture: bytes) -> str:
    """Return the page, with the picture (a PNG) inside."""
    rows = "\n".join(
        f"<tr><td>{escape(what)}</td><td>{escape(words)}</td></tr>" for what, words in told.rows
    )
    troubles = "\n".join(f"<li>{escape(trouble)}</li>" for trouble in told.troubles)
    listed = f"<h2>Warnings and failures</h2>\n<ul>\n{troubles}\n</ul>\n" if troubles else ""
    image = base64.b64encode(picture).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(told.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(told.title)}</h1>
<table>
{rows}
</table>
<img alt="loss, speed, GPUs and cost over time" src="data:image/png;base64,{image}">
{listed}<p>Written {escape(told.written)}.</p>
</body>
</html>
"""
