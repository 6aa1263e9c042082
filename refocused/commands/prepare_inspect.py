"""`prepare_data inspect`: what a data set really holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_reading_options,
    data_settings,
    place,
)
from refocused.commands.output import count, size_text
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.prepare.inspect_data import DataReport

FOLDER_SAMPLE = 100_000_000
BUCKET_SAMPLE = 8_000_000


def add_inspect_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    add("--json", action="store_true", help="print JSON")
    add("--picture", type=Path, metavar="FILE.png", help="draw the ids and the lengths")
    sample = parser.add_mutually_exclusive_group()
    sample.add_argument(
        "--sample-tokens", type=count, metavar="N", help="read so many (1e8; 8e6 of a gs:// source)"
    )
    sample.add_argument("--all", action="store_true", help="read everything")
    add("--vocabulary", type=count, metavar="N", help="ids that the model knows")
    add_reading_options(parser)
    add_credentials(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Look, and print; the exit code says whether every file can be used."""
    from refocused.prepare.inspect_data import inspect_data

    usual = BUCKET_SAMPLE if "://" in arguments.source else FOLDER_SAMPLE
    report = inspect_data(
        place(arguments.source, arguments),
        data_settings(arguments, arguments.source),
        sample_tokens=2**62 if arguments.all else arguments.sample_tokens or usual,
        vocabulary=arguments.vocabulary,
    )
    if arguments.json:
        _print_json(report)
    else:
        _print(report)
    if arguments.picture is not None:
        from refocused.prepare.inspect_data import draw_report

        draw_report(report, arguments.picture)
    return ExitCode.CHECK_FAILED if report.problems else ExitCode.OK


def _print_json(report: DataReport) -> None:
    import dataclasses
    import json

    print(json.dumps(dataclasses.asdict(report), indent=1))


def _print(report: DataReport) -> None:
    sample = report.sample
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.kinds.items()) or "none"
    rows = [
        ("files", f"{report.files} ({kinds}), {size_text(report.bytes)}"),
        ("tokens", f"{report.tokens:,}"),
        ("padding", _share(report.padding_fraction)),
        ("bytes", _number(report.bytes_per_token, "a token")),
        ("documents", _number(report.documents, "")),
        ("tokenizer", report.tokenizer or "not said"),
        ("read", f"{sample.tokens:,} tokens of {report.sampled_files} files"),
        ("ids", _ids(report)),
        ("repeated", _repeated(report)),
    ]
    print(report.url)
    for name, value in rows:
        print(f"  {name:<10} {value}")
    if sample.most_frequent:
        usual = ", ".join(f"{one} {share:.1%}" for one, share in sample.most_frequent[:5])
        print(f"  {'frequent':<10} {usual}")
    for note in report.notes:
        print(f"  note: {note}")
    for problem in report.problems:
        print(f"  PROBLEM: {problem}")


def _ids(report: DataReport) -> str:
    sample = report.sample
    if sample.max_id is None:
        return "none"
    return f"{sample.min_id} to {sample.max_id}, {sample.distinct_ids:,} different"


def _repeated(report: DataReport) -> str:
    sample = report.sample
    if sample.documents is None:
        return "not known: name the id between documents by --separator-id"
    return f"{sample.duplicate_documents:,} of {sample.documents:,} documents or rows read"


def _share(fraction: float | None) -> str:
    return "not known" if fraction is None else f"{fraction:.1%} of what is stored"


def _number(number: float | None, unit: str) -> str:
    if number is None:
        return "not known"
    return f"{number:,} {unit}".rstrip() if isinstance(number, int) else f"{number:.2f} {unit}"
