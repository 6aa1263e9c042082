"""What a layer costs over long windows, forward and backward, family by family.

    .venv/bin/python benchmarks/long_context.py [--families resonance] [--repeats 3] [--json FILE]

Each case is a process of its own on one thread: the CPU time of its fastest pass, and how far its
memory rose above what it had before. Freed memory is kept for the next pass, as torch's allocator
does on a GPU: the C library would give tensors beyond 32 MiB back to the kernel and have them
cleared again, so that a long window paid for its pages and a short one did not. The second table
holds what is promised of them to what was measured. `benchmarks/long_context_gpu.py` measures whole
stacks on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import Case, Column, Record, measure, medians, say, table, write_report

FAMILIES = ("resonance", "ten")  # each has its cases in long_context_FAMILY.py
PASSES = 3
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's settings, in glibc's malloc.h
COLUMNS = (
    Column("cpu_seconds", "CPU s", "{:.3f}"),
    Column("tokens", "tokens", "{:,.0f}"),
    Column("us_per_token", "us/token", "{:.2f}"),
    Column("peak_mib", "peak MiB", "{:,.0f}"),
    Column("bytes_per_token", "bytes/token", "{:,.0f}"),
    Column("error", "error", "{:.1e}"),
)


@dataclasses.dataclass(frozen=True)
class Promise:
    """What is claimed of the cases."""

    claim: str  # in words
    # from the rows of the table, by the names of their cases
    value: Callable[[Mapping[str, Record]], float]
    at_most: float | None = None  # the limit, or None
    at_least: float | None = None  # the limit, or None

    def measured(self, rows: Mapping[str, Record]) -> Record | None:
        """Return value, limit and whether it holds; None where a case is missing."""
        try:
            value = self.value(rows)
        except KeyError:
            return None
        if self.at_most is not None:
            return {"value": value, "limit": self.at_most, "holds": float(value <= self.at_most)}
        assert self.at_least is not None, "a promise has a limit"
        return {"value": value, "limit": self.at_least, "holds": float(value >= self.at_least)}


def main() -> None:
    """Measure every case, print both tables, write the JSON."""
    parser = argparse.ArgumentParser(description="What a layer costs over long windows.")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        keep_freed_memory()
        print(json.dumps(cases_of(arguments.case[0])[arguments.case[1]]()))
        return
    script = str(Path(__file__))
    cases = [
        Case(name, [script, "--case", family, name])
        for family in arguments.families
        for name in cases_of(family)
    ]
    found = measure(cases, repeats=arguments.repeats, timeout_s=1200)
    rows = {name: medians(records) for name, records in found.items()}
    print(table(rows, COLUMNS, title="One layer, forward and backward, one thread"))
    promises = promised(arguments.families, rows)
    columns = (Column("value", "measured", "{:.3g}"), Column("limit", "limit", "{:.3g}"))
    print(table(promises, (*columns, Column("holds", "holds", "{:.0f}")), title="Promises"))
    if arguments.json is not None:
        settings = {"families": list(arguments.families), "repeats": arguments.repeats}
        write_report(arguments.json, settings=settings, results={**rows, **promises})


def cases_of(family: str) -> Mapping[str, Callable[[], Record]]:
    """Return a family's cases by name."""
    cases: Mapping[str, Callable[[], Record]]
    cases = importlib.import_module(f"long_context_{family}").CASES
    return cases


def promised(families: Sequence[str], rows: Mapping[str, Record]) -> dict[str, Record]:
    """Hold every family's promises to the rows; what was not measured is said and left out."""
    found = {}
    for family in families:
        promises: tuple[Promise, ...] = importlib.import_module(f"long_context_{family}").PROMISES
        for promise in promises:
            record = promise.measured(rows)
            if record is None:
                say(f"not measured: {promise.claim}")
            else:
                found[promise.claim] = record
    return found


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, whatever its size, for what is allocated next."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, -1)):
        raise SystemExit("mallopt refuses to keep freed memory: this benchmark needs glibc.")


def cost(step: Callable[[], Any], *, tokens: int) -> Record:
    """Measure a step: its CPU time, fastest of some, and what its memory rose by."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(PASSES):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "cpu_seconds": min(times),
        "tokens": tokens,
        "us_per_token": min(times) / tokens * 1e6,
        "peak_mib": peak_kib / 1024,
        "bytes_per_token": peak_kib * 1024 / tokens,
    }


if __name__ == "__main__":
    main()
