"""`doctor`: check whether this machine can train a run."""

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
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Once,
    Parser,
    add_credentials,
    add_json,
    add_overrides,
    bucket_at,
    credentials_of,
)
from refocused.commands.output import count, positive
from refocused.system.errors import BucketError, ConfigError, ExitCode, ShardError
from refocused.system.number_text import duration

if TYPE_CHECKING:
    from refocused.doctor.finding import Finding

WIDEST = 100
INDENT = " " * 19


def run_doctor(parser: Parser) -> int:
    """Print the findings; the exit code is CHECK_FAILED if one is a failure."""
    parser.description = (
        "Check everything a run needs: packages, GPUs, memory, disks, buckets, data, ranks, and "
        "a start with its first step. Leaves only the data and the checkpoint that a start fetches."
    )
    parser.epilog = (
        "Each line is ok, warn or fail; if any check fails, the exit code is 3. Checks this "
        "machine only; run it on every machine of a run."
    )
    parser.examples = (
        "--config gpt2_124m --for 8xH100",
        "--config demo --quick",
        "--config gpt2_124m --gpus 8 data.source=gs://b/tokens",
    )
    add = parser.group("run")
    add_overrides(parser)
    add("--config FILE", "run file, or the name of one in config/runs", action=Once, default="demo")
    add("--run NAME", "the run's name (default: the run file's)")
    add("--gpus N", "ranks on this machine (default: one per GPU, or 2 without GPUs)", type=count)
    of_others = "check what needs no GPU, for GPUs to rent, such as 8xH100 or 1xA100-80GB"
    add("--for NxGPU", of_others, dest="rented")
    add("--per-hour USD", "with --for: price (default: cost.per_hour_usd)", type=positive)
    add("--quick", "start no ranks and read fewer tokens")
    add_credentials(parser)
    add_json(parser)
    arguments, began = parser.read(), time.monotonic()
    import refocused
    from refocused.config.load_run import load_run
    from refocused.data.manifest.run_manifest import describe_run
    from refocused.data.manifest.vocabulary import decide_vocabulary
    from refocused.data.order.sources import tokens_of_epochs
    from refocused.doctor.examination import Examination
    from refocused.doctor.finding import Finding
    from refocused.system.hardware import named_gpu

    gpu = None
    if arguments.rented is None:
        parser.refuse(arguments, "needs --for", "per_hour")
    else:
        parser.refuse(arguments, "has no effect with --for", "gpus", "quick")
        number, cross, name = arguments.rented.partition("x")
        if not (cross and number.isdecimal() and int(number)):
            raise ConfigError(f"--for {arguments.rented}: expected a number and a GPU, as 8xH100.")
        arguments.gpus, gpu = int(number), named_gpu(name, option=f"--for {arguments.rented}:")
    log = logging.getLogger("refocused")
    log.setLevel(logging.CRITICAL)  # findings report retries
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as Ctrl+C
    try:
        loaded = load_run(arguments.config, arguments.overrides, name=arguments.run)
        with contextlib.suppress(BucketError, ShardError):  # reported by a finding
            loaded = decide_vocabulary(loaded, lambda url: bucket_at(url, arguments))
            config, data = loaded.config, loaded.config.data
            loaded = loaded.with_tokens(
                lambda: tokens_of_epochs(
                    config, describe_run({"": bucket_at(data.address, arguments)}, data)
                )
            )
        options = [
            f"--{name.replace('_', '-')}={value}"
            for name in ("config", "run", "gcs_credentials", "gcp_project")
            if (value := getattr(arguments, name)) is not None
        ]
        examination = Examination(
            loaded=loaded,
            arguments=[*options, *arguments.overrides],
            say=lambda text: print(f"      {text} ...", file=sys.stderr, flush=True),
            gpus=arguments.gpus,
            is_quick=arguments.quick or gpu is not None,
            credentials=credentials_of(arguments),
            rented=gpu,
            per_hour_usd=arguments.per_hour,
        )
        run, file, findings = loaded.config.run.name, loaded.file.name, list[Finding]()
        if not arguments.json:
            print(f"refocused {refocused.__version__}   doctor   run {run} ({file})")
        for finding in examination.findings():
            findings.append(finding)
            if not arguments.json:
                width = min(WIDEST, shutil.get_terminal_size().columns)
                print("\n".join(lines_of(finding, width=width)), flush=True)
    finally:
        log.setLevel(logging.NOTSET)
        signal.signal(signal.SIGTERM, terminate)
    seconds = time.monotonic() - began
    levels = [finding.level for finding in findings]
    fails, warnings = levels.count("fail"), levels.count("warn")
    if arguments.json:
        records = [dataclasses.asdict(finding) for finding in findings]
        record = {"run": run, "ok": not fails, "seconds": round(seconds, 1), "findings": records}
        print(json.dumps(record, indent=1))
    else:
        result = f"{fails} failed, {warnings} warned, {len(levels)} checks"
        print(f"done  {result}, {duration(seconds)}")
    return ExitCode.CHECK_FAILED if fails else ExitCode.OK


def lines_of(finding: Finding, *, width: int) -> list[str]:
    """Wrap a finding to lines of at most `width` columns, without breaking long words."""
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
