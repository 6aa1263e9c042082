"""`monitor`, `compare` and `stop`: show and compare runs, record a machine, stop a run."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import locale
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, add_credentials, add_json, bucket_at
from refocused.commands.output import (
    count,
    positive,
    print_result,
    setting_text,
    table,
    write_picture,
)
from refocused.commands.run_selection import RUNS, find_run, whole_steps
from refocused.system.errors import ConfigError, RefocusedError, as_typed, how_to_install
from refocused.system.launchers import end_with_parent
from refocused.system.logs import print_message
from refocused.system.number_text import known

if TYPE_CHECKING:
    from refocused.monitor.run_reader import RunReader, RunView
    from refocused.monitor.screen.summary import Report

INTERVAL_SECONDS = 2.5
EVENTS_PRINTED = 5
SAMPLES = Path("samples")
SCREEN_SECONDS = 10.0  # time-out of a `screen` command
NAME_LENGTH = 40  # of a run in its session's name: the path of a socket has at most 107 characters
FORMS = ("once", "list", "json", "summary", "page", "collect", "web")
STOP_POLL_SECONDS = 0.5
WEB_PORT = 8765
SERVER = "REFOCUSED_WEB_SERVER"  # its process id, for what it starts


def run_monitor(parser: Parser) -> None:
    """Show runs, record a machine, or write a summary."""
    parser.description = (
        "Watch runs on a live screen. It only reads their files, so it cannot disturb training. "
        "With --collect, record the GPUs of a machine without a run."
    )
    parser.examples = ("demo", "--once --json runs/demo", "--list", "demo --web")
    runs = "folders, or names in runs/ (default: all there, newest first)"
    parser.add_argument("run", nargs="*", help=runs)
    add = parser.group("output")
    add("--interval SECONDS", "time between two readings", type=positive, default=INTERVAL_SECONDS)
    add("--page FILE", "write an HTML page that compares the named runs", type=Path)
    add("--once", "print the present state and exit")
    add("--list", "print a line for each run and exit")
    add("--wait", "accept a run that has not begun yet")
    add("--json", "print the present state as JSON and exit")
    add("--summary", "write SUMMARY.md and summary.html")
    add("--collect", f"record this machine until Ctrl+C, in RUN (default: {SAMPLES}/HOST)")
    add("--ascii", "only ASCII characters (default without a UTF-8 locale)")
    web = f"serve the live screen to browsers of this machine (default port: {WEB_PORT})"
    add("--web PORT", web, nargs="?", type=port, const=WEB_PORT)
    add = parser.group("storage")
    add("--bucket URL", "read the logs of all machines of the named runs there (checkpoint.mirror)")
    add_credentials(parser)
    arguments = parser.read()
    forms = [name for name in FORMS if getattr(arguments, name)]
    if len(forms) > 1 and set(forms) not in ({"once", "json"}, {"list", "json"}):
        parser.error(f"--{forms[0]} and --{forms[1]} exclude each other. Keep one")
    if SERVER in os.environ:  # the screen of one browser window
        end_with_parent(int(os.environ[SERVER]))
    for form in set(forms) - {"collect", "web"}:
        unused = ["interval"] if form in ("once", "list") else ["interval", "ascii"]
        parser.refuse(arguments, f"has no effect with --{form}", *unused)
    if not arguments.bucket:
        parser.refuse(arguments, "needs --bucket", "gcs_credentials", "gcp_project")
    if arguments.collect:
        parser.refuse(arguments, "has no effect with --collect", "bucket", "wait", "ascii")
    elif arguments.bucket and (not arguments.run or arguments.web):
        raise ConfigError("--bucket needs the name of a run, and --web cannot show it.")
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as copies:
        if arguments.collect:
            _collect(arguments.run, interval_seconds=arguments.interval)
            return
        if arguments.bucket:
            from refocused.checkpoints.mirror.mirror_logs import followed

            bucket = bucket_at(arguments.bucket, arguments)
            arguments.run = copies.enter_context(followed(bucket, arguments.run))
        _show(arguments)


def _show(arguments: argparse.Namespace) -> None:
    named = [find_run(run, must_exist=not arguments.wait, option=None) for run in arguments.run]
    all_runs = named or _runs_by_age()
    newest = named or all_runs[:1]
    ascii_only = arguments.ascii or not has_utf8_terminal(locale.getencoding(), os.environ)
    is_shown = sys.stdout.isatty() or arguments.web or "TEXTUAL_DRIVER" in os.environ
    if arguments.summary or arguments.page:
        _summarize(newest, arguments.page)
    elif arguments.list or arguments.json or arguments.once or not is_shown:
        shown_runs = all_runs if arguments.list else newest
        views = [_reader(folder).read(time.time()) for folder in shown_runs]
        if arguments.json:
            records = [view.as_record() for view in views]
            print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
            return
        from rich.console import Console

        from refocused.monitor.screen.run_lines import all_lines, run_rows, shown

        rows = run_rows(views) if arguments.list else []
        for view in () if arguments.list else views:
            rows += all_lines(view, events=EVENTS_PRINTED)
        console = Console(highlight=False, soft_wrap=True)
        for line in shown(rows, ascii_only=ascii_only):
            console.print(line)
    elif arguments.web:
        _serve(all_runs, arguments)
    else:
        from refocused.monitor.screen.live_screen import Dashboard

        readers = [_reader(folder) for folder in all_runs]
        seconds = arguments.interval
        Dashboard(readers, interval_seconds=seconds, ascii_only=ascii_only).run()


def port(text: str) -> int:
    """Parse a port that a server may listen on."""
    number = count(text)
    if number >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is from 1 to 65535")
    return number


def _runs_by_age() -> list[Path]:
    """Return the runs in runs/ that have a state, the last written first."""
    newest = find_run(None, option=None)
    states = sorted(RUNS.glob("*/state.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in states] or [newest]


def _collect(named: Sequence[str], *, interval_seconds: float) -> None:
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings

    if len(named) > 1:
        raise ConfigError(f"--collect takes one folder, not {len(named)}: {', '.join(named)}.")
    folder = find_run(named[0], must_exist=False) if named else SAMPLES / socket.gethostname()
    settings = SamplerSettings(
        run=folder.absolute(), training=None, interval_seconds=interval_seconds, ranks=0
    )
    samples = settings.log("gpu_metrics.jsonl")
    try:
        samples.parent.mkdir(parents=True, exist_ok=True)
        if not take_turn(settings):
            raise RefocusedError(
                f"Another process records this machine in {folder}. Choose another folder."
            )
        sampler = Sampler(settings)
    except OSError as error:
        raise RefocusedError(
            f"Cannot write to {folder} ({error.strerror}). Choose another folder."
        ) from error
    print_message(
        "hint",
        f"Recording to {samples} every {interval_seconds:g} s until Ctrl+C. "
        f"Watch it with: {as_typed('monitor')} {folder}",
    )
    sampler.run()


def _serve(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    try:
        from refocused.monitor.screen.web_server import MonitorServer
    except ImportError as error:
        fix = how_to_install("textual-serve")
        raise ConfigError(f"--web needs textual-serve. Install it: {fix}") from error
    show = [sys.executable, "-P", "-m", "refocused", "monitor", "--wait"]
    show += ["--interval", str(arguments.interval), *(["--ascii"] if arguments.ascii else [])]
    show += [str(folder.absolute()) for folder in folders]
    try:
        MonitorServer(f"{SERVER}=$PPID exec {shlex.join(show)}", port=arguments.web).serve()
    except OSError as error:
        raise RefocusedError(
            f"Port {arguments.web} cannot be used ({error.strerror}). Choose another: --web PORT"
        ) from error


def _summarize(folders: Sequence[Path], page: Path | None) -> None:
    from refocused.monitor.screen.summary import read_report, write_page, write_summary

    target, views = page, {folder: _reader(folder).read(time.time()) for folder in folders}
    try:
        if page is not None:
            reports = {str(folder): read_report(folder, view) for folder, view in views.items()}
            record = compare_runs(list(views.values()), reports)
            print(write_page(_with_tables(reports, record), page))
        for target, view in views.items() if page is None else ():
            print(", ".join(map(str, write_summary(target, view))))
    except OSError as error:
        raise RefocusedError(
            f"{target}: the summary cannot be written ({error.strerror}). Make room there, or name "
            "another place with --page."
        ) from error


def _reader(folder: Path) -> RunReader:
    from refocused.monitor.run_reader import RunReader

    return RunReader(folder, saved_steps=whole_steps)


def has_utf8_terminal(encoding: str, environment: Mapping[str, str]) -> bool:
    """Return whether the terminal probably shows UTF-8, by Python's encoding of the locale.

    In the C locale Python sets its own LC_CTYPE to UTF-8 (PEP 538), whatever the terminal supports:
    tmux then shows an underscore for each character of a curve.
    """
    if encoding.lower().replace("-", "") != "utf8":
        return False
    is_pythons_own = environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8")
    has_language = environment.get("LANG", "") not in ("", "C", "POSIX")
    return bool(environment.get("LC_ALL")) or has_language or not is_pythons_own


def open_in_screen(run: Path) -> str:
    """Open the monitor of a run, which may not exist yet, in `screen`; return a line to print.

    The session outlives training, so that its end can be seen. A restarted run reuses its session.
    """
    screen, name = shutil.which("screen"), session_name(run)
    if screen is None:
        return (
            "--monitor: screen is not installed (on Debian or Ubuntu: apt-get install screen). "
            f"Training continues. Open it in another terminal: {as_typed('monitor')} {run}"
        )

    def call(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [screen, *arguments],
            env={**os.environ, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCREEN_SECONDS,
            check=False,
        )

    attach = f"screen -U -r {name} shows {run} (Ctrl+A D detaches, q quits)"
    watch = [sys.executable, "-P", "-m", "refocused", "monitor"]
    # Curves and colours need -U, a terminal of 256 colours, and a UTF-8 locale, which the starting
    # process may not have.
    opening = ["-U", "-T", "screen-256color", "-dmS", name, *watch, "--wait", str(run.absolute())]
    try:
        if re.search(rf"\.{re.escape(name)}\s", call("-ls", name).stdout):
            return f"monitor  already open: {attach}"
        opened = call(*opening, LC_ALL="C.UTF-8")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--monitor: screen does not respond ({error}). Training continues."
    if opened.returncode:
        reason = " ".join((opened.stdout + opened.stderr).split()) or f"exit {opened.returncode}"
        return f"--monitor: screen failed ({reason}). Training continues."
    return f"monitor  {attach}"


def session_name(run: Path) -> str:
    """Return the name of a run's session, which ends with a hash of the run's path."""
    path = run.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.name)[:NAME_LENGTH]
    return f"monitor-{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def run_stop(parser: Parser) -> None:
    """Ask a run to save and stop after the step it is in, or end it now."""
    parser.examples = ("demo --wait",)
    run = "the run's folder, or its name in runs/ (default: the newest there)"
    parser.add_argument("run", nargs="?", help=run)
    add = parser.group("options")
    add("--wait", "return when the run has stopped")
    add("--now", "kill it without saving: everything since the last checkpoint is lost")
    arguments = parser.read()
    from refocused.metrics.jsonl import read_json, read_small
    from refocused.system.processes import is_running, liveness_of

    folder = find_run(arguments.run, option=None) if arguments.run else _runs_by_age()[0]
    state_file = read_small(folder / "state.json")
    state = state_file.content
    if state is None:
        raise ConfigError(
            f"{folder} has no state.json: no run has started there."
            if state_file.trouble is None
            else f"Cannot read {folder}/state.json ({state_file.trouble}). If the run is training, "
            f"`touch {folder}/STOP` makes it save and stop."
        )
    if liveness_of(state) == "elsewhere":
        host = state["host"]
        if arguments.now or arguments.wait:
            raise ConfigError(f"{folder} trains on {host}: use --now and --wait there.")
        (folder / "STOP").touch()
        print(f"{folder}: if it still trains on {host}, it will save after its step and stop.")
        return
    if not is_running(state):
        raise RefocusedError(f"{folder}: the run is not running (status: {state.get('status')}).")
    (folder / "STOP").touch()  # also keeps a supervisor from starting it again
    if arguments.now and liveness_of(state) == "alive":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGKILL)  # rank 0, which the other ranks need
        print(f"{folder}: killed without saving. Its launcher ends the other ranks in a minute.")
    elif state.get("status") == "training":
        print(f"{folder}: stopping; it saves after its current step.")
    else:
        print(f"{folder}: stopping; it has not begun to train, and changes nothing.")
    while arguments.wait and is_running(read_json(folder / "state.json") or {}):
        time.sleep(STOP_POLL_SECONDS)


ROWS = 10  # at most, of a table of losses
POINTS = 2  # at least, of each run's log lines, in a row of training losses
WARNINGS = {  # by what differs of that which losses are measured on
    "tokenizer": "The tokenizers differ: losses per token do not compare. Bits per byte do, if the "
    "validation text is the same.",
    "validation set": "The validation sets differ: their losses do not compare, nor bits per byte.",
    "data": "The training data differ.",
}
# Of a difference of scores, by whether it exceeds `CLEAR` of its standard errors: two equal models
# differ by more than one in a third of all cases, by more than two in one of twenty.
CLEAR = 2
REMARKS = {True: f", beyond {CLEAR} errors", False: f", within {CLEAR} errors", None: ""}
# Of figures: what must be the same where they compare by their difference; the rest by their ratio,
# but for those of which twice as much means nothing.
DIFFERENCES = {
    "training loss": ("tokenizer",),
    "validation loss": ("tokenizer", "validation set"),
    "best validation loss": ("tokenizer", "validation set"),
    "bits per byte": ("validation set",),
}
NOT_COMPARED = ("waited for data, mean", "hottest GPU")
Rows = list[dict[str, Any]]  # each with its `name` or `tokens`, and the `values` of the runs


def run_compare(parser: Parser) -> None:
    """Compare runs as text, JSON or a page."""
    parser.description = (
        "Compare runs by the files in their folders: settings and setup that differ, figures, "
        "losses at equal tokens, and scores on tasks with the error of their difference. A change "
        "in brackets is that from the first run."
    )
    parser.examples = ("runs/one runs/two", "one two --page comparison.html")
    names = "two or more runs: folders, or names in runs/"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=names)
    add = parser.group("output")
    add("--page FILE", "write an HTML page with the curves of all, as monitor --page", type=Path)
    add_json(parser)
    add = parser.group("storage")
    add("--bucket URL", "where to read runs that have no folder here (checkpoint.mirror)")
    add_credentials(parser)
    arguments = parser.read()
    if not arguments.bucket:
        parser.refuse(arguments, "needs --bucket", "gcs_credentials", "gcp_project")
    from refocused.checkpoints.mirror.mirror_logs import fetch_logs
    from refocused.monitor.screen.summary import read_report, write_page

    bucket = bucket_at(arguments.bucket, arguments) if arguments.bucket else None
    views: dict[Path, RunView] = {}
    shown = list[str]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as copies:
        for name in arguments.runs:
            folder = find_run(name, must_exist=bucket is None, option=None)
            shown.append(str(folder))
            if bucket is not None and not folder.is_dir():
                shown[-1], folder = f"{bucket.url}/{folder.name}", Path(copies, folder.name)
                fetch_logs(bucket, folder.name, folder)
            views[folder] = view = _reader(folder).read(time.time())
            if view.state is None and not (view.settings or view.steps):
                raise ConfigError(
                    f"{shown[-1]} holds no run: it has neither state.json nor run.yaml."
                )
        if len({folder.resolve() for folder in views}) < max(2, len(shown)):
            raise ConfigError(f"{' and '.join(arguments.runs)}: name two or more different runs.")
        reports = {name: read_report(*run) for name, run in zip(shown, views.items(), strict=True)}
    record = compare_runs(list(views.values()), reports)
    for warning in record["warnings"]:
        print_message("warning", warning)
    print_result(record, _lines(record), as_json=arguments.json)
    if (page := arguments.page) is not None:
        with_tables = _with_tables(reports, record)
        write_picture(lambda file: write_page(with_tables, file), page, option="--page")
        print_message("hint", f"{page} shows the curves.")


def compare_runs(views: Sequence[RunView], reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return what differs between runs, for JSON; `values` are in the order of the runs.

    Losses are left out where they mean different things: per token of another tokenizer, or on
    another validation set.

    Args:
        views: The runs.
        reports: Their reports, by what the runs are called.
    """
    warnings = list[str]()
    for (name, report), view in zip(reports.items(), views, strict=True):
        warnings += [f"{name}: {text}." for text in report["damage"]]
        if not view.steps:
            warnings.append(f"{name} has no step in its logs: there are no losses to compare.")
    names = ("measured_on", "rows", "setup", "scores", "figures")
    of_all = {name: [report[name] for report in reports.values()] for name in names}
    differs = {
        what: len({measured_on[what] for measured_on in of_all["measured_on"]} - {None}) > 1
        for what in WARNINGS
    }
    differs["validation set"] &= not differs["tokenizer"]
    warnings += [WARNINGS[what] for what in WARNINGS if differs[what]]
    training, validation = (
        [losses_of(getattr(view, name)) for view in views] for name in ("steps", "validations")
    )
    is_comparable = not differs["tokenizer"] and all(training)
    validates = is_comparable and not differs["validation set"]
    scores = compare_scores(of_all["scores"])
    figures = _differing([dict(rows) for rows in of_all["rows"]])
    elsewhere = {"goodput", *(row["name"] for row in scores)}
    for row in figures:
        name = row["name"]
        first, *others = (of_run.get(name) for of_run in of_all["figures"])
        shares_all = not any(differs[what] for what in DIFFERENCES.get(name, ()))
        if first and shares_all and name not in NOT_COMPARED:
            begin, unit = (first, 1.0) if name in DIFFERENCES else (0.0, first)
            row["changes"] = [None if not each else (each - begin) / unit for each in others]
    settings = [{name: _hidden(value) for name, value in view.settings.items()} for view in views]
    return {
        "warnings": warnings,
        "runs": [
            {"run": name, **view.as_record()} for name, view in zip(reports, views, strict=True)
        ],
        "settings": [row for row in _differing(settings) if row["name"] != "run.name"],
        "setup": [
            row for row in _differing(list(map(dict, of_all["setup"]))) if row["name"] != "command"
        ],
        "figures": [row for row in figures if row["name"] not in elsewhere],
        "training_losses": at_tenths(training) if is_comparable else [],
        "validation_losses": at_validations(validation) if validates else [],
        "scores": scores,
    }


def _hidden(value: object) -> object:
    """Return a setting without what may be secret in it."""
    from refocused.config.outputs import without_secrets

    return without_secrets(value) if isinstance(value, str) else value


def _differing(tables: Sequence[Mapping[str, Any]]) -> Rows:
    """Return what differs between tables, in their order; empty ones are unknown."""
    known = [each for each in tables if each]
    return [
        {"name": name, "values": [each.get(name) for each in tables]}
        for name in dict.fromkeys(itertools.chain(*tables))
        if any(each.get(name) != known[0].get(name) for each in known)
    ]


def losses_of(points: Sequence[Any]) -> list[tuple[int, float]]:
    """Return tokens and losses of steps, of each the mean since the one before, or validations."""
    curve = [(point.tokens, getattr(point, "loss_mean", None) or point.loss) for point in points]
    return [(tokens, loss) for tokens, loss in curve if tokens is not None and loss is not None]


def at_tenths(curves: Sequence[Sequence[tuple[int, float]]]) -> Rows:
    """Return the mean losses of each tenth of the shortest run, each `from` and up to `tokens`.

    The parts are larger where a run has less than `POINTS` log lines in a tenth: a line is a mean
    over its tokens, and those of another part would count.
    """
    usual = [
        median(after - before for (before, _), (after, _) in itertools.pairwise([(0, 0), *curve]))
        for curve in curves
    ]
    end, rows = min(curve[-1][0] for curve in curves), Rows()
    parts = max(1, min(ROWS, int(end / max(1, POINTS * max(usual)))))
    for part in range(parts):
        low, high = end * part / parts, end * (part + 1) / parts
        means = list[float]()
        for curve, width in zip(curves, usual, strict=True):
            begins = [curve[0][0] - width, *(tokens for tokens, _ in curve)]
            shares = [
                (max(0, min(high, tokens) - max(low, begin)), loss)
                for begin, (tokens, loss) in zip(begins, curve, strict=False)
            ]
            of_all = sum(share for share, _ in shares)
            if of_all and any(low < tokens <= high for tokens, _ in curve):
                means.append(sum(share * loss for share, loss in shares) / of_all)
        if len(means) == len(curves):
            rows.append({"from": round(low), "tokens": round(high), "values": means})
    return rows


def at_validations(curves: Sequence[Sequence[tuple[int, float]]]) -> Rows:
    """Return the losses of the validations that all runs made at equal tokens, or of some."""
    losses = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*map(set, losses)), reverse=True)
    shown = places[:: math.ceil(len(places) / ROWS) or 1]  # the last one, too
    return [{"tokens": at, "values": [known[at] for known in losses]} for at in shown[::-1]]


def compare_scores(scores: Sequence[Mapping[str, tuple[float, float | None]]]) -> Rows:
    """Return the scores that all runs have, with their differences from the first run's.

    The error of a difference is that of independent items; on the same items it is smaller.
    """
    rows = Rows()
    for name in (name for name in scores[0] if all(name in of_run for of_run in scores)):
        (first, first_error), *others = values = [of_run[name] for of_run in scores]
        changes = list[dict[str, Any]]()
        for value, error in others:
            both = None
            if error is not None and first_error is not None:
                both = math.hypot(error, first_error)
            exceeds = None if both is None else abs(value - first) > CLEAR * both
            changes.append({"value": value - first, "error": both, "exceeds_errors": exceeds})
        rows.append({"name": name, "values": values, "changes": changes})
    return rows


def _lines(record: Mapping[str, Any]) -> list[str]:
    """Return a comparison as text."""
    tables = {
        f"{what} that differ": [
            [
                row["name"],
                *(_cell(row, place, unknown=unknown) for place in range(len(row["values"]))),
            ]
            for row in record[what]
        ]
        for what, unknown in (("settings", "null"), ("setup", "-"), ("figures", "-"))
    }
    runs = [run["run"] for run in record["runs"]]
    lines = [f"{run['run']}: {run['status']}" for run in record["runs"]]
    for title, rows in (tables | _tables(record)).items():
        lines += ["", title, *table(rows, "", *runs, indent=2)] if rows else ["", f"{title}: none"]
    return lines


def _cell(row: Mapping[str, Any], place: int, *, unknown: str = "-") -> str:
    """Return a run's value, and in brackets how a number differs from the first run's."""
    value, (first, *_) = row["values"][place], row["values"]
    words = unknown if value is None else setting_text(value)
    if not place or value == first or "changes" not in row:
        return words
    change = row["changes"][place - 1]
    if row["name"] in DIFFERENCES:  # of the loss, which other numbers may follow
        return re.sub(r"^[\d.]+", lambda loss: loss[0] + known(" ({:+.4f})", change), words)
    return words + known(" (x{:.3g})", change)


def _tables(record: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return losses and scores as text, by title: rows of a name and a cell for each run."""
    from refocused.monitor.screen.summary import score_text

    tables = dict[str, list[list[str]]]()
    titles = {
        "training_losses": "mean training losses by tokens",
        "validation_losses": "validation losses at so many tokens",
    }
    for what, title in titles.items():
        rows = tables[title] = []
        for row in record[what]:
            first, *others = row["values"]
            cells = [f"{loss:.4f} ({loss - first:+.4f})" for loss in others]
            begin = known("{:,} to ", row.get("from"))
            rows.append([f"{begin}{row['tokens']:,}", f"{first:.4f}", *cells])
    rows = tables["scores"] = []
    for row in record["scores"]:
        first, *others = map(score_text, row["values"])
        cells = [
            f"{score} ({change['value']:+.4f}{known(' +- {:.4f}', change['error'])}"
            f"{REMARKS[change['exceeds_errors']]})"
            for score, change in zip(others, row["changes"], strict=True)
        ]
        rows.append([row["name"], first, *cells])
    return tables


def _with_tables(reports: Mapping[str, Report], record: Mapping[str, Any]) -> list[Report]:
    """Return reports for a page, with the run's part of the tables and of the changes."""
    tables = _tables(record).items()
    return [
        report
        | {
            "compared": {
                title: [(cells[0], cells[place + 1]) for cells in rows] for title, rows in tables
            },
            "changes": {row["name"]: _cell(row, place) for row in record["figures"]},
        }
        for place, report in enumerate(reports.values())
    ]
