"""`launch/train.py`: train a run on one rank, or as one of the ranks that `deepspeed` starts."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    SILENT_RANK_SECONDS,
    Once,
    Parser,
    add_credentials,
    dashed,
    is_override,
    split_overrides,
)
from refocused.commands.output import count
from refocused.system.errors import ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.config.load_run import LoadedRun
    from refocused.system.world import World
    from refocused.train.lifecycle.session import Session

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCRIPT = "launch/train.py"
RESUME = ("--resume", "--resume-from-checkpoint")


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="train",
        description="Train a run. Start with: deepspeed --num_gpus N launch/train.py ...",
        epilog="section.key=value changes a setting of the run file, for example "
        "optimizer.lr=2e-4. The first Ctrl+C saves and stops.",
    )
    add = parser.add_argument
    run_file = "run file, or the name of one in config/runs (default: demo)"
    add("--config", action=Once, default="demo", metavar="FILE", help=run_file)
    add("--run", metavar="NAME", help="the run's name and folder")
    resume = "auto (default): the newest good step if there is one; latest (also --resume alone), "
    resume += "best, none, a step, a name, a path or a gs:// address"
    add(*RESUME, default="auto", metavar="WHAT", help=resume)
    anew = "where nothing can be resumed, start from scratch as NAME-2, and leave NAME as it is"
    add("--resume-or-start", action="store_true", help=anew)
    add("--trust", action="store_true", help="resume a step that another run saved")
    change = "resume though this differs from the checkpoint, for example data, data.mixture, "
    change += "run.seed, precision.dtype; may be given several times"
    add("--allow-change", action="append", default=[], metavar="SETTING", help=change)
    steps = "the same as run.steps=N; a warmup of the run file that would not end before becomes "
    add("--max-steps", type=int, metavar="N", help=steps + "a tenth of it")
    trace = "trace N steps after the first 10: a Chrome trace and a table in RUN/profile"
    add("--profile", type=count, default=0, metavar="N", help=trace)
    add("--dry-run", action="store_true", help="check everything, train nothing")
    add("--print-config", action="store_true", help="print all settings and exit")
    explain = "explain every setting, or those whose name holds NAME, and exit"
    add("--settings", nargs="?", const="", metavar="NAME", help=explain)
    add_credentials(parser)
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    add("overrides", nargs="*", metavar="section.key=value")
    return parser


def read_arguments(typed: Sequence[str]) -> argparse.Namespace:
    """Read the command line of `launch/train.py`."""
    return build_parser().read(_with_resume_value(typed))


def _with_resume_value(typed: Sequence[str]) -> list[str]:
    """Return arguments with `--resume`, as other trainers accept it, as `--resume=latest`.

    A setting after it (`--resume run.steps=9`) is not its value.
    """
    given = []
    for word, following in zip(typed, [*typed, "--"][1:], strict=True):
        is_bare = dashed(word) in RESUME and (following.startswith("-") or is_override(following))
        given.append(f"{word}=latest" if is_bare else word)
    return given


def without_resume(typed: Sequence[str]) -> list[str]:
    """Return arguments without `--resume WHAT` and the launcher's `--local_rank=N`.

    `--resume none` would begin anew, and a step would leave everything after it behind.
    """
    given, is_value = [], False
    for word in _with_resume_value(typed):
        option, equals, _ = dashed(word).partition("=")
        if is_value:
            is_value = False
        elif len(option) > len("--r") and any(name.startswith(option) for name in RESUME):
            is_value = not equals
        elif option != "--local-rank":
            given.append(word)
    return given


def resume_command(
    arguments: Sequence[str],
    *,
    ranks: int,
    ranks_here: int,
    runner: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the command that continues a run, from the training script's own arguments.

    `runner` and `environment` are the command line and the environment of the `deepspeed` command
    above this rank, where there is one: what was typed, with its own options.
    """
    for place, word in enumerate(runner):
        if Path(word).name == "deepspeed":
            # Found by PATH, its whole path is there, which nobody typed.
            name = "deepspeed" if Path(word).is_absolute() else word
            visible = (environment or {}).get(VISIBLE)
            prefix = f"{VISIBLE}={visible} " if visible else ""
            return prefix + shlex.join([name, *without_resume(runner[place + 1 :])])
    if ranks == 1:
        words = ["python"]
    elif ranks == ranks_here:
        words = ["deepspeed", "--num_gpus", str(ranks)]
    else:
        words = ["deepspeed", "--hostfile", "FILE"]
    return shlex.join([*words, SCRIPT, *without_resume(arguments)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, or exit the process when it was a rank."""
    rank = int(os.environ.get("RANK", "0"))
    arguments = read_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.settings is not None:
        return _print_settings(arguments.settings)
    try:
        loaded = load(arguments)
        if arguments.print_config:
            if rank == 0:
                _print_config(loaded)
            return ExitCode.OK
    except RefocusedError as error:
        return report(error, rank)
    from refocused.train.lifecycle.session import begin_session

    session = begin_session(rank)
    code = train_as_rank(loaded, arguments, rank, session)
    session.presence.leave(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the screen may be gone; the run has outlived it
            stream.flush()
    # An ordinary exit runs the destructors of gloo's threads, which abort the process now and then
    # ("terminate called without an active exception", in 4 of 16 exits with torch 2.13); the
    # launcher takes that for a failed run.
    os._exit(code)


def load(arguments: argparse.Namespace) -> LoadedRun:
    """Read the run file that the command line names, with its changes.

    Raises:
        ConfigError: Something in either is wrong.
    """
    from refocused.checkpoints.resume.changes import check_allowable
    from refocused.config.load_run import load_run

    check_allowable(arguments.allow_change)
    overrides = split_overrides(arguments.overrides)
    if arguments.max_steps is not None:
        overrides.append(f"run.steps={arguments.max_steps}")
    return load_run(arguments.config, overrides, name=arguments.run)


def _print_settings(part: str) -> int:
    from refocused.config.setting_list import list_settings

    found = [one for one in list_settings() if part in one.name]
    for one in found:
        print(f"{one.name}={one.default}\n    {one.kind}")
        print(textwrap.fill(one.meaning, 96, initial_indent=" " * 4, subsequent_indent=" " * 4))
    if not found:
        print(f"No setting's name holds {part!r}. --settings alone lists all.", file=sys.stderr)
    return ExitCode.OK if found else ExitCode.WRONG_USE


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
    if "auto" in (config.batch.micro, config.precision.dtype) or not config.zero.decided:
        print("# What DeepSpeed gets follows from the hardware that trains: --dry-run shows it.")
        return
    ranks, model = int(os.environ.get("WORLD_SIZE", "1")), config.model
    parameters = count_parameters(loaded.shape, vocabulary_multiple=model.vocabulary_multiple)
    settings = deepspeed_config(
        batch=plan_batch(config.batch, world_size=ranks, sequence_length=model.sequence_length),
        optimizer=config.optimizer,
        precision=config.precision,
        zero=ZeroConfig.model_validate(config.zero.model_dump()),
        parameters=parameters.allocated,
        fragment=loaded.fragment,
    )
    print(f"# What DeepSpeed gets on {ranks} ranks:")
    print("# " + json.dumps(settings, indent=1).replace("\n", "\n# "))


def train_as_rank(
    loaded: LoadedRun, arguments: argparse.Namespace, rank: int, session: Session
) -> int:
    """Join the other ranks and train; report every failure; return the exit code."""
    from refocused.system import logs
    from refocused.system.world import join_world, lost_connection
    from refocused.train.step.garbage_collection import quick_imports

    logs.start_screen(rank)
    try:
        with quick_imports():
            world = join_world(loaded.config.run.device)
            if session.launch is None:  # else its command has checked already
                world.on_all_ranks(lambda: _refuse_early(loaded, arguments, world))
            # Told what to use, DeepSpeed does not search for it with warnings on every rank; what
            # an environment for CPU trials had left here would make it compute elsewhere than we.
            os.environ["DS_ACCELERATOR"] = world.device_kind
            from refocused.train.lifecycle.job import Request
            from refocused.train.lifecycle.run import run

        above = session.ancestors
        request = Request(
            resume=arguments.resume,
            dry_run=arguments.dry_run,
            credentials_file=arguments.gcs_credentials,
            project=arguments.gcp_project,
            allowed_changes=frozenset(arguments.allow_change),
            trusts_others=arguments.trust,
            or_start=arguments.resume_or_start,
            profile_steps=arguments.profile,
            command=session.launch.command
            if session.launch is not None
            else resume_command(
                sys.argv[1:],
                ranks=world.world_size,
                ranks_here=world.local_world_size,
                runner=above.command_line,
                environment=above.environment,
            ),
        )
        code = run(loaded, request, world, session)
        world.leave()
    except RefocusedError as error:
        return report(error, rank)
    except Exception as error:
        lost = lost_connection(error)
        if lost is not None:
            return report(lost, rank)
        logging.getLogger("refocused").exception("This should not have happened:")
        if rank != 0:  # whose log lines do not reach the screen
            traceback.print_exc()
        return ExitCode.FAILED
    return code


def _refuse_early(loaded: LoadedRun, arguments: argparse.Namespace, world: World) -> None:
    """Refuse what cannot start, on the first rank of each machine for the others."""
    from refocused.doctor.early import refuse_early

    if world.is_local_rank_0:
        refuse_early(
            loaded,
            ranks=world.world_size,
            ranks_here=world.local_world_size,
            device=world.device_kind,
            resume=arguments.resume,
            credentials_file=arguments.gcs_credentials,
            started=True,
        )


def report(error: RefocusedError, rank: int) -> int:
    """Print what is wrong, once: by rank 0 where all ranks know it, otherwise by the rank itself.

    A configuration is wrong on all ranks or on all of one machine that has other files: there the
    machine's first rank prints it, unless the launcher ends it because rank 0 has ended. Returns
    the exit code.
    """
    is_configuration = isinstance(error, ConfigError)
    if rank != 0 and (error.on_every_rank or is_configuration):
        time.sleep(SILENT_RANK_SECONDS)
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    if rank == 0 or not (error.on_every_rank or (is_configuration and not is_first_here)):
        prefix = f"rank {rank}: " if rank else ""
        with contextlib.suppress(OSError):  # the screen may be gone
            print(f"{prefix}{error}", file=sys.stderr, flush=True)
    return error.exit_code
