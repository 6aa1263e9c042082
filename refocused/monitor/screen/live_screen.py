"""The live screen: reads the runs' files every few seconds, and nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual_plotext import PlotextPlot

from refocused.monitor.run_reader import RunReader
from refocused.monitor.run_status import RunView, view_of
from refocused.monitor.screen.pictures import Line, is_empty, limits, line_of
from refocused.monitor.screen.run_lines import (
    alarm_lines,
    event_lines,
    fitted,
    gpu_lines,
    head_lines,
    run_rows,
    shown,
)

KEYS = " q quit  r runs  n next run  z newest part of the curves"
ALARMS_SHOWN = 3  # in a line each; the table of GPUs shows the others' notes
ALARM_ROWS = 4  # where all alarms are shown whole
NEWEST_SHARE = 0.1  # of the logged steps
NEWEST_POINTS = 20  # at least
POINT_DISTANCE = 6  # characters between two points, at least
LABEL_WIDTH = 8
MOST_POINTS = 200  # of a curve: plotext takes 20 ms for them
_ASCII_FRAME = str.maketrans("\u2502\u2524", "||")


class CurvePlot(PlotextPlot):
    """A line over steps with single points over it, drawn into the room that there is."""

    def __init__(self, name: str, title: str, *, form: str, ascii_only: bool) -> None:
        """Draw nothing yet; `form` is that of the values beside the axis."""
        super().__init__(id=name, classes="curve")
        self.theme = "clear"
        self._title, self._form, self._ascii_only = title, form, ascii_only
        self._line: Line = [], []
        self._points: Line = [], []

    def show(self, line: Line, points: Line = ([], [])) -> None:
        """Draw another line and points."""
        self._line, self._points = line, points
        self.refresh()

    def render(self) -> Text:
        """Return the drawing."""
        size, plot, lines = self.size, self.plt, (self._line, self._points)
        if all(map(is_empty, lines)):
            return Text(f"{self._title}\n\n  no values yet", style="dim")
        if size.width < 2 * LABEL_WIDTH or size.height < 3:
            return Text(self._title)
        plot.clear_figure()
        plot.title(self._title)
        plot.xaxes(False, False)
        plot.yaxes(True, False)
        ends = list(limits(*lines))
        plot.ylim(*ends)
        plot.yticks(ends, [f"{one:{self._form}}"[:LABEL_WIDTH].rjust(LABEL_WIDTH) for one in ends])
        places = [place for line in lines for place in line[0]]
        ends = [min(places), max(places)]
        plot.xticks(ends, [f"{one:,.0f}" for one in ends])
        plot.plot(*self._line, marker="*" if self._ascii_only else "braille", color="cyan")
        # Points too close to each other would hide the line; the newest one is always there.
        columns = size.width - LABEL_WIDTH - 1
        stride = math.ceil(len(self._points[0]) * POINT_DISTANCE / columns) or 1
        points = (side[::-1][::stride] for side in self._points)
        plot.scatter(*points, marker="o" if self._ascii_only else "dot", color="orange")
        drawn = super().render()
        assert isinstance(drawn, Text)
        if self._ascii_only:
            drawn.plain = drawn.plain.translate(_ASCII_FRAME)
        return drawn


class RunsScreen(ModalScreen[int | None]):
    """The runs, to choose one of them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,r,q", "dismiss(None)", "back")]

    def __init__(self, rows: Sequence[Text], *, chosen: int) -> None:
        super().__init__()
        self._rows, self._chosen = rows, chosen

    def compose(self) -> ComposeResult:
        """Make the list."""
        yield Static(Text(" Runs: up, down, Enter chooses; Escape goes back", style="bold"))
        yield OptionList(*self._rows, id="runs")

    def on_mount(self) -> None:
        """Begin at the run that is shown."""
        self.query_one(OptionList).highlighted = self._chosen

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Go to the chosen run."""
        self.dismiss(event.option_index)


class Dashboard(App[None]):
    """The live screen of some runs, one at a time."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012 - as App declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("r", "choose_run", "runs"),
        Binding("n", "next_run", "next run"),
        Binding("z", "zoom", "newest part of the curves"),
    ]
    CSS = """
    Screen { layout: vertical; background: ansi_default; scrollbar-size: 0 0; overflow: hidden; }
    Static { width: 100%; height: auto; text-wrap: nowrap; text-overflow: clip; }
    #body { height: 1fr; layout: vertical; }
    #curves { height: 1fr; min-height: 4; layout: horizontal; }
    .curve { width: 1fr; height: 100%; }
    #side { height: auto; }
    #events { height: 2; }
    #keys { dock: bottom; height: 1; text-style: dim; }
    .-wide #body { layout: horizontal; }
    .-wide #curves { layout: vertical; width: 1fr; height: 100%; }
    .-wide .curve { width: 100%; height: 1fr; }
    .-wide #side { width: 82; height: 100%; }
    .-wide #events { height: 1fr; margin-top: 1; }
    RunsScreen { align: left top; }
    #runs { height: 1fr; border: none; padding: 0; scrollbar-size: 0 0; }
    """

    def __init__(
        self,
        readers: Sequence[RunReader],
        *,
        interval_seconds: float,
        ascii_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to show at least one run, the first one at first; `clock` is in Unix seconds."""
        super().__init__(ansi_color=True)
        self._readers, self._clock = readers, clock
        self._interval_seconds, self._ascii_only = interval_seconds, ascii_only
        self._shown, self._zoomed = 0, False
        self._written: dict[str, Text] = {}
        self._drawn: tuple[object, ...] | None = None

    def compose(self) -> ComposeResult:
        """Make the parts of the screen."""
        yield Static(id="head")
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
        """Look now, and then again and again."""
        self.look()
        self.set_interval(self._interval_seconds, self.look)

    def look(self) -> None:
        """Read what is new and show it."""
        now = self._clock()
        view = view_of(self._readers[self._shown].read(), now=now)
        self._write("head", head_lines(view, width=self.size.width))
        self._write("alarms", alarms_shown(view, now=now, width=self.size.width))
        self._write("gpus", gpu_lines(view))
        events = self.query_one("#events")
        self._write("events", event_lines(view.events, count=max(2, events.size.height)))
        self._draw(view)

    def on_resize(self) -> None:
        """Show as much as the new size holds."""
        self.call_after_refresh(self.look)

    def action_zoom(self) -> None:
        """Show all of the curves, or their newest part."""
        self._zoomed = not self._zoomed
        self.look()

    def action_next_run(self) -> None:
        """Show the next run."""
        self._show_run((self._shown + 1) % len(self._readers))

    def action_choose_run(self) -> None:
        """Show the list of the runs."""
        views = [view_of(reader.read(), now=self._clock()) for reader in self._readers]
        rows = shown(run_rows(views), ascii_only=self._ascii_only)
        self.push_screen(RunsScreen(rows, chosen=self._shown), self._show_run)

    def _show_run(self, index: int | None) -> None:
        if index is not None:
            self._shown = index
            self.look()

    def _write(self, part: str, lines: Sequence[Text]) -> None:
        """Show the lines of a part; what is there already costs nothing."""
        widget, ascii_only = self.query_one(f"#{part}", Static), self._ascii_only
        whole = shown(lines, ascii_only=ascii_only)
        cut = (fitted(line, widget.size.width, ascii_only=ascii_only) for line in whole)
        text, before = Text("\n").join(cut), self._written.get(part)
        if text == before:
            return
        self._written[part] = text
        widget.display = bool(lines)
        # Each line has its row, whatever is in it: only their number moves other parts.
        moves = before is None or before.plain.count("\n") != text.plain.count("\n")
        widget.update(text, layout=moves or not before)

    def _draw(self, view: RunView) -> None:
        """Draw the curves, unless they are as they were: that costs more than all the rest."""
        ends = [*view.steps[-1:], *view.validations[-1:]]
        drawn = (self._shown, self._zoomed, len(view.steps), len(view.validations), *ends)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        steps, validations = view.steps, view.validations
        if self._zoomed:
            steps = steps[-max(NEWEST_POINTS, round(len(steps) * NEWEST_SHARE)) :]
            first = steps[0].step if steps else 0
            validations = [point for point in validations if point.step >= first]
        losses = line_of(steps, "step", "loss", most=MOST_POINTS)
        self.query_one("#loss", CurvePlot).show(losses, line_of(validations, "step", "loss"))
        speeds = line_of(steps, "step", "tokens_per_second", most=MOST_POINTS)
        self.query_one("#speed", CurvePlot).show(speeds)


def alarms_shown(view: RunView, *, now: float, width: int) -> list[Text]:
    """Return the alarms whole where there is room for all, else the first ones in a line each."""
    live = not view.has_ended
    whole = alarm_lines(view.alarms, now=now, live=live, width=width)
    if len(whole) <= ALARM_ROWS:
        return whole
    hidden = len(view.alarms) - ALARMS_SHOWN
    more = [Text(f" and {hidden} more", style="dim")] if hidden > 0 else []
    return [*alarm_lines(view.alarms[:ALARMS_SHOWN], now=now, live=live), *more]
