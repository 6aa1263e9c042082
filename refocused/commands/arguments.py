"""Parse command lines: verbs, shared options, exit code 2 for a mistake."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from refocused.commands.output import count
from refocused.system.errors import (
    ConfigError,
    ExitCode,
    RefocusedError,
    as_typed,
    did_you_mean,
    local_path,
)
from refocused.system.logs import ScreenFormatter, log_unexpected, print_message

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.bucket.open_bucket import Credentials
    from refocused.config.data import DataConfig
    from refocused.tokenizers.encoders import TokenizerChoice

T = TypeVar("T")
# Verbs renamed in version 0.1, by command and earlier name; refused until 0.2.
RENAMED_VERBS = {"prepare_data recommend": "init --data DIR_OR_URL"}
# Marks what follows `--`, of which argparse takes some for options after all; no argument has it.
NO_OPTION = "\0"
NO_FAILURES = (ExitCode.LIMIT_REACHED, ExitCode.INTERRUPTED)  # the state is saved, if any
SILENT_RANK_SECONDS = 3.0  # a rank that exits ends the others: let rank 0 print first


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults in one style, `(default: 8)`, and a usage line without every option."""

    def __init__(self, prog: str) -> None:
        super().__init__(f"{prog} [options]")

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """Name positional arguments and required options only."""
        named = [action for action in actions if action.required or not action.option_strings]
        super().add_usage(usage, named, [], prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, argparse.SUPPRESS, []) or default is False or "(default:" in text:
            return text
        shown = f"{default:,}" if type(default) is int else str(default)
        return f"{text} (default: {shown.strip('[]')})"


class Parser(argparse.ArgumentParser):
    """An argument parser for `--max_steps` as for `--max-steps`; prints on rank 0 only."""

    given: Sequence[str] | None = None  # the command line; None: that of the process

    def __init__(self, prog: str, *, examples: Sequence[str] = (), **more: Any) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, **more)
        self.register("type", Path, local_path)
        self.examples = examples  # the arguments of commands that work, for `--help`
        self._groups: dict[str, argparse._ActionsContainer] = {"options": self}

    def group(self, title: str, *, exclusive: bool = False) -> Callable[..., argparse.Action]:
        """Return a function that adds options to the group with this title in `--help`.

        `add("--keep N", "steps to keep", type=count)` takes names and metavar in one text, the
        help, and what `add_argument` takes. An option without a metavar, type or choices is a flag.
        """
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        group = self._groups[title]
        target = group.add_mutually_exclusive_group() if exclusive else group

        def add(words: str, help: str, **more: Any) -> argparse.Action:
            names = [word for word in words.split() if word.startswith("-")]
            if metavar := words.split()[len(names) :]:
                more["metavar"] = metavar[0]
            elif not {"type", "choices", "action", "default"} & set(more):
                more["action"] = "store_true"
            return target.add_argument(*names, help=help, **more)

        return add

    def format_help(self) -> str:
        """Return the help text, which ends with the examples."""
        lines = [f"Example: {self.prog} {example}".rstrip() for example in self.examples]
        return "\n".join([super().format_help(), *lines]) + "\n"

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line, or `given`, with its arguments in any order."""
        given = self.given if argv is None else argv
        given = list(sys.argv[1:] if given is None else given)
        end = given.index("--") if "--" in given else len(given)
        texts = [f"{NO_OPTION}{text}" for text in given[end + 1 :]]
        return self.parse_intermixed_args([*map(dashed, given[:end]), *texts])

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        value: Any = super()._get_value(action, arg_string.removeprefix(NO_OPTION))
        return value

    def refuse(self, arguments: argparse.Namespace, why: str, *names: str) -> None:
        """Raise ConfigError if one of these arguments was given, with the reason `why`."""
        for action in self._actions:
            name = action.dest
            if name in names and getattr(arguments, name) != self.get_default(name):
                raise ConfigError(f"{[*action.option_strings, action.metavar][0]} {why}.")

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong, and the nearest option to an unknown one."""
        if is_another_rank():
            time.sleep(SILENT_RANK_SECONDS)
            sys.exit(ExitCode.WRONG_USE)
        near, unknown = "", re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            # Whether the values of unknown options follow depends on the version of Python.
            message = " ".join(re.findall("unrecognized arguments:|(?<= )-[^ ]*", message))
            near = did_you_mean(unknown[1], self._option_string_actions)
        print_message("error", f"{message}.{near}")
        print_message("hint", f"{self.prog} --help lists the options.")
        self.exit(ExitCode.WRONG_USE)


class Once(argparse.Action):
    """Stores a value and refuses a second one; argparse would take the last one silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store what follows the option."""
        mark = f"{self.dest} was given"
        if hasattr(namespace, mark):
            before = getattr(namespace, self.dest)
            parser.error(f"{option_string} is given twice ({before}, then {values}). Keep one")
        setattr(namespace, mark, True)
        setattr(namespace, self.dest, values)


def run_verb(command: str, verbs: Mapping[str, tuple[str, str]], given: Sequence[str]) -> int:
    """Run the verb that the first argument names; return the exit code.

    A verb V is the function `run_V(parser)`, with `_` for `-`, of its module in `main.VERBS`. It
    adds its options, calls `parser.read()`, does the work and returns an exit code, or None for OK.
    It imports what it needs after `parser.read()`, so that `--help` is fast.
    """
    verb = given[0] if given and given[0] in verbs else ""
    if verb in verbs:
        module, what = verbs[verb]
        functions = importlib.import_module(f"refocused.commands.{module}")
        function = f"run_{verb or command}".replace("-", "_")
        run: Callable[[Parser], int | None] = getattr(functions, function)
        described = f"{what[0].upper()}{what[1:]}."
        parser = Parser(f"{program(command)} {verb}".rstrip(), description=described)
        parser.given = given[1:] if verb else given
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(ScreenFormatter(sys.stderr))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        try:
            with quiet_on_a_closed_pipe():
                code = run(parser) or ExitCode.OK
        except RefocusedError as error:
            code = report(error)
        except Exception as error:
            if os.environ.get("WORLD_SIZE", "1") == "1":
                raise
            code = report(error)  # the other ranks' connections break
    elif given and given[0] not in ("-h", "--help"):
        near = did_you_mean(given[0], verbs) or f" Verbs: {', '.join(verbs)}."
        text = f"unknown verb {given[0]!r}.{near}"
        if (present := RENAMED_VERBS.get(f"{command} {given[0]}")) is not None:
            text = f"{given[0]} is now {as_typed(present)}"
        print_message("error", f"{program(command)}: {text}")
        code = ExitCode.WRONG_USE
    else:
        with quiet_on_a_closed_pipe():
            width = max(10, *map(len, verbs))
            lines = [f"  {name:<{width}} {what}" for name, (_, what) in verbs.items()]
            print(
                f"usage: {program(command)} VERB ...\n",
                *lines,
                f"\nOptions of a verb: {program(command)} VERB --help",
                f"Example: {program(command)} {next(iter(verbs))} --help",
                sep="\n",
            )
        code = ExitCode.OK if given else ExitCode.WRONG_USE
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads sometimes abort a normal exit; see commands/train.py
    return code


def report(error: BaseException) -> ExitCode:
    """Print an error once, an unexpected one with its traceback, and return its exit code.

    The first rank of each machine prints an error that all ranks agree on, or a configuration
    error, which may concern one machine only, unless the launcher kills it first because rank 0 has
    exited. Other errors are printed where they occur.
    """
    if not isinstance(error, RefocusedError):
        from refocused.system.world import lost_connection

        if (lost := lost_connection(error)) is None:
            log_unexpected(error)
            return ExitCode.FAILED
        error = lost
    is_shared = error.on_every_rank or isinstance(error, ConfigError)
    if is_another_rank() and is_shared:
        time.sleep(SILENT_RANK_SECONDS)
    if os.environ.get("LOCAL_RANK", "0") == "0" or not is_shared:
        is_apart = is_another_rank() and not error.on_every_rank
        prefix = f"rank {os.environ['RANK']}: " if is_apart else ""
        print_message(None if error.exit_code in NO_FAILURES else "error", f"{prefix}{error}")
    return error.exit_code


def program(command: str) -> str:
    """Return how a command is typed: as its script in `launch/`, or after `refocused`."""
    script = Path(sys.argv[0])
    is_script = script.parent.name == "launch" and script.suffix == ".py"
    return sys.argv[0] if is_script else f"refocused {command}"


def is_another_rank() -> bool:
    """Return whether this process is a rank other than 0; only rank 0 prints."""
    return os.environ.get("RANK", "0") != "0"


@contextlib.contextmanager
def quiet_on_a_closed_pipe() -> Iterator[None]:
    """End a command quietly when its reader (`| head`) is gone; not for training, which goes on.

    SIGPIPE stays ignored: its default action would also kill the process, without a message, when
    the connection to a bucket or the pipe to a worker breaks.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes the buffer again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


def dashed(argument: str) -> str:
    """Spell a long option with dashes: `--max_steps=3` becomes `--max-steps=3`."""
    match = re.match(r"--[A-Za-z_-]+", argument)
    return argument if match is None else match[0].replace("_", "-") + argument[match.end() :]


def is_override(argument: str) -> bool:
    """Return whether an argument has the form `section.key=value`."""
    return re.match(r"[A-Za-z_-]+(\.[A-Za-z0-9_-]+)+=", argument) is not None


def add_credentials(parser: Parser) -> None:
    """Add the options that `gs://` addresses may need."""
    add = parser.group("storage")
    add("--gcs-credentials FILE", "key file for gs:// (default: the machine's own)", type=Path)
    add("--gcp-project ID", "Google Cloud project (default: that of the credentials)")


def add_json(parser: Parser, help_text: str = "print JSON") -> None:
    """Add `--json`."""
    parser.group("output")("--json", help_text)


def add_overrides(parser: Parser) -> None:
    """Add the `section.key=value` arguments, which `load_run` reads."""
    changed = "settings in place of the run file's, for example optimizer.lr=2e-4"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=changed)


def bucket_at(url: str, arguments: argparse.Namespace) -> Bucket:
    """Open the bucket at an address with the credentials of the command line."""
    from refocused.bucket.open_bucket import open_bucket

    return open_bucket(url, credentials_of(arguments))


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Return the credentials of the command line."""
    from refocused.bucket.open_bucket import Credentials

    key = arguments.gcs_credentials
    return Credentials(key and key.absolute(), arguments.gcp_project)


def chosen(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass from the options with the names of its fields, and from `others`."""
    names = {field.name for field in dataclasses.fields(kind)} - set(others)  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


@contextlib.contextmanager
def option_errors(**options: str) -> Iterator[None]:
    """Turn what pydantic refuses into a ConfigError; `options` are those not named as its field."""
    import pydantic

    try:
        yield
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        option = options.get(name, name).replace("_", "-")
        raise ConfigError(f"--{option} {first['input']!r}: {first['msg']}.") from None


def add_tokenizer_options(parser: Parser) -> None:
    """Add the options of `tokenizer_choice`."""
    add = parser.group("tokenizer")
    add("--tokenizer NAME", "bytes, gpt2, hub:MODEL or a tokenizer.json (default: the model's own)")
    add("--bpe-folder DIR", "folder of GPT-2's vocab.bpe, encoder.json", type=Path)


def tokenizer_choice(arguments: argparse.Namespace) -> TokenizerChoice | None:
    """Return the tokenizer that the command line names; None: the model's own."""
    from refocused.tokenizers.encoders import TokenizerChoice

    if arguments.bpe_folder is not None and arguments.tokenizer != "gpt2":
        raise ConfigError("--bpe-folder needs --tokenizer gpt2.")
    if arguments.tokenizer is None:
        return None
    return TokenizerChoice(arguments.tokenizer, bpe_folder=arguments.bpe_folder)


def add_reading_options(parser: Parser) -> None:
    """Add the options of `data_settings`, and those that reach the data."""
    add = parser.group("input")
    add("--dtype", "of .bin files without a header", choices=("uint16", "uint32", "int32", "int64"))
    add("--pad-id ID", "padding id of rows without a mask", type=int)
    add("--separator-id ID", "end-of-text id between documents", type=int)
    add("--tokenizer NAME", "tokenizer that made the tokens", default="unknown")
    add("--include GLOB", "read only these files; repeatable", action="append", default=[])
    add("--exclude GLOB", "skip these; repeatable", action="append", default=[])
    add("--max-files N", "read the first N files in name order", type=count)
    add("--threads N", "files read at once", type=count, default=8)


def data_settings(arguments: argparse.Namespace, source: str) -> DataConfig:
    """Return the data section of the reading options; raise ConfigError if one is wrong."""
    from refocused.config.data import DataConfig

    names = ("dtype", "pad_id", "separator_id", "tokenizer", "include", "exclude", "max_files")
    given = {name: getattr(arguments, name) for name in names}
    with option_errors(fetch_threads="threads"):
        return DataConfig(source=source, fetch_threads=arguments.threads, **given)
