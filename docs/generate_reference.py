"""Write the reference pages of the site from the code, so that they cannot drift.

A hook of mkdocs (see mkdocs.yml); nothing is written into the checkout. As a script it writes
`config/annotated.yaml`.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import refocused
from refocused import api
from refocused.commands.main import COMMANDS, VERBS
from refocused.config.setting_help import REQUIRED, list_settings
from refocused.monitor.sampler.alarms import alarm_rules
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site's."""
    from mkdocs.structure.files import File

    pages = {
        "commands": _commands,
        "settings": _settings,
        "python_api": _python_api,
        "run_files": _run_files,
        "metrics": metrics,
        "exit_codes": _exit_codes,
    }
    for name, write in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=write()))
    return files


def _commands() -> str:
    parts = [
        "# Commands",
        "Each command is a script in `launch/` and a verb of `refocused`; `launch` is "
        "`launch/train.sh`. This is their `--help`.",
    ]
    for command in COMMANDS:
        verbs = [verb for verb in VERBS.get(command, {}) if verb]
        parts.append(f"## {command}\n\n```text\n{_help(command)}```")
        parts += [f"### {command} {verb}\n\n```text\n{_help(command, verb)}```" for verb in verbs]
    return "\n\n".join(parts)


def _help(*words: str) -> str:
    program = "from refocused.commands.main import main; raise SystemExit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *words, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def _settings() -> str:
    parts = [
        "# Settings",
        "`section.key=value` on the command line overrides the run file. `train --settings NAME` "
        "prints the same. `config/annotated.yaml` is a run file with every setting; "
        "`train --settings --yaml` writes it.",
    ]
    for section, settings in itertools.groupby(list_settings(), lambda one: one.name.split(".")[0]):
        heads = "setting | values | default | example | meaning"
        parts.append(f"## {section}\n\n| {heads} |\n|---|---|---|---|---|")
        for one in settings:
            kind, meaning = (text.replace("|", "\\|") for text in (one.kind, one.meaning))
            example = f"`{one.default}` | `{one.example}`"
            parts[-1] += f"\n| `{one.name}` | {kind} | {example} | {meaning} |"
    return "\n\n".join(parts)


def _python_api() -> str:
    parts = ["# Python API", "The names of `import refocused`; see the guide for examples."]
    for name in refocused.__all__:
        thing = getattr(refocused, name)
        named = {name: thing} | {f"{name}.{key}": one for key, one in _members(thing)}
        parts += [
            f"{'##' if one is thing else '###'} {key}" + _help_of(one) for key, one in named.items()
        ]
    for file, name, about in (
        ("api.py", "TrainingRun", "What `start_training` returns"),
        ("checkpoints/resume/catalog.py", "CatalogEntry", "What `list_checkpoints` lists"),
    ):
        parts.append(f"## {name}\n\n{about}.\n\n| field | meaning |\n|---|---|")
        parts[-1] += "".join(f"\n| `{key}` | {text} |" for key, text in _commented(file, name))
        parts += [f"### {name}.{key}" + _help_of(one) for key, one in _members(getattr(api, name))]
    return "\n\n".join(parts)


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the documented public methods of a class, in its order."""
    for name in vars(thing) if inspect.isclass(thing) else ():
        member = getattr(thing, name)
        if not name.startswith("_") and inspect.isroutine(member):
            yield name, member


def _help_of(thing: Any) -> str:
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    signature = textwrap.fill(signature.replace("(self, ", "("), 96, subsequent_indent="    ")
    return f"\n\n```text\n{signature}\n\n{inspect.getdoc(thing)}\n```"


def _run_files() -> str:
    parts = ["# Run files", "One file of `config/runs/` is one whole run. These are shipped:"]
    paths = sorted((ROOT / "config" / "runs").glob("*.yaml"))
    parts += [f"## {path.stem}\n\n```yaml\n{path.read_text()}```" for path in paths]
    return "\n\n".join(parts)


def _exit_codes() -> str:
    lines = Path(ROOT / "refocused" / "system" / "errors.py").read_text().splitlines()
    meanings = {line.split("=")[0].strip(): line.partition("#")[2].strip() for line in lines}
    rows = [f"| {code.value} | {code.name} | {meanings[code.name]} |" for code in ExitCode]
    return "\n".join(["# Exit codes", "", "| code | name | meaning |", "|---|---|---|", *rows])


# The unit of a record's names by what they hold, the first that fits.
UNITS = {
    r"(tokens|bytes)_per_second$": r"\1/s",
    "_gb_per_second$": "GB/s",
    "_mb_per_second$": "MB/s",
    "seconds": "s",
    "_usd$": "$",
    "_fraction$": "0 to 1",
    "_gb$": "GB",
    "_celsius$": "C",
    "_watts": "W",
    "_mhz$": "MHz",
    "_bytes$": "bytes",
    "loss(_mean)?$": "nats a token",
}
STEP = "train/step"
# Each table of the page: its title, what it is about, and the code whose fields, arguments and keys
# it lists with the comments beside them.
RECORDS = [
    (
        "logs/training_metrics.jsonl",
        "One line each `log.interval` steps (`kind: step`), validation and round of tasks.",
        [
            ("kind: step", [("metrics/history.py", "StepMetrics")]),
            ("kind: validation", [(f"{STEP}/reporter.py", "validation", "_evaluated")]),
            ("kind: tasks", [(f"{STEP}/reporter.py", "tasks", "_evaluated")]),
            ("slowest", [("metrics/rank_times.py", "SlowestRank")]),
            ("with a data mixture", [(f"{STEP}/reporter.py", "sources_record")]),
        ],
    ),
    (
        "logs/performance_metrics.jsonl",
        "Where the time went. The lines `time` and `session` (one for each start) together hold "
        "every second since the first start.",
        [
            (
                "kind: session, time",
                [
                    ("metrics/run_time.py", "TimeSpent"),
                    (f"{STEP}/reporter.py", "performance", "_record_time", "_cost"),
                    ("metrics/run_time.py", "FINISHED"),
                    ("metrics/rank_times.py", "add"),
                ],
            ),
            ("kind: start", [("metrics/meter.py", "StartUp")]),
            (
                "kind: save",
                [(f"{STEP}/reporter.py", "performance"), (f"{STEP}/saver.py", "_complete")],
            ),
        ],
    ),
    (
        "logs/gpu_metrics.jsonl",
        "Every `log.sample_seconds` one line for each GPU and one for the machine. Machine N of "
        "several writes `gpu_metrics-node-N.jsonl`. Unknown is null.",
        [
            ("kind: gpu", [("monitor/readings.py", "GpuSample")]),
            ("kind: system", [("monitor/readings.py", "SystemSample")]),
        ],
    ),
    (
        "logs/events.jsonl",
        "What each session runs on, saves, samples, stops and alarms, each with its `text`.",
        [
            ("kind: setup", [("train/lifecycle/banner.py", "setup_record")]),
            ("kind: alarm", [("monitor/readings.py", "AlarmEvent")]),
        ],
    ),
    (
        "state.json",
        "The run's progress, replaced at each log line; `updated` is its time.",
        [
            (
                "",
                [
                    (f"{STEP}/reporter.py", "write_state", "step"),
                    ("system/processes.py", "session_record"),
                    ("train/lifecycle/run_folder.py", "show"),
                    ("train/lifecycle/trainer.py", "assemble_trainer"),
                    ("checkpoints/step/checkpoint_directory.py", "as_record"),
                    (f"{STEP}/state.py", "TrainState"),
                    ("data/cache/cache.py", "progress"),
                    ("train/lifecycle/shutdown.py", "finish"),
                ],
            )
        ],
    ),
    (
        "mirror.json",
        "What the mirror holds and does, replaced every few seconds.",
        [
            (
                "",
                [
                    ("checkpoints/step/retention.py", "MirroredCheckpoints"),
                    ("checkpoints/mirror/mirror.py", "MirrorStatus"),
                ],
            )
        ],
    ),
]


def metrics() -> str:
    """Return the page of all that a run records."""
    parts = [
        "# Metrics",
        "What each line of a run's files holds. Every line of a `.jsonl` file also has its `kind` "
        "and its `time` (UTC). After a run went back to an earlier step, the later line of a step "
        "counts. Numbers that are not finite are null.",
    ]
    for file, about, kinds in RECORDS:
        parts.append(f"## {file}\n\n{about}")
        for kind, places in kinds:
            head = f"### {kind}\n\n" if kind else ""
            rows = dict(row for place in places for row in _commented(*place))
            parts.append(f"{head}| name | unit | meaning |\n|---|---|---|")
            for name, meaning in rows.items():
                parts[-1] += f"\n| `{name}` | {_unit(name)} | {meaning} |"
    parts.append(
        "## Alarms\n\nAn alarm is raised when its condition has held for so many seconds.\n\n"
        "| alarm | severity | condition | for | what to do |\n|---|---|---|---|---|"
    )
    for name, rule in alarm_rules().items():
        seconds = f"{rule.begins_after:g} s" if rule.begins_after else ""
        parts[-1] += f"\n| `{name}` | {rule.severity} | {rule.when} | {seconds} | {rule.advice} |"
    return "\n\n".join(parts)


def _unit(name: str) -> str:
    found = ((re.search(pattern, name), unit) for pattern, unit in UNITS.items())
    return next((match.expand(unit) for match, unit in found if match), "")


def _commented(file: str, *places: str) -> Iterator[tuple[str, str]]:
    """Yield the names in these classes, functions or constants that have a comment beside them.

    Every field of a class must have one, beside it or above it.
    """
    source = (ROOT / "refocused" / file).read_text()
    comments: dict[tuple[int, bool], str] = {}  # by line, and whether they have it for themselves
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            above = comments.pop((line - 1, True), None)
            is_alone = not token.line[: token.start[1]].strip()
            text = token.string.lstrip("# ")
            comments[line, is_alone] = f"{above} {text}" if above and is_alone else text
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in places:
            yield ast.literal_eval(node.value), comments[node.lineno, False]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in places:
            for name, line, is_field in _names(node):
                comment = comments.get((line, False)) or comments.get((line - 1, True))
                if comment and (is_field or (line, False) in comments):
                    yield name, comment.replace("|", "\\|").replace("None", "null")
                elif is_field:
                    raise ValueError(f"{file}:{line}: {name} has no comment that says what it is")


def _names(place: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[str, int, bool]]:
    """Yield the fields, keyword arguments and keys of a place, with their last lines."""
    nodes = place.body if isinstance(place, ast.ClassDef) else ast.walk(place)
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(place, ast.ClassDef):
            if "ClassVar" not in ast.unparse(node.annotation):
                yield ast.unparse(node.target), node.end_lineno or 0, True
        elif isinstance(node, ast.keyword) and node.arg not in (None, "kind"):
            yield node.arg, node.end_lineno or 0, False
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if isinstance(key, ast.Constant) and key.value != "kind":
                    yield str(key.value), key.end_lineno or 0, False


# Of two settings of which one is required, those in the annotated run file.
CHOSEN = ("batch.global_batch_size", "data.source", "run.steps")


def annotated_run() -> str:
    """Return a run file with every setting: its default or example, and its meaning in a comment.

    Settings of a source of the mixture are comments, since the file has no mixture.
    """
    lines = [
        "# Every setting of a run with its default, or an example where there is none.",
        "# Printed by: refocused train --settings --yaml",
    ]
    settings = itertools.groupby(list_settings(), lambda setting: setting.name.split(".")[0])
    for section, group in settings:
        lines += ["", f"{section}:"]
        for setting in group:
            is_needed, (head, _, key) = setting.default == REQUIRED, setting.name.rpartition(".")
            value = setting.example if is_needed or setting.name in CHOSEN else setting.default
            begin = "  " if head == section else "  #   "  # those of a source only as comments
            lines += textwrap.wrap(
                setting.meaning, 96, initial_indent="  # ", subsequent_indent="  # "
            )
            other = REQUIRED if is_needed else f"e.g. {setting.example}"
            lines.append(f"{begin}{key}: {value}  # {setting.kind}; {other}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "config" / "annotated.yaml").write_text(annotated_run())
