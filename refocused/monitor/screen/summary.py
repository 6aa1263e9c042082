"""The summary of a run: SUMMARY.md, and the page summary.html, which needs no other file."""

import collections
import html
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from refocused.config.outputs import without_secrets
from refocused.config.prices import usd_per_million_tokens
from refocused.config.setting_help import list_settings
from refocused.metrics.expected_loss import expected_columns, expected_text
from refocused.metrics.history import METRICS_FILE, MIRROR_FILE, StepMetrics, perplexity
from refocused.metrics.jsonl import JsonLinesTail, Record, number, text, whole_number
from refocused.monitor.readings import AlarmEvent, GpuMinute, read_gpu_minutes
from refocused.monitor.run_reader import RunView, event_of
from refocused.monitor.screen.pictures import columns
from refocused.system.atomic_files import replace_file
from refocused.system.errors import counted
from refocused.system.number_text import dollars, duration, known, moment, percent, value

TROUBLES_SHOWN = 20
TEXT_FILE, PAGE_FILE = "SUMMARY.md", "summary.html"
MOST_COLUMNS = 600  # of a curve: about as many as a panel has pixels
CURVES = (  # the columns that page.html draws
    *("step", "tokens", "seconds_trained", "time", "loss", "learning_rate", "tokens_per_second"),
    *("bits_per_byte", "cost_usd", "gradient_norm", "mfu_fraction", "data_wait_fraction"),
    *("utilization_fraction", "hottest_celsius", "power_watts", "memory_gb"),
)

# Of a `setup` event, what is shown: of all sessions, the last values that differ.
SETUP = (
    *("command", "git", "versions", "hardware", "hosts", "model", "batch", "memory"),
    *("data", "sources", "tokenizer"),
)
VALUES_SHOWN = 3

Rows = list[tuple[str, str]]  # what, and how much
Scores = dict[str, tuple[float, float | None]]  # by task and measure: the value, its standard error
Report = dict[str, Any]  # what the page embeds of a run: its name and status, texts and curves


def read_report(folder: Path, view: RunView) -> Report:
    """Read what a summary shows of a run; the times of its curves are in hours since the first."""
    gpus = read_gpu_minutes(folder / "logs")
    logs = sorted((folder / "logs").glob("events*.jsonl"))
    events = [record for file in logs for record in JsonLinesTail(file).records()]
    metrics = JsonLinesTail(folder / METRICS_FILE)
    step, scores = scores_of(metrics.records())
    at_step = known(" at step {:,}", step)
    damage = [] if view.settings else ["run.yaml is missing or damaged: the settings are unknown"]
    if metrics.malformed:
        damaged = counted(metrics.malformed, "line")
        damage.append(f"{damaged} of {METRICS_FILE} cannot be read, and left out")
    setups = [event for event in events if event.get("kind") == "setup"]
    last_setup = setups[-1] if setups else {}
    mirrored: dict[int, StepMetrics] = {}  # the first time: a restarted mirror reports all again
    for point in _steps_of(JsonLinesTail(folder / MIRROR_FILE).records()):
        mirrored.setdefault(point.step, point)
    tables: dict[str, Sequence[Any]] = {
        "steps": view.steps,
        "validations": view.validations,
        "gpus": gpus,
        "saved": _steps_of(event for event in events if event.get("kind") == "save"),
        "mirrored": list(mirrored.values()),
    }
    means = _means(view, gpus)
    firsts = (getattr(point, "time", None) for table in tables.values() for point in table[:1])
    began = min((time for time in firsts if time is not None), default=0.0)
    return {
        "name": view.name,
        "status": view.status,
        "rows": [
            *_progress(view),
            *((name, score_text(score) + at_step) for name, score in scores.items()),
            *_money(view),
            *((what, words) for what, (_, words) in means.items()),
            *_counts(view, events),
        ],
        "setup": _setup_rows(setups),
        "settings": _settings(view),
        # What decides whether losses of two runs compare; None: unknown.
        "measured_on": {
            "tokenizer": text(last_setup, "tokenizer") or text(view.settings, "data.tokenizer"),
            "data": text(last_setup, "data_fingerprint"),
            "validation set": view.validations[-1].validation_set if view.validations else None,
        },
        "scores": scores,
        "figures": _numbers(view) | {what: figure for what, (figure, _) in means.items()},
        "damage": damage,
        "troubles": _troubles(events),
        "samples": _samples(events),
        **{
            name: columns(table, *CURVES, began=began, most=MOST_COLUMNS)
            for name, table in tables.items()
        },
        "expected": expected_columns(view.expected_loss, view.steps),
    }


def write_summary(folder: Path, view: RunView) -> list[Path]:
    """Write a run's summary into its folder; return the files, or raise OSError."""
    report, written = read_report(folder, view), moment(view.now)
    lines = [f"# {_cell(_title(report))}", "", "| | |", "|---|---|"]
    rows = [*report["rows"], *report["setup"]]
    lines += [f"| {_cell(what)} | {_cell(words)} |" for what, words in rows]
    changed = [(name, words) for name, words, is_changed in report["settings"] if is_changed]
    if changed:
        lines += ["", "Settings other than the defaults:", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(words)} |" for name, words in changed]
    if troubles := [*report["damage"], *report["troubles"]]:
        lines += ["", "Warnings and failures, the last ones:", ""]
        lines += [f"- {_cell(trouble)}" for trouble in troubles]
    lines += ["", f"Written {written}.", ""]
    contents = {
        TEXT_FILE: "\n".join(lines).encode(),
        PAGE_FILE: page_of([report], written=written).encode(),
    }
    for name, content in contents.items():
        replace_file(folder / name, content, durable=True)
    return [folder / name for name in contents]


def write_page(reports: Sequence[Report], file: Path) -> Path:
    """Write one page that compares runs; return the file, or raise OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, page_of(reports, written=moment(time.time())).encode(), durable=True)
    return file


def page_of(reports: Sequence[Report], *, written: str) -> str:
    """Return the page of some runs, with their curves embedded.

    Names and text samples come from outside: JSON in a script holds no `<`, and the page shows
    text as text.
    """
    folder = Path(__file__).parent
    texts = {
        "title": html.escape(", ".join(map(_title, reports))),
        "written": html.escape(written),
        "runs": json.dumps(reports, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub(
        r"\{\{([\w./]+)\}\}",
        lambda field: texts.get(field[1]) or (folder / field[1]).read_text(encoding="utf-8"),
        (folder / "page.html").read_text(encoding="utf-8"),
    )


def _title(report: Report) -> str:
    return f"{report['name']}: {report['status']}"


def _cell(words: str) -> str:
    """Keep a text on its line and in its cell."""
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")


def _steps_of(records: Iterable[Record]) -> list[StepMetrics]:
    """Return when checkpoints were saved or mirrored, in the order of the file."""
    steps = [StepMetrics.from_record(record) for record in records]
    return [StepMetrics(step.step, time=step.time) for step in steps if step and step.time]


def _samples(events: Iterable[Record]) -> list[tuple[int, str]]:
    """Return the text samples of the first and the last step that have one."""
    samples = {
        step: written
        for event in events
        if (step := whole_number(event, "step")) is not None
        and (written := text(event, "sample")) is not None
    }
    return [(step, samples[step]) for step in sorted({*sorted(samples)[:1], *sorted(samples)[-1:]})]


def _troubles(records: Iterable[dict[str, Any]]) -> list[str]:
    events = [event for record in records if (event := event_of(record)) and event.is_trouble]
    events.sort(key=lambda event: event.time or 0.0)
    return [
        event.text if event.time is None else f"{moment(event.time)}: {event.text}"
        for event in events[-TROUBLES_SHOWN:]
    ]


def _progress(view: RunView) -> Rows:
    ended = "" if view.exit_code is None or view.is_live else f", exit code {view.exit_code}"
    note = f" ({view.note})" if view.note else ""
    steps = f"{view.step:,} of {value(view.total_steps, ',')} ({percent(view.progress_fraction)})"
    rows = [
        ("status", f"{view.status}{ended}{note}"),
        ("steps", steps),
        ("tokens", value(view.tokens, ",")),
        ("training loss", value(view.loss, ".4f")),
    ]
    if expected := expected_text(view.expected_loss, view.steps):
        rows.append(("expected loss", expected))
    begin = next((point for point in view.validations if not point.step), None)
    if begin is not None and (loss := begin.loss) is not None:
        words = f"{loss:.4f}, perplexity {perplexity(loss):.2f}"
        words += known(", {:.4f} bits per byte", begin.bits_per_byte)
        rows.append(("validation loss before training", words))
    if (loss := view.validation_loss) is not None:
        rows.append(("validation loss", f"{loss:.4f}, perplexity {perplexity(loss):.2f}"))
    if view.bits_per_byte is not None:
        rows.append(("bits per byte", f"{view.bits_per_byte:.4f}"))
    if (loss := view.best_loss) is not None:
        words = f"{loss:.4f}, perplexity {perplexity(loss):.2f}"
        words += known(", {:.4f} bits per byte", view.best_bits_per_byte)
        rows.append(("best validation loss", f"{words} at step {view.best_step or 0:,}"))
    return rows


def scores_of(records: Iterable[Record]) -> tuple[int | None, Scores]:
    """Return the step of a run's last scores on its tasks, and these by task and measure."""
    scored = [record for record in records if record.get("kind") == "tasks"]
    last = scored[-1] if scored else {}
    tasks = last.get("tasks")
    return whole_number(last, "step"), {
        f"{task} {name}": (number(measure, "value") or 0.0, number(measure, "standard_error"))
        for task, measures in (tasks.items() if isinstance(tasks, dict) else ())
        for name, measure in (measures.items() if isinstance(measures, dict) else ())
        if isinstance(measure, dict) and number(measure, "value") is not None
    }


def score_text(score: tuple[float, float | None]) -> str:
    """Format a score with its standard error, if that is known."""
    return f"{score[0]:.4f}" + known(" +- {:.4f}", score[1])


def _setup_rows(setups: Sequence[Record]) -> Rows:
    """Return what the sessions ran on; what changed between them, in their order."""
    rows = []
    for name in SETUP:
        words = [_words(setup.get(name)) for setup in setups]
        different = list(dict.fromkeys(filter(None, words)))[-VALUES_SHOWN:]
        if different:
            rows.append((name, " -> ".join(different)))
    return rows


def _words(recorded: object) -> str:
    """Return a part of a setup as text; empty if it is of another kind."""
    if isinstance(recorded, dict):
        recorded = [f"{name} {version}" for name, version in recorded.items()]
    parts = recorded if isinstance(recorded, list) else [recorded]
    return without_secrets("; ".join(part for part in parts if isinstance(part, str)))


def _settings(view: RunView) -> list[tuple[str, str, bool]]:
    """Return each setting with its value as JSON, and whether that differs from the default."""
    defaults = {setting.name: setting.default for setting in list_settings()}
    values = {
        name: json.dumps(value, ensure_ascii=False, default=str)
        for name, value in view.settings.items()
    }
    return [
        (name, without_secrets(words), words != defaults.get(name))
        for name, words in values.items()
    ]


def _money(view: RunView) -> Rows:
    rows = [("time trained", duration(view.seconds_trained))]
    if view.cost_usd is not None:
        rows.append(("cost", dollars(view.cost_usd).strip()))
    if view.used is not None and view.used.goodput_fraction is not None:
        rows.append(("goodput", view.used.as_line().removeprefix("goodput ")))
    price = usd_per_million_tokens(view.cost_usd, view.tokens)
    if price is not None:
        rows.append(("a million tokens", f"${price:.4f}"))
    if view.seconds_left is not None:
        left = f"{duration(view.seconds_left)}{dollars(view.cost_left_usd)}"
        begin = "" if view.resumes_from is None else f", from step {view.resumes_from:,} on"
        rows.append(("left", left + begin))
    return rows


def _numbers(view: RunView) -> dict[str, float | None]:
    """Return what of a run's rows is a number, beside its means, by the rows' names."""
    return {
        "tokens": view.tokens,
        "training loss": view.loss,
        "validation loss": view.validation_loss,
        "bits per byte": view.bits_per_byte,
        "best validation loss": view.best_loss,
        "time trained": view.seconds_trained,
        "cost": view.cost_usd,
        "a million tokens": usd_per_million_tokens(view.cost_usd, view.tokens),
    }


def _means(view: RunView, gpus: Sequence[GpuMinute]) -> dict[str, tuple[float, str]]:
    """Return the known ones of means over a run, as numbers and as text."""
    means = {}
    for points, name, what, form, of_all in (
        (view.steps, "tokens_per_second", "tokens a second, mean", "{:,.0f}", harmonic_mean),
        (view.steps, "step_seconds", "step, mean", "{:.3g} s", fmean),
        (view.steps, "mfu_fraction", "MFU, mean", "{:.1%}", harmonic_mean),
        (view.steps, "data_wait_fraction", "waited for data, mean", "{:.1%}", fmean),
        (gpus, "utilization_fraction", "GPUs busy, mean", "{:.1%}", fmean),
        (gpus, "hottest_celsius", "hottest GPU", "{:.0f} C", max),
        (gpus, "memory_gb", "GPU memory, most", "{:.1f} GB", max),
    ):
        if (figure := over_all(points, name, of_all)) is not None:
            means[what] = figure, form.format(figure)
    return means


def over_all(
    points: Sequence[Any], name: str, of_all: Callable[[list[float]], float] = harmonic_mean
) -> float | None:
    """Return the mean, or another figure, of a field's known values; None without any."""
    values = [getattr(point, name) for point in points]
    known = [each for each in values if each is not None and each >= 0]  # it may be damaged
    return of_all(known) if known else None


def _counts(view: RunView, events: Sequence[dict[str, Any]]) -> Rows:
    count = collections.Counter(
        kind
        for event in events
        if (kind := text(event, "kind")) != AlarmEvent.kind or event.get("raised") is True
    )
    saves = [number(event, "stall_seconds") for event in events if event.get("kind") == "save"]
    stalls = [seconds for seconds in saves if seconds is not None]
    stall = f", {fmean(stalls):.3g} s each without training" if stalls else ""
    newest = view.saves.newest_step
    rows = [
        ("sessions", f"{count['start'] + count['resume']:,}"),
        ("saves", f"{count['save']:,}{stall}"),
        ("newest checkpoint here", "none" if newest is None else f"step {newest:,}"),
    ]
    if view.mirror is not None:
        mirrored = view.mirror.newest_step
        up_to = "nothing yet" if mirrored is None else f"up to step {mirrored:,}"
        rows.append(("mirror", f"{view.mirror.bucket}: {up_to}, {view.mirror.waiting} waiting"))
    return [*rows, ("alarms", f"{count['alarm']:,}")]
