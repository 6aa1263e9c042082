"""Write the report of a certificate, a Markdown page, from its results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from measuring import Record

from refocused.system.atomic_files import replace_file

RESULT = "@@ "  # how a line of a slice's output begins that holds a result as JSON
COLUMNS = (
    ("time", "ms", "{:,.2f} ms"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("expected MFU", "expected_mfu", "{:.1%}"),
    ("idle", "idle", "{:.1%}"),
    ("host waits a step", "waits", "{:.1f}"),
    ("peak", "peak_gib", "{:.2f} GiB"),
    ("plan", "plan_gib", "{:.2f} GiB"),
    ("error", "error_of_results", "{:.1e}"),
    ("error in torch", "error_in_torch", "{:.1e}"),
    ("steps", "steps", "{}"),
)
DEFAULTS = (
    ("measured in", "title", "{}"),
    ("the default", "default_ms", "{:,.2f} ms"),
    ("this", "ms", "{:,.2f} ms"),
    ("this takes", "ratio", "{:.2f} times as long"),
)
SETTINGS = (  # whose defaults a report should support, or change
    *("model.compile", "model.head", "model.head_chunk_tokens", "model.scan", "model.attention"),
    *("precision.fp8", "zero.stage", "model.activation_checkpointing", "zero.offload_optimizer"),
)


def write_report(file: Path, results: Sequence[Record], *, waiting: Sequence[str]) -> None:
    """Write the page of a certificate from what is known so far; `waiting` names other slices."""
    facts: Record = {}
    cases: dict[str, dict[str, Record]] = {}  # by title and form
    for result in results:
        if result["what"] in ("machine", "device"):
            facts |= result
        if "case" in result and "error" not in result and "left_out" not in result:
            rows = cases.setdefault(f"{result['slice']}: {result['case']}", {})
            rows[result["form"]] = rows.get(result["form"], {}) | result
    name = facts.get("name", "CPU (a walk through the path, no certificate)")
    about = ("torch", "triton", "deepspeed", "transformers", "python", "processor", "cores")
    lines = [
        f"# {name}, {facts.get('date')}",
        "",
        f"{', '.join(f'{key} {facts[key]}' for key in about if key in facts)}. Made by "
        "`benchmarks/certify_gpu.py`; each result is a line of `results.jsonl`.",
    ]
    if waiting:
        lines += ["", f"**Not complete.** Not run to their ends: {', '.join(waiting)}."]
    lines += ["", "## Failures", "", *([] if failures(results) else ["None."])]
    for result in failures(results):
        lines += [f"- {_place(result)}: {result['error']}", "", "```"]
        lines += [*result.get("trace", ()), "```", ""]
    lines += ["", "## What the defaults rest on", "", *_defaults(cases)]
    for title, rows in cases.items():
        lines += ["", f"## {title}", "", *_table(rows.items(), COLUMNS), ""]
        for form, row in rows.items():
            lines += [f"- {form}: {row['computed']}"] if row.get("computed") else []
            if "host_share" in row:
                lines += [f"- {form}: the host needs {row['host_share']:.0%} of a step to queue it"]
                lines += [f"  - {times:.1f} waits: {at}" for at, times in row["places"].items()]
            for key in ("kinds_ms", "kernels_ms"):
                lines += [f"- {form}: {key}: {_listed(row[key])}"] if key in row else []
    lines += ["", "## Machine and runs", ""]
    for result in results:
        if "case" not in result and "error" not in result and "left_out" not in result:
            hidden = ("slice", "at", "what", "listed")
            shown = {key: value for key, value in result.items() if key not in hidden}
            lines += [f"- {_place(result)}: {_listed(shown)}"]
            lines += [f"  - {line}" for line in result.get("listed", ())]
    left_out = [result for result in results if "left_out" in result]
    lines += ["", "## Left out", ""] if left_out else []
    lines += [f"- {_place(result)}: {result['left_out']}" for result in left_out]
    replace_file(
        file, ("\n".join(lines) + "\n").encode()
    )  # whole, also in a sitting that is killed


def failures(results: Sequence[Record]) -> list[Record]:
    """Return the results that say what failed."""
    return [result for result in results if "error" in result]


def _place(result: Record) -> str:
    keys = ("slice", "case", "form", "what")
    return ": ".join(str(result[key]) for key in keys if key in result)


def _defaults(cases: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """Return which measurements support the default of each setting, and which are missing."""
    rows: list[tuple[str, Record]] = []
    for title, forms in cases.items():
        default = next((row["ms"] for row in forms.values() if row.get("default")), None)
        for row in forms.values():
            if default is not None and row.get("instead"):
                found = {"title": title, "default_ms": default, "ratio": row["ms"] / default}
                rows.append((row["instead"], {**row, **found}))
    unknown = [one for one in SETTINGS if not any(name.startswith(f"{one}=") for name, _ in rows)]
    missing = f"Measured beside no other value, so resting on nothing here: {', '.join(unknown)}."
    return [*(_table(rows, DEFAULTS) if rows else ()), *(["", missing] if unknown else ())]


def _listed(facts: Record) -> str:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}
    return ", ".join(f"{key} {value}" for key, value in rounded.items() if value is not None)


def _table(
    rows: Iterable[tuple[str, Record]], columns: Sequence[tuple[str, str, str]]
) -> list[str]:
    """Return a Markdown table; missing values are dashes, columns without any are left out."""
    rows = list(rows)
    columns = [one for one in columns if any(row.get(one[1]) is not None for _, row in rows)]
    head = ["", *(heading for heading, _, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for title, row in rows:
        cells = ["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return lines
