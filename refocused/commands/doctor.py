"""`launch/doctor.py`: whether this machine can train a run, before it is paid for by the hour."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Once,
    Parser,
    add_credentials,
    place,
    quiet_on_a_closed_pipe,
    split_overrides,
)
from refocused.commands.output import count, duration_text
from refocused.system.errors import BucketError, ExitCode, RefocusedError, ShardError

if TYPE_CHECKING:
    from refocused.doctor.examination import Examinee
    from refocused.doctor.finding import Finding

WIDEST = 100
INDENT = " " * 19


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="doctor",
        description="Look at everything that a run needs: packages, GPUs, memory, disks, buckets, "
        "data, ranks, and its first step. It leaves nothing but shards in data.cache.",
        epilog="Each line is ok, warn or fail; the exit code is 3 when one fails. It looks at this "
        "machine alone: of several, ask each.",
    )
    add = parser.add_argument
    add(
        "--config",
        action=Once,
        default="demo",
        metavar="FILE",
        help="run file, or the name of one in config/runs (default: demo)",
    )
    add("--run", metavar="NAME", help="the run's name")
    add(
        "--gpus",
        type=count,
        metavar="N",
        help="ranks on this machine (default: its GPUs, or two without any)",
    )
    add("--quick", action="store_true", help="start no ranks, and read fewer tokens")
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)
    add("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    began = time.monotonic()
    # What is tried again is a matter of the finding; without a handler it would be printed amid.
    logging.getLogger("refocused").addHandler(logging.NullHandler())
    try:
        from refocused.config.load_run import load_run

        overrides = split_overrides(arguments.overrides)
        loaded = load_run(arguments.config, overrides, name=arguments.run)
        from refocused.data.manifest.vocabulary import decide_vocabulary
        from refocused.doctor.examination import Examinee

        with contextlib.suppress(BucketError, ShardError):  # a finding says it later
            loaded = decide_vocabulary(loaded, lambda url: place(url, arguments))

        who = Examinee(
            loaded=loaded,
            config=arguments.config,
            overrides=tuple(overrides),
            name=arguments.run,
            gpus=arguments.gpus,
            is_quick=arguments.quick,
            credentials_file=arguments.gcs_credentials,
            project=arguments.gcp_project,
        )
        with quiet_on_a_closed_pipe(), _terminated_as_interrupted():
            return _examine(who, as_json=arguments.json, began=began)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl+C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _examine(who: Examinee, *, as_json: bool, began: float) -> int:
    import refocused
    from refocused.doctor.examination import Examination
    from refocused.doctor.finding import any_fails

    run = who.loaded.config.run.name
    if not as_json:
        print(f"refocused {refocused.__version__}   doctor   run {run} ({who.loaded.file.name})")
    findings: list[Finding] = []
    for finding in Examination(who, say=_say).findings():
        findings.append(finding)
        if not as_json:
            print("\n".join(lines_of(finding, width=_width())), flush=True)
    seconds = time.monotonic() - began
    fails = any_fails(findings)
    if as_json:
        record = {
            "run": run,
            "ok": not fails,
            "seconds": round(seconds, 1),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(record, indent=1))
    else:
        print(_verdict(findings, seconds=seconds))
    return ExitCode.CHECK_FAILED if fails else ExitCode.OK


def lines_of(finding: Finding, *, width: int) -> list[str]:
    """Return what a person reads of a finding, in lines of at most so many columns."""
    text = textwrap.TextWrapper(
        width=width,
        initial_indent=f"{finding.level:<5} {finding.check:<12} ",
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    fix = textwrap.TextWrapper(
        width=width,
        initial_indent=f"{INDENT}-> ",
        subsequent_indent=f"{INDENT}   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.wrap(finding.text) + ([] if finding.fix is None else fix.wrap(finding.fix))


def _verdict(findings: Sequence[Finding], *, seconds: float) -> str:
    fails = sum(finding.level == "fail" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    first = f"{fails} fail" if fails else "nothing fails"
    return f"done  {first}, {warnings} warn, of {len(findings)}; {duration_text(seconds)}"


def _say(text: str) -> None:
    print(f"      {text} ...", file=sys.stderr, flush=True)


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


if __name__ == "__main__":
    sys.exit(main())
