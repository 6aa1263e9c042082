"""Measure the cost of a layer over long sequences, forward and backward, by family.

    .venv/bin/python benchmarks/long_context.py [--families resonance] [--repeats 3] [--json FILE]

Each case is a process of its own on one thread: the CPU time of its fastest pass, and how far its
memory rose above what it had before. Freed memory is kept for the next pass, as torch's allocator
does on a GPU: the C library would give tensors beyond 32 MiB back to the kernel and have them
cleared again, so that a long sequence paid for its pages and a short one did not. The second table
holds the limits beside what was measured.
"""

import argparse
import ctypes
import json

from long_context_cases import CASES
from measuring import Case, Column, Record, measure, medians, parser_of, table, write_report

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's settings, in glibc's malloc.h
COLUMNS = (
    Column("cpu_seconds", "CPU s", "{:.3f}"),
    Column("tokens", "tokens", "{:,.0f}"),
    Column("us_per_token", "us/token", "{:.2f}"),
    Column("peak_mib", "peak MiB", "{:,.0f}"),
    Column("bytes_per_token", "bytes/token", "{:,.0f}"),
    Column("error", "error", "{:.1e}"),
)
# Maximum ratios between the figures of two cases.
LIMITS = (
    ("cpu_seconds", "convolution, real, last axis", "convolution, complex, middle axis", 0.6),
    ("us_per_token", "resonance layer, 65,536", "resonance layer, 8,192", 1.25),
    ("bytes_per_token", "resonance layer, 65,536", "resonance layer, 8,192", 1.1),
    ("cpu_seconds", "resonance layer, 16,384", "sdpa layer, 16,384", 0.1),
    ("cpu_seconds", "ten scan, in chunks, compiled", "ten scan, by FFT, compiled", 0.35),
    ("us_per_token", "ten layer, 65,536", "ten layer, 8,192", 1.1),
    ("bytes_per_token", "ten layer, 65,536", "ten layer, 8,192", 1.1),
    ("cpu_seconds", "ten layer, 16,384", "sdpa layer, 16,384", 0.025),
    ("us_per_token", "recall layer, 65,536", "recall layer, 8,192", 1.1),
    ("bytes_per_token", "recall layer, 65,536", "recall layer, 8,192", 1.1),
    ("cpu_seconds", "recall layer, 16,384", "sdpa layer, 16,384", 0.15),
)


def main() -> None:
    """Measure every case, print both tables, write the JSON."""
    parser = parser_of(__file__, __doc__, repeats=3)
    parser.add_argument("--families", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        family, name = arguments.case
        keep_freed_memory()
        print(json.dumps(CASES[family][name]()))
        return
    families = {name: family for family in arguments.families for name in CASES[family]}
    cases = [Case(name, [__file__, "--case", family, name]) for name, family in families.items()]
    found = measure(cases, repeats=arguments.repeats, timeout_s=1200)
    rows = {name: medians(records) for name, records in found.items()}
    print(table(rows, COLUMNS, title="One layer, forward and backward, one thread"))
    ratios = compared(rows)
    columns = (Column("ratio", "ratio", "{:.3g}"), Column("at_most", "at most", "{:.3g}"))
    print(table(ratios, columns, title="Against the limits"))
    write_report(arguments, {**rows, **ratios})


def compared(rows: dict[str, Record]) -> dict[str, Record]:
    """Return the ratios that have limits, of the cases that were measured."""
    return {
        f"{key}: {name} over {other}": {
            "ratio": rows[name][key] / rows[other][key],
            "at_most": limit,
        }
        for key, name, other, limit in LIMITS
        if name in rows and other in rows
    }


def keep_freed_memory() -> None:
    """Make the C library keep freed memory of any size for the next allocations."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, -1)):
        raise SystemExit("mallopt refuses to keep freed memory: this benchmark needs glibc.")


if __name__ == "__main__":
    main()
