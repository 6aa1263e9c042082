"""Write the reference pages of the site from the code, so that they cannot drift.

A hook of mkdocs (see mkdocs.yml); nothing is written into the checkout.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from refocused.commands.main import COMMANDS, VERBS
from refocused.config.setting_list import list_settings
from refocused.system.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site's."""
    pages = {
        "commands": _commands,
        "settings": _settings,
        "run_files": _run_files,
        "exit_codes": _exit_codes,
    }
    for name, write in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=write()))
    return files


def _commands() -> str:
    parts = [
        "# Commands",
        "Each command is a script in `launch/` and a verb of `refocused`. This is their `--help`.",
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
        "prints the same.",
    ]
    for section, settings in itertools.groupby(list_settings(), lambda one: one.name.split(".")[0]):
        parts.append(f"## {section}\n\n| setting | values | default | meaning |\n|---|---|---|---|")
        for one in settings:
            kind, meaning = (text.replace("|", "\\|") for text in (one.kind, one.meaning))
            parts[-1] += f"\n| `{one.name}` | {kind} | `{one.default}` | {meaning} |"
    return "\n\n".join(parts)


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
