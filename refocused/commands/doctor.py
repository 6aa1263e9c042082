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
from collections.abc import Sequence
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
    from refocused.doctor.examination import Examination
    from refocused.doctor.finding import Finding

WIDEST = 100
INDENT = " " * 19


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="doctor",
        description="Check everything that a run needs: packages, GPUs, memory, disks, buckets, "
        "data, ranks, and its first step. It leaves nothing but shards in data.cache.",
        epilog="Each line is ok, warn or fail; the exit code is 3 when one fails. It checks this "
        "machine only; run it on each of several.",
    )
    add = parser.add_argument
    run_file = "run file, or the name of one in config/runs (default: demo)"
    add("--config", action=Once, default="demo", metavar="FILE", help=run_file)
    add("--run", metavar="NAME", help="the run's name")
    ranks = "ranks on this machine (default: its GPUs, or two without any)"
    add("--gpus", type=count, metavar="N", help=ranks)
    add("--quick", action="store_true", help="start no ranks, and read fewer tokens")
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)
    add("overrides", nargs="*", metavar="section.key=value")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    began = time.monotonic()
    # Findings report what was retried; without a handler it would also be printed among them.
    logging.getLogger("refocused").addHandler(logging.NullHandler())
    try:
        from refocused.config.load_run import load_run
        from refocused.data.manifest.vocabulary import decide_vocabulary
        from refocused.doctor.examination import Examination

        overrides = split_overrides(arguments.overrides)
        loaded = load_run(arguments.config, overrides, name=arguments.run)
        with contextlib.suppress(BucketError, ShardError):  # a finding reports it later
            loaded = decide_vocabulary(loaded, lambda url: place(url, arguments))
        examination = Examination(
            loaded=loaded,
            config=arguments.config,
            say=lambda text: print(f"      {text} ...", file=sys.stderr, flush=True),
            overrides=tuple(overrides),
            name=arguments.run,
            gpus=arguments.gpus,
            is_quick=arguments.quick,
            credentials_file=arguments.gcs_credentials,
            project=arguments.gcp_project,
        )
        terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as ^C does
        try:
            with quiet_on_a_closed_pipe():
                return _examine(examination, as_json=arguments.json, began=began)
        finally:
            signal.signal(signal.SIGTERM, terminate)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _examine(examination: Examination, *, as_json: bool, began: float) -> int:
    import refocused

    run, file = examination.loaded.config.run.name, examination.loaded.file.name
    if not as_json:
        print(f"refocused {refocused.__version__}   doctor   run {run} ({file})")
    findings: list[Finding] = []
    for finding in examination.findings():
        findings.append(finding)
        if not as_json:
            width = min(WIDEST, shutil.get_terminal_size().columns)
            print("\n".join(lines_of(finding, width=width)), flush=True)
    seconds = time.monotonic() - began
    levels = [finding.level for finding in findings]
    fails, warnings = levels.count("fail"), levels.count("warn")
    if as_json:
        records = [dataclasses.asdict(finding) for finding in findings]
        record = {"run": run, "ok": not fails, "seconds": round(seconds, 1), "findings": records}
        print(json.dumps(record, indent=1))
    else:
        first = f"{fails} fail" if fails else "nothing fails"
        print(f"done  {first}, {warnings} warn, of {len(levels)}; {duration_text(seconds)}")
    return ExitCode.CHECK_FAILED if fails else ExitCode.OK


def lines_of(finding: Finding, *, width: int) -> list[str]:
    """Return a finding as text in lines of at most `width` columns; long words stay whole."""
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=f"{finding.level:<5} {finding.check:<12} ",
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = wrapper.wrap(finding.text)
    wrapper.initial_indent, wrapper.subsequent_indent = f"{INDENT}-> ", f"{INDENT}   "
    return lines + wrapper.wrap(finding.fix or "")


if __name__ == "__main__":
    sys.exit(main())
