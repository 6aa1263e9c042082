"""Run benchmark cases in separate processes, measure their cost, write tables and JSON."""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("/tmp/refocused-benchmarks")
SHOWN = 4  # numbers of a case that are printed as soon as they are measured
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table, measured by a separate process."""

    name: str  # in the table
    command: Sequence[str]  # arguments of the interpreter; the last line it prints is a JSON object
    python: str = sys.executable  # the interpreter, perhaps of another environment


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table: a key of the records, its heading, and how a number is written."""

    key: str
    heading: str
    form: str = "{:,.1f}"
    scale: float = 1.0  # what the number is multiplied by


SPREAD = (  # of `spread`
    Column("parameters", "parameters", "{:,.0f}"),
    Column("steps", "steps", "{:,.0f}"),
    Column("rate", "rate", "{:.1e}"),
    Column("loss_min", "loss: min", "{:.4f}"),
    Column("loss", "median", "{:.4f}"),
    Column("loss_max", "max", "{:.4f}"),
    Column("seconds_min", "seconds: min", "{:,.1f}"),
    Column("seconds", "median", "{:,.1f}"),
    Column("seconds_max", "max", "{:,.1f}"),
)


def measure(cases: Sequence[Case], *, repeats: int, timeout_s: float) -> dict[str, list[Record]]:
    """Run every case `repeats` times, in turns, so that a slow minute of the machine meets all.

    A case that fails is told with its last lines and left out from then on.
    """
    found: dict[str, list[Record]] = {case.name: [] for case in cases}
    failed: set[str] = set()
    for repeat in range(repeats):
        for case in cases:
            if case.name in failed:
                continue
            say(f"{repeat + 1}/{repeats}  {case.name}")
            record = _run(case, repeat=repeat, timeout_s=timeout_s)
            if record is None:
                failed.add(case.name)
            else:
                found[case.name].append(record)
                numbers = [(k, v) for k, v in record.items() if isinstance(v, int | float)]
                say("     " + "  ".join(f"{key} {value:.4g}" for key, value in numbers[:SHOWN]))
    return {name: records for name, records in found.items() if records}


def medians(records: Sequence[Record]) -> Record:
    """Return the median of each number, over the records that have it."""
    keys = dict.fromkeys(key for record in records for key in record)
    found: Record = {}
    for key in keys:
        values = [record[key] for record in records if record.get(key) is not None]
        found[key] = statistics.median(values) if values else None
    return found


def lines_of(file: Path) -> list[Record]:
    """Return the finished cases, one JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def finished(file: Path, case: Record, measure: Callable[[], Record]) -> Record:
    """Return the line of a finished case; measure it and add its line if there is none."""
    for line in lines_of(file):
        if case.items() <= line.items():
            return line
    record = {**case, **measure(), "processor": machine()["processor"]}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    return record


def spread(records: Sequence[Record]) -> Record:
    """Return the median, minimum and maximum of losses and seconds, and what all have alike."""
    row: Record = dict(records[0])
    for key in ("loss", "seconds", "steps"):
        values = [record[key] for record in records if record[key] is not None]
        if values:
            row[key] = statistics.median(values)
            row[f"{key}_min"], row[f"{key}_max"] = min(values), max(values)
    return row


def spread_table(rows: Mapping[str, Record], *, title: str) -> str:
    """Write records of `spread` as a table."""
    shown = [one for one in SPREAD if any(row.get(one.key) is not None for row in rows.values())]
    return table(rows, shown, title=title)


def table(rows: Mapping[str, Record], columns: Sequence[Column], *, title: str) -> str:
    """Write rows as an aligned text table; missing values are dashes."""
    lines = [["", *(column.heading for column in columns)]]
    lines += [[name, *(_written(row.get(c.key), c) for c in columns)] for name, row in rows.items()]
    first, *others = ([len(cell) for cell in cells] for cells in zip(*lines, strict=True))
    form = "  ".join([f"{{:<{max(first)}}}", *(f"{{:>{max(widths)}}}" for widths in others)])
    text = [form.format(*line) for line in lines]
    return "\n".join(["", title, "-" * len(title), *text])


def parser_of(
    script: str, description: str | None, *, repeats: int | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with `--json`, and `--repeats` where it has some."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    name = Path(script).stem
    parser.add_argument("--json", type=Path, default=WORK / f"{name}.json", help="(%(default)s)")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="(%(default)s)")
    return parser


def write_report(chosen: argparse.Namespace, results: Record) -> None:
    """Write all results, with the arguments and the machine."""
    path: Path = chosen.json
    report = {"machine": machine(), "settings": vars(chosen), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    say(f"Written to {path}")


def machine() -> Record:
    """Describe the machine."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def say(text: str) -> None:
    """Print progress beside the tables."""
    print(text, file=sys.stderr, flush=True)


def private_mib(data: Path) -> float:
    """Return the memory that reading costs this process and its descendants, in MiB.

    Their heaps, what they share with each other counted once, and the pages of files below `data`
    that they map; code is left out, because other programs on the machine share it or not. The
    lists are read line by line: a list of their 20,000 lines would itself be 2 MiB of this memory.
    """
    kib, counts = 0, False
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        for line in _streamed(f"/proc/{process.pid}/smaps"):
            fields = line.split()
            if not fields[0].endswith(":"):  # a mapping's first line: addresses, ..., its file
                path = fields[5] if len(fields) > 5 else ""
                is_file = path.startswith("/") and not path.startswith("/dev/shm")
                counts = not is_file or path.startswith(str(data.resolve()))
            elif fields[0] == "Pss:" and counts:
                kib += int(fields[1])
    return kib / 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and its living descendants, in seconds."""
    seconds = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def environment(folder: Path, *install: str) -> str | None:
    """Make an environment that sees this one's packages and has others beside; return its Python.

    `install` are arguments of `pip install`. None, with a printed reason: they cannot be had.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return str(python)
    say(f"Installing {' '.join(install)} into {folder}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(f"{own}\n{ROOT}\n")
    command = [str(python), "-m", "pip", "install", "--quiet", *install]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"skipped: {' '.join(install)}: {done.stderr.strip()[-300:]}")
        return None
    ready.touch()
    return str(python)


def launched(words: Sequence[str], *, folder: Path, timed: bool) -> float | None:
    """Run Python to its end; return the seconds of a timed process, on all cores, else None."""
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    variables.pop("OMP_NUM_THREADS", None)
    if not timed:
        variables["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"failed in {folder}:\n{done.stdout[-2000:]}")
    return seconds if timed else None


def _run(case: Case, *, repeat: int, timeout_s: float) -> Record | None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    variables["BENCHMARK_REPEAT"] = str(repeat)
    try:
        done = subprocess.run(
            [case.python, *case.command],
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        record: Record = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        told = getattr(error, "stderr", None) or str(error)
        told = told.decode(errors="replace") if isinstance(told, bytes) else told
        lines = told.strip().splitlines()[-4:]
        say(f"skipped: {case.name}: " + " | ".join(lines))
        return None
    return record


def _written(value: Any, column: Column) -> str:
    return "-" if value is None else column.form.format(value * column.scale)


def _streamed(path: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), Path(path).open() as file:
        yield from file
