"""The live screen: shows runs from their files, which it reads every few seconds."""

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import psutil
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual_plotext import PlotextPlot

from refocused.metrics.expected_loss import expected_columns
from refocused.monitor.run_reader import RunReader, RunView
from refocused.monitor.screen.pictures import Line, is_empty, limits, line_of
from refocused.monitor.screen.run_lines import (
    alarm_lines,
    event_lines,
    fitted,
    folded,
    gpu_lines,
    head_lines,
    run_rows,
    shown,
)
from refocused.system.number_text import moment, value

KEYS = " ? help  a alarms  p processes  r runs  n next run  z zoom curves  q quit"
TALL = 30  # rows of a terminal with room for another row of bars and two of alarms
NEWEST_SHARE = 0.1  # of the logged steps
NEWEST_POINTS = 20  # at least
POINT_DISTANCE = 6  # characters between two points, at least
LABEL_WIDTH = 8
MOST_POINTS = 200  # of a curve: plotext takes 20 ms for them
LONGEST_LINE = 100
_HELP = """\
 q        quit; the run continues
 ?        this help
 a        all alarms, past ones too, and what to do about each
 p        the processes on the GPUs
 r        choose a run
 n        the next run
 z        the newest part of the curves, or all of them
 Escape   leave a page; up, down, PgUp, PgDn scroll it

 at risk  steps since the last checkpoint, which a crash would lose
 mirror   the newest checkpoint in the bucket, and how many wait
 data     shards on this machine, and the next ones that are ready; wait: share
          of a step that waits for data
 link     active NVLinks
 ECC      uncorrected memory errors"""
Lines = Callable[[int], Sequence[Text]]
_ASCII_FRAME = str.maketrans("\u2502\u2524", "||")


class CurvePlot(PlotextPlot):
    """A line over steps, points on top of it and what is expected behind; fills the widget."""

    def __init__(self, name: str, title: str, *, form: str, ascii_only: bool) -> None:
        """Draw nothing yet; `form` is the format of the values beside the axis."""
        super().__init__(id=name, classes="curve")
        self.theme = "clear"
        self._title, self._form, self._ascii_only = title, form, ascii_only
        self._line: Line = [], []
        self._points: Line = [], []
        self._expected: Sequence[Line] = ()

    def show(self, line: Line, points: Line = ([], []), *, expected: Sequence[Line] = ()) -> None:
        """Draw another line and points, and behind them what is expected of the line."""
        self._line, self._points, self._expected = line, points, expected
        self.refresh()

    def render(self) -> Text:
        """Return the drawing."""
        size, plot, lines = self.size, self.plt, (self._line, self._points, *self._expected)
        if all(map(is_empty, lines)):
            return Text(f"{self._title}\n\n  no values yet", style="dim")
        if size.width < 2 * LABEL_WIDTH or size.height < 3:
            return Text(self._title)
        plot.clear_figure()
        plot.title("loss, val dots, expected green" if self._expected else self._title)
        plot.xaxes(False, False)
        plot.yaxes(True, False)
        ends = list(limits(*lines))
        plot.ylim(*ends)
        plot.yticks(ends, [f"{end:{self._form}}"[:LABEL_WIDTH].rjust(LABEL_WIDTH) for end in ends])
        steps = [step for line in lines for step in line[0]]
        ends = [min(steps), max(steps)]
        plot.xticks(ends, [f"{end:,.0f}" for end in ends])
        for line in self._expected:
            plot.plot(*line, marker="-" if self._ascii_only else "braille", color="green")
        plot.plot(*self._line, marker="*" if self._ascii_only else "braille", color="cyan")
        # Points too close to each other would hide the line. The newest one is always drawn.
        columns = size.width - LABEL_WIDTH - 1
        stride = math.ceil(len(self._points[0]) * POINT_DISTANCE / columns) or 1
        points = (side[::-1][::stride] for side in self._points)
        plot.scatter(*points, marker="o" if self._ascii_only else "dot", color="orange")
        drawn = super().render()
        assert isinstance(drawn, Text)
        if self._ascii_only:
            drawn.plain = drawn.plain.translate(_ASCII_FRAME)
        return drawn


class Page(ModalScreen[int | None]):
    """Lines over the live screen, which scroll and are kept up to date, or a list of options."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,a,p,r,question_mark", "dismiss(None)", "back")
    ]

    def __init__(self, heading: str, body: Widget, lines: Lines | None = None) -> None:
        """Show a list of options, or `lines`, which gets the width of the page, in `#page`."""
        super().__init__()
        self._heading, self._body, self._lines = heading, body, lines

    def compose(self) -> ComposeResult:
        """Make the heading and the body."""
        yield Static(Text(f" {self._heading}; Escape goes back", style="bold"))
        yield self._body

    def fill(self) -> None:
        """Show the lines as they are now."""
        if self._lines is not None:
            self.query_one("#page", Static).update(Text("\n").join(self._lines(self.size.width)))

    def on_resize(self) -> None:
        """Wrap the lines at the new width."""
        self.fill()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the number of the chosen option."""
        self.dismiss(event.option_index)


class Dashboard(App[None]):
    """The live screen of some runs, one at a time."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 - as App declares it
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("r", "choose_run", "runs"),
        Binding("n", "next_run", "next run"),
        Binding("z", "zoom", "newest part of the curves"),
        Binding("question_mark", "page('Help')", "help"),
        Binding("a", "page('Alarms')", "alarms"),
        Binding("p", "page('Processes')", "processes"),
    ]
    CSS_PATH = "live_screen.tcss"

    def __init__(
        self,
        readers: Sequence[RunReader],
        *,
        interval_seconds: float,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Show the first of the runs (at least one) to begin with; `clock` is in Unix seconds."""
        super().__init__(ansi_color=True)
        self._readers, self._clock = readers, clock
        self._interval_seconds, self._ascii_only = interval_seconds, ascii_only
        self._shown, self._zoomed = 0, False
        self._view = readers[0].read(clock())
        self._written: dict[str, Text] = {}
        self._drawn: tuple[object, ...] | None = None

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="head")
        yield Static(id="gauges")
        yield Static(id="alarms")
        with Container(id="body"):
            with Container(id="curves"):
                title, is_ascii = "loss (line), validation (dots)", self._ascii_only
                yield CurvePlot("loss", title, form=".4f", ascii_only=is_ascii)
                yield CurvePlot("speed", "tokens a second", form=",.0f", ascii_only=is_ascii)
            with Container(id="side"):
                yield Static(id="gpus")
                yield Static(id="events")
        yield Static(KEYS, id="keys")

    def on_mount(self) -> None:
        """Show the run now, and then at the interval."""
        self.look()
        self.set_interval(self._interval_seconds, self.look)

    def look(self) -> None:
        """Read what is new and show it."""
        now, (width, height) = self._clock(), self.size
        self._view = view = self._readers[self._shown].read(now)
        rows = 2 if height >= TALL else 1
        head = head_lines(view, width=width)
        if rows > 1:
            head = [row for line in head for row in folded(line, width)]
        self._write("head", head)
        self._write("gauges", gauge_lines(view, width=width, rows=rows))
        alarms = alarm_lines(view, view.alarms, width=width)
        if len(alarms) > 2 * rows:  # then the first of them in a line each
            alarms = alarm_lines(view, view.alarms, short=True)
            alarms = shortened(alarms, 2 * rows, "alarms (a shows all)")
        self._write("alarms", alarms)
        # Bars, alarms and events take at most 4 or 10 rows, curves at least 3, the keys 1.
        room = max(4, height - len(head) - 2 - 6 * rows)
        self._write("gpus", shortened(gpu_lines(view), room, "GPUs"))
        size = self.query_one("#events").size
        events = event_lines(view, count=max(1, size.height), width=size.width or width)
        self._write("events", events)
        self._draw(view)
        if isinstance(self.screen, Page):
            self.screen.fill()

    def on_resize(self) -> None:
        """Show as much as fits the new size."""
        self.call_after_refresh(self.look)

    def action_zoom(self) -> None:
        """Switch between the whole curves and their newest part."""
        self._zoomed = not self._zoomed
        self.look()

    def action_next_run(self) -> None:
        """Show the next run."""
        self._show_run((self._shown + 1) % len(self._readers))

    def action_choose_run(self) -> None:
        """Show the list of runs."""
        views = [reader.read(self._clock()) for reader in self._readers]
        runs = OptionList(*shown(run_rows(views), ascii_only=self._ascii_only), id="runs")
        runs.highlighted = self._shown
        self.push_screen(Page("Runs: up, down, Enter choose", runs), self._show_run)

    def action_page(self, heading: str) -> None:
        """Show a page over the screen."""

        def lines(width: int) -> list[Text]:
            texts = page_lines(heading, self._view, width=width)
            return shown(texts, ascii_only=self._ascii_only)

        body = VerticalScroll(Static(id="page"))
        self.push_screen(Page(f"{heading}: up, down, PgDn scroll", body, lines))

    def _show_run(self, index: int | None) -> None:
        if index is not None:
            self._shown = index
            self.look()

    def _write(self, part: str, lines: Sequence[Text]) -> None:
        """Show the lines of a part, unless they are there already."""
        widget, ascii_only = self.query_one(f"#{part}", Static), self._ascii_only
        whole = shown(lines, ascii_only=ascii_only)
        cut = (fitted(line, widget.size.width, ascii_only=ascii_only) for line in whole)
        text, before = Text("\n").join(cut), self._written.get(part)
        if text == before:
            return
        self._written[part] = text
        widget.display = bool(lines)
        # A line takes one row whatever it holds, so only the number of lines moves other parts.
        moves = before is None or before.plain.count("\n") != text.plain.count("\n")
        widget.update(text, layout=moves or not before)

    def _draw(self, view: RunView) -> None:
        """Draw the curves if they have changed: this costs more than everything else."""
        ends = [*view.steps[-1:], *view.validations[-1:]]
        drawn = (self._shown, self._zoomed, len(view.steps), len(view.validations), *ends)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        steps, validations = view.steps, view.validations
        first = 0
        if self._zoomed:
            steps = steps[-max(NEWEST_POINTS, round(len(steps) * NEWEST_SHARE)) :]
            first = steps[0].step if steps else 0
            validations = [point for point in validations if point.step >= first]
        columns = expected_columns(view.expected_loss, view.steps, since=first)
        places, *expected = columns.values() or [[]]
        self.query_one("#loss", CurvePlot).show(
            line_of(steps, "loss", most=MOST_POINTS),
            line_of(validations, "loss"),
            expected=[(places, values) for values in expected],
        )
        speeds = line_of(steps, "tokens_per_second", most=MOST_POINTS)
        self.query_one("#speed", CurvePlot).show(speeds)


def shortened(lines: list[Text], rows: int, what: str) -> list[Text]:
    """Return lines, or as many as fit so many rows and how many more there are."""
    if len(lines) <= rows:
        return lines
    more = f" and {len(lines) - rows + 1} more {what}"
    return [*lines[: rows - 1], Text(more, style="dim")]


def gauge_lines(view: RunView, *, width: int, rows: int) -> list[Text]:
    """Return what is known of progress, GPUs, disk and budget as bars, in one row or in two."""
    gpus, systems = view.gpus, view.systems
    busy = [(reading.utilization_fraction, 1.0) for reading in gpus]
    memory = [(reading.memory_used_gb, reading.memory_total_gb) for reading in gpus or systems]
    free = [(reading.disk_free_gb, reading.disk_total_gb) for reading in systems]
    gauges = {
        "run": _shares([(view.progress_fraction, 1.0)]),
        "GPU": [statistics.fmean(shares)] if (shares := _shares(busy)) else [],
        "GPU mem" if gpus else "RAM": _shares(memory),
        "disk": [1 - share for share in _shares(free)],
        "budget": _shares([(view.cost_usd, view.budget_usd)]),
    }
    known = [(name, max(shares)) for name, shares in gauges.items() if shares]
    lines = []
    for row in [known[:1], known[1:]] if rows > 1 else [known]:
        length = max(3, (width - sum(len(name) + 7 for name, _ in row)) // max(1, len(row)))
        line = Text()
        for name, share in row:
            filled = round(min(1.0, max(0.0, share)) * length)
            is_short = share >= 0.8 and name not in ("run", "GPU")
            style = ("red" if share >= 0.95 else "yellow") if is_short else "cyan"
            line.append(f" {name} ").append("\u2588" * filled, style)
            line.append("\u2591" * (length - filled), "dim").append(f" {share:<4.0%}")
        lines += [line] if row else []
    return lines


def _shares(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    return [part / whole for part, whole in pairs if part is not None and whole]


def page_lines(heading: str, view: RunView, *, width: int) -> list[Text]:
    """Return the page `Alarms`, `Processes` or `Help`."""
    if heading == "Processes":
        return _processes(view) or [Text(" No process on a GPU is known.")]
    if heading == "Help":
        return [Text(line) for line in _HELP.splitlines()]
    lines = []
    for alarm in [*view.alarms, *view.past_alarms]:
        lines += alarm_lines(view, [alarm], width=min(width, LONGEST_LINE))
        times = [moment(time) for time in (alarm.time, alarm.ended) if time is not None]
        since = "since " if alarm.ended is None else ""
        words = f"{'':8}{alarm.name}, {alarm.subject}: {since}{' to '.join(times)}"
        lines += [Text(words, style="dim"), Text()]
    return lines or [Text(" No alarm was raised.")]


def _processes(view: RunView) -> list[Text]:
    """Return a line for each process; user and command are known for those of this machine."""
    lines = [Text(f" {'GPU':<4}{'pid':>9}{'GB':>7}  {'user':<10} command", style="bold")]
    for gpu in view.gpus:
        for pid, gb in (gpu.processes or {}).items():
            user, command = "-", "-"
            try:  # a process may have ended, or run in another container
                if gpu.host == socket.gethostname():
                    process = psutil.Process(int(pid))
                    user, command = process.username(), " ".join(process.cmdline())
            except psutil.Error:
                pass
            row = f" {gpu.index:<4}{pid:>9}{value(gb, '.1f'):>7}  {user:<10.10} {command}"
            lines.append(Text(row if len(view.systems) < 2 else f"{row} ({gpu.host})"))
    return lines if len(lines) > 1 else []
