"""`train`: train a run as one process, or as one of the ranks that `deepspeed` starts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Once,
    Parser,
    add_credentials,
    add_overrides,
    credentials_of,
    dashed,
    is_override,
    program,
    quiet_on_a_closed_pipe,
    report,
)
from refocused.commands.output import count
from refocused.system.errors import (
    ConfigError,
    ExitCode,
    RefocusedError,
    as_typed,
    counted,
    from_here,
)
from refocused.system.launchers import VISIBLE, complete_environment, ranks_here, visible_gpus
from refocused.system.logs import log_unexpected, print_message, start_screen

if TYPE_CHECKING:
    from refocused.config.load_run import LoadedRun
    from refocused.train.lifecycle.session import Session

RESUME = ("--resume", "--resume-from-checkpoint")


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        program("train"),
        description="Train a run in this process. To train on all GPUs of the machine: "
        f"{as_typed('launch')} ...",
        epilog="The first Ctrl+C saves and stops. Run the same command again to resume.",
        examples=("--config gpt2_124m --dry-run", "--config demo optimizer.lr=2e-4 --run trial"),
    )
    add_overrides(parser)
    add = parser.group("run")
    add("--config FILE", "run file, or the name of one in config/runs", action=Once, default="demo")
    add("--run NAME", "the run's name and folder (default: the run file's)")
    add("--max-steps N", "same as run.steps=N; shortens a warmup that would not end", type=int)
    add("--profile N", "trace N steps after the first 10, in RUN/profile", type=count, default=0)
    add = parser.group("resume")
    resume = "auto: the newest usable checkpoint, if any; latest (also --resume alone), best, "
    resume += "none, a step, a name, a path or a gs:// address"
    add(" ".join([*RESUME, "WHAT"]), resume, default="auto")
    add("--as NAME", "resume in a new run NAME, for example to decay it", dest="new", action=Once)
    add("--resume-or-start", "as auto, and from scratch if no checkpoint can be used")
    add("--trust", "resume a checkpoint that another run saved; start from pickled weights")
    change = "resume even though SETTING differs from the checkpoint, for example data, "
    change += "data.mixture, run.seed, precision.dtype; repeatable"
    add("--allow-change SETTING", change, action="append", default=[])
    add = parser.group("checks and information")
    add("--dry-run", "check everything, train nothing")
    add("--print-config", "print all settings and exit")
    explain = (
        "explain every setting, or those whose name or else description contains NAME, and exit"
    )
    add("--settings NAME", explain, nargs="?", const="")
    add("--yaml", "with --settings: print an annotated run file with every setting")
    add_credentials(parser)
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    # The doctor's, with --dry-run: also make the first step, and write to this file what it was.
    add("--first-step", type=Path, help=argparse.SUPPRESS)
    return parser


def read_arguments(typed: Sequence[str]) -> argparse.Namespace:
    """Read the command line of `train`, which stays in the result as `typed`."""
    parser = build_parser()
    arguments = parser.read(_with_resume_value(typed))
    if arguments.yaml and arguments.settings is None:
        parser.error("--yaml needs --settings")
    if arguments.yaml and arguments.settings:
        parser.error("--yaml prints every setting: leave out the name after --settings")
    if arguments.profile and arguments.dry_run:
        parser.error("--profile has no effect with --dry-run, which takes no step")
    if arguments.new and (arguments.resume in ("auto", "none") or arguments.resume_or_start):
        parser.error("--as needs the checkpoint to start from: --resume STEP --as NAME")
    if arguments.resume_or_start:
        if arguments.resume not in ("auto", "latest"):
            parser.error(f"--resume-or-start has no effect with --resume {arguments.resume}")
        arguments.resume = "or-start"
    arguments.typed = list(typed)
    return arguments


def _with_resume_value(typed: Sequence[str]) -> list[str]:
    """Spell a bare `--resume`, which other trainers accept, as `--resume=latest`.

    A setting that follows (`--resume run.steps=9`) is not its value.
    """
    given = []
    for word, following in zip(typed, [*typed, "--"][1:], strict=True):
        is_bare = dashed(word) in RESUME and (following.startswith("-") or is_override(following))
        given.append(f"{word}=latest" if is_bare else word)
    return given


def without_resume(typed: Sequence[str]) -> list[str]:
    """Return arguments without `--resume WHAT` and the launcher's `--local_rank=N`, to start again.

    Repeated, `--resume none` would start from scratch, and a step would lose all later ones.
    `--as NAME`, which starts a run, becomes `--run NAME` in place of the run it came from.
    """
    words, given, is_value = _with_resume_value(typed), list[str](), False
    left_out = (
        RESUME if not any(re.match("--as(=|$)", word) for word in words) else (*RESUME, "--run")
    )
    for word in words:
        option, equals, value = dashed(word).partition("=")
        if is_value:
            is_value = False
        elif option == "--as":
            given.append(f"--run{equals}{value}")
        elif len(option) > len("--r") and any(name.startswith(option) for name in left_out):
            is_value = not equals
        elif option != "--local-rank":
            given.append(word)
    return given


def printed(words: Sequence[str]) -> str:
    """Return a command as text for the screen, logs and trackers: without secrets, so not to run.

    Only the addresses of `log` and the command of `run.on_end` are secrets; a prompt may hold
    other addresses.
    """
    from refocused.config.outputs import without_secrets

    secret = ("log", "run")
    return shlex.join(
        without_secrets(word) if word.lstrip("-").startswith(secret) else word for word in words
    )


def resume_command(
    arguments: Sequence[str],
    *,
    ranks: int,
    ranks_here: int,
    runner: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the command that resumes a run which had these `arguments` of `train`.

    `ranks_here` are those on this machine. `runner` is the command line, as it was typed, of the
    `deepspeed` process above this rank, if any, and `environment` the environment of that process.
    """
    for index, word in enumerate(runner):
        if Path(word).name == "deepspeed":
            # An absolute path was not typed but found by PATH.
            name = "deepspeed" if Path(word).is_absolute() else word
            visible = (environment or {}).get(VISIBLE)
            prefix = f"{VISIBLE}={visible} " if visible is not None else ""
            return prefix + printed([name, *without_resume(runner[index + 1 :])])
    words = shlex.split(as_typed("train"))
    if ranks > 1:
        started = words if len(words) == 1 else ["--module", *words]
        number = ["--num_gpus", str(ranks)] if ranks == ranks_here else ["--hostfile", "FILE"]
        script = from_here(Path(sys.executable).with_name("deepspeed"))
        words = ["deepspeed" if shutil.which("deepspeed") else script, *number, *started]
    return printed([*words, *without_resume(arguments)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, or exit the process after training."""
    arguments = read_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.settings is not None:
        with quiet_on_a_closed_pipe():
            return _print_settings(arguments.settings, as_yaml=arguments.yaml)
    try:
        complete_environment(os.environ)
        rank = int(os.environ.get("RANK", "0"))
        loaded = load(arguments)
        if arguments.print_config:
            if rank == 0:
                with quiet_on_a_closed_pipe():
                    _print_config(loaded)
            return ExitCode.OK
        from refocused.train.lifecycle.session import begin_session

        run = Path(loaded.config.run.directory) / loaded.config.run.name
        session = begin_session(rank, None if arguments.dry_run else run)
    except RefocusedError as error:
        return report(error)
    # In the log file, too, where Python's own goes to the terminal only.
    threading.excepthook = lambda of: log_unexpected(of.exc_value or of.exc_type(), " in a thread")
    code = train_as_rank(loaded, arguments, rank, session)
    session.report(exit_code=code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may have been closed
            stream.flush()
    # A normal exit runs the destructors of gloo's threads, which sometimes abort the process
    # ("terminate called without an active exception", in 4 of 16 exits with torch 2.13). The
    # launcher would report a failed run.
    os._exit(code)


def load(arguments: argparse.Namespace) -> LoadedRun:
    """Load the run file with the command line's settings; raise ConfigError if one is wrong."""
    from refocused.checkpoints.resume.changes import check_allowable
    from refocused.config.load_run import load_run
    from refocused.config.outputs import HIDDEN

    check_allowable(arguments.allow_change)
    overrides = list(arguments.overrides)
    if arguments.max_steps is not None:
        overrides.append(f"run.steps={arguments.max_steps}")
    loaded = load_run(arguments.config, overrides, name=arguments.run)
    if loaded.config.run.on_end == HIDDEN:
        raise ConfigError(
            f"{loaded.file}: run.on_end = {HIDDEN}: a run does not write its command. Set it again."
        )
    arguments.parent = loaded.config.run.name if arguments.new else None
    return load_run(arguments.config, overrides, name=arguments.new) if arguments.new else loaded


def _print_settings(part: str, *, as_yaml: bool) -> int:
    from refocused.config import shipped_files
    from refocused.config.setting_help import REQUIRED, list_settings

    if as_yaml:
        print((shipped_files() / "annotated.yaml").read_text(), end="")
        return ExitCode.OK
    settings, words = list_settings(), part.lower().split()
    shown = [setting for setting in settings if part in setting.name] or [
        setting for setting in settings if all(word in setting.meaning.lower() for word in words)
    ]
    for setting in shown:
        default = REQUIRED if setting.default == REQUIRED else f"default: {setting.default}"
        print(f"{setting.name} ({default})\n    {setting.kind}")
        print(textwrap.fill(setting.meaning, 96, initial_indent=" " * 4, subsequent_indent=" " * 4))
        print(f"    Example: {shlex.join([f'{setting.name}={setting.example}'])}")
    if not shown:
        text = f"No setting's name or description contains {part!r}. --settings alone lists all."
        print_message("error", text)
    return ExitCode.OK if shown else ExitCode.WRONG_USE


def _print_config(loaded: LoadedRun) -> None:
    import json

    from refocused.config.batch_plan import plan_batch
    from refocused.config.deepspeed import deepspeed_config
    from refocused.config.load_run import render_run
    from refocused.config.optimization import ZeroConfig
    from refocused.data.manifest.vocabulary import decide_vocabulary
    from refocused.estimate.flops import count_parameters

    loaded = decide_vocabulary(loaded)
    config = loaded.config
    print(render_run(config))
    if "auto" in (config.batch.micro_batch_size, config.precision.dtype) or not config.zero.decided:
        print("# DeepSpeed's settings depend on the hardware: --dry-run shows them.")
        return
    ranks, model = int(os.environ.get("WORLD_SIZE", "1")), config.model
    parameters = count_parameters(loaded.shape, vocabulary_multiple=model.vocabulary_multiple)
    settings = deepspeed_config(
        batch=plan_batch(config.batch, world_size=ranks, **model.sequence),
        optimizer=config.optimizer,
        precision=config.precision,
        zero=ZeroConfig.model_validate(config.zero.model_dump()),
        parameters=parameters.allocated,
        fragment=loaded.fragment,
        ranks_here=ranks_here(os.environ),
    )
    print(f"# DeepSpeed's settings on {counted(ranks, 'rank')}:")
    print("# " + json.dumps(settings, indent=1).replace("\n", "\n# "))


def train_as_rank(
    loaded: LoadedRun, arguments: argparse.Namespace, rank: int, session: Session
) -> int:
    """Join the other ranks and train; report every failure; return the exit code."""
    from refocused.system.progress import longest_wait
    from refocused.system.world import join_world, watch_hosts
    from refocused.train.step.garbage_collection import quick_imports

    start_screen(rank)
    try:
        with quick_imports():
            import torch  # noqa: F401  (joining imports it: no part of that time)

            session.meter.end_phase("imports")
            section = loaded.config.run
            # DeepSpeed's launcher sets the variable anew, if it is empty to the first GPUs.
            is_hidden = visible_gpus(session.ancestors.environment) == []
            device = "cpu" if is_hidden and section.device == "auto" else section.device
            world = join_world(
                device,
                ranks=section.ranks,
                limit_seconds=section.join_seconds,
                wait_seconds=longest_wait(section.hang_minutes),
            )
            session.joined.set()
            world = dataclasses.replace(world, progress=session.progress)
            watch_hosts(world)
            if session.launch is None:  # else its command has checked already
                from refocused.doctor.early import refuse_early

                check = functools.partial(
                    refuse_early,
                    loaded,
                    ranks=world.world_size,
                    ranks_here=world.local_world_size,
                    device=world.device_kind,
                    resume=arguments.resume,
                    credentials_file=arguments.gcs_credentials,
                    started=True,
                )
                # By the first rank of each machine, for all of its ranks.
                world.on_all_ranks(lambda: check() if world.is_local_rank_0 else None)
            # Otherwise DeepSpeed searches for a device on every rank, with warnings, or uses
            # another one than torch if the variable is left over from a CPU trial.
            os.environ["DS_ACCELERATOR"] = world.device_kind
            session.meter.end_phase("join")
            from refocused.train.lifecycle.trainer import Request, run

            session.meter.end_phase("imports")

        above = session.ancestors
        take_step = None
        if arguments.first_step is not None:
            from refocused.train.lifecycle.trial import Trial

            take_step = Trial(arguments.first_step, world).take_step
        request = Request(
            resume=arguments.resume,
            dry_run=arguments.dry_run,
            credentials=credentials_of(arguments),
            allowed_changes=frozenset(arguments.allow_change),
            trusts_others=arguments.trust,
            parent=arguments.parent,
            profile_steps=arguments.profile,
            at_the_end=take_step,
            command=session.launch.command
            if session.launch is not None
            else resume_command(
                arguments.typed,
                ranks=world.world_size,
                ranks_here=world.local_world_size,
                runner=above.command_line,
                environment=above.environment,
            ),
        )
        code = run(loaded, request, world, session)
        world.leave()
    except BaseException as error:  # Rust's panics and a library's exit, too: the rank has ended
        return report(error)
    finally:
        session.notice.withdraw()
    return code
