"""`init`: write a run file for a data set, from questions or options, or copy a shipped one."""

import argparse
import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refocused.commands.arguments import Parser, add_credentials, add_reading_options, place
from refocused.commands.output import count, positive
from refocused.commands.prepare import recommend
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ConfigError, RefocusedError, as_typed, local_path

BUCKET = "YOUR-BUCKET"  # in place of a bucket in shipped run files


def run_init(parser: Parser) -> None:
    """Write a run file, and print the commands that use it."""
    parser.examples = (
        "mine.yaml",
        "mine.yaml --data data/tokens --gpus 1 --gpu A100 --per-hour 2 --budget 50 --yes",
        "mine.yaml --from gpt2_124m",
    )
    parser.epilog = (
        "On a terminal, init asks for what the options leave open; --yes takes the defaults. The "
        "model, the steps and the learning rate are those of `prepare_data recommend`."
    )
    new = "run file to write (default: run.yaml, or NAME.yaml)"
    parser.add_argument("out", nargs="?", type=Path, metavar="FILE", help=new)
    add = parser.group("output")
    add("--force", "overwrite FILE if it exists")
    add("--yes", "ask nothing")
    add = parser.group("input")
    add("--from NAME", "copy this run file of config/runs, with comments", dest="template")
    add("--data DIR_OR_URL", "folder or gs:// address of token files", dest="source")
    recommend.add_machine_options(parser)
    add_reading_options(parser)
    add_credentials(parser)
    parser.set_defaults(tokens=None, preset=None, epochs=None, step_tokens=None)
    parser.set_defaults(sequence_length=None, mfu=None)
    arguments = parser.read()
    from refocused.config.load_run import find_config

    machine = ""
    if arguments.template is not None:
        of_data = vars(arguments).keys() - {"out", "force", "yes", "template"}
        parser.refuse(arguments, "has no effect with --from, which copies a run file", *of_data)
        template = find_config("runs", arguments.template)
        arguments.out = _new_file(arguments, template.stem)
        text = template.read_text(encoding="utf-8")
        recommend.loaded_text(text, arguments.out)
        lines = enumerate(text.splitlines(), 1)
        places = ", ".join(str(number) for number, line in lines if BUCKET in line)
        notes = [f"Set your bucket in place of {BUCKET}: line {places}"] if places else []
    else:
        if arguments.source is not None:
            _token_files(arguments.source, arguments)
        if sys.stdin.isatty() and not arguments.yes:
            _ask_for_the_rest(parser, arguments)
        if arguments.source is None:
            raise ConfigError(
                "Name the token files with --data DIR_OR_URL, or a run file with --from."
            )
        arguments.out = _new_file(arguments, "run")
        found, text = recommend.plan_run(arguments)
        notes = recommend.plan_lines(found, arguments)
        cost, budget = found.cost_usd, arguments.budget
        if cost is not None and budget is not None and cost > budget:
            notes.append(f"note: the budget of ${budget:,.2f} ends the run before its last step.")
        machine = f" --gpus {arguments.gpus} --gpu {shlex.quote(arguments.gpu)}"
    replace_file(arguments.out, text.encode())
    print(f"Wrote {arguments.out}.", *notes, "Next:", sep="\n")
    for command, more in (("doctor", ""), ("estimate_cost", machine), ("launch", "")):
        print(f"  {as_typed(command)} --config {shlex.quote(str(arguments.out))}{more}")


def _ask_for_the_rest(parser: Parser, arguments: argparse.Namespace) -> None:
    """Ask for each option that has its default; raise ConfigError when the input ends."""
    from refocused.system.hardware import named_gpu

    def ask(name: str, question: str, read: Callable[[str], Any], shown: str = "") -> None:
        default = parser.get_default(name)
        hint = f" [{shown or default}]" if shown or default is not None else ""
        while getattr(arguments, name) == default:
            print(f"{question}{hint}: ", end="", file=sys.stderr, flush=True)
            if not (line := sys.stdin.readline()):
                raise ConfigError("The questions were not all answered. Nothing was written.")
            if not line.strip() and hint:
                return
            try:
                setattr(arguments, name, read(line.strip()))
                return
            except (argparse.ArgumentTypeError, RefocusedError) as error:
                print(error, file=sys.stderr)

    read = functools.partial(_token_files, arguments=arguments)
    ask("source", "Token files (folder or gs:// address)", read)
    ask("gpus", "Number of GPUs", count)
    ask("gpu", "Kind of GPU", lambda text: named_gpu(text).name)
    ask("per_hour", "Price of the machine in USD an hour", positive, "unknown")
    if arguments.per_hour is not None:
        ask("budget", "Budget in USD, at which the run saves and stops", positive, "no limit")
    ask("out", "Run file to write", Path, "run.yaml")


def _token_files(text: str, arguments: argparse.Namespace) -> str:
    """Return an address at which there are token files; raise RefocusedError if there are none."""
    from refocused.data.manifest.shard_manifest import chosen_names

    if "://" not in text and not local_path(text).is_dir():
        raise ConfigError(
            f"There is no folder {text!r}. To make token files of texts: "
            f"{as_typed('prepare_data tokenize')} IN... --out DIR --tokenizer gpt2"
        )
    bucket, data = place(text, arguments), recommend.source_settings(arguments, text)
    chosen_names([blob.name for blob in bucket.list()], data=data, url=text)
    return text


def _new_file(arguments: argparse.Namespace, stem: str) -> Path:
    """Return the run file to write; raise ConfigError if it is in the way or has no folder."""
    file = Path(arguments.out or f"{stem}.yaml")
    if file.exists() and not arguments.force:
        raise ConfigError(f"{file} exists. Name another file, or overwrite it with --force.")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}. Make it first.")
    return file
