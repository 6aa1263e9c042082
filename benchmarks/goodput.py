"""Time a restart after `kill -9` of a rank, by phase.

    .venv/bin/python benchmarks/goodput.py [--kills 3] [--json FILE]

The demonstration trains under the supervisor with `--restarts`. Each kill hits rank 0 after a
checkpoint. The CPU time is that of rank 0 and of the launchers before it: what a restart takes on
free cores, without the end of the crashed launch.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import CLOCK_TICKS, Column, Record, medians, parser_of, say, table, write_report

from refocused.metrics.jsonl import JsonLinesTail
from refocused.metrics.run_time import PERFORMANCE_FILE

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    *("checkpoint.interval=10", "log.interval=1", "evaluation.interval=0", "run.steps=100000"),
    *("checkpoint.export_final=false", "evaluation.sample_prompt=null", "checkpoint.mirror=null"),
)
TARGET_SECONDS, LIMIT_SECONDS = 15.0, 600.0


def lines(run: Path, kind: str) -> list[Record]:
    """Return the records of a kind in a run's performance file."""
    return [one for one in JsonLinesTail(run / PERFORMANCE_FILE).records() if one["kind"] == kind]


def critical_cpu_seconds(rank: int) -> float:
    """Return the CPU time of a rank and of its two launchers, which start one after the other."""
    seconds = 0.0
    for _ in range(3):
        fields = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        rank = int(fields[1])
    return seconds


@contextlib.contextmanager
def training(folder: Path) -> Iterator[Path]:
    """Train the demonstration under the supervisor; yield the run's folder."""
    command = [sys.executable, "-P", "-m", "refocused.commands.launch", "--config", "demo"]
    command += ["--restarts", "3", "--run", "demo", f"run.directory={folder}", *SETTINGS]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RANKS": "2", "DS_ACCELERATOR": "cpu"}
    log = (folder / "log").open("w")
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log) as supervisor:
        try:
            yield folder / "demo"
        finally:
            supervisor.send_signal(signal.SIGTERM)


def restarts(kills: int) -> list[Record]:
    """Kill rank 0 again and again; return the phases of each restart, and its save's stall."""
    found: list[Record] = []

    def wait_for(kind: str, count: int) -> Record:
        until = time.monotonic() + LIMIT_SECONDS
        while len(those := lines(run, kind)) < count:
            if time.monotonic() > until:
                sys.exit((run.parent / "log").read_text())
            time.sleep(0.1)
        return those[count - 1]

    with tempfile.TemporaryDirectory() as temporary, training(Path(temporary)) as run:
        wait_for("start", 1)
        for number in range(1, kills + 1):
            save = wait_for("save", len(lines(run, "save")) + 1)
            load, began = os.getloadavg()[0], time.monotonic()
            os.kill(json.loads((run / "state.json").read_text())["pid"], signal.SIGKILL)
            record = wait_for("start", number + 1)
            whole, rank = time.monotonic() - began, json.loads((run / "state.json").read_text())
            phases = {name: value for name, value in record.items() if name.endswith("_seconds")}
            cpu, stall = critical_cpu_seconds(rank["pid"]), save["save_stall_seconds"]
            found.append({**phases, "whole": whole, "cpu": cpu, "load": load, "stall": stall})
            say(f"restart {number}: {found[-1]}")
    return found


def main() -> None:
    """Kill, measure, print the table."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--kills", type=int, default=3, help="(%(default)s)")
    chosen = parser.parse_args()
    rows = {f"restart {number}": one for number, one in enumerate(restarts(chosen.kills), 1)}
    rows["median"] = middle = medians(list(rows.values()))
    columns = [Column(name, name.removesuffix("_seconds").replace("_", " ")) for name in middle]
    print(table(rows, columns, title="Seconds from a kill to a new step; `cpu` without the exit"))
    print(f"CPU time after the exit: {middle['cpu']:.1f} of {TARGET_SECONDS:.0f} s")
    write_report(chosen, {"restarts": rows})


if __name__ == "__main__":
    main()
