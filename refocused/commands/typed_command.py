"""The command that takes a run up again, from the one that was typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from refocused.commands.arguments import dashed, is_override

VISIBLE = "CUDA_VISIBLE_DEVICES"
SCRIPT = "launch/train.py"
RESUME = ("--resume", "--resume-from-checkpoint")


def with_resume_value(typed: Sequence[str]) -> list[str]:
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
    given, is_request = [], False
    for word in with_resume_value(typed):
        option, equals, _ = dashed(word).partition("=")
        if is_request:
            is_request = False
        elif len(option) > len("--r") and any(name.startswith(option) for name in RESUME):
            is_request = not equals
        elif option != "--local-rank":
            given.append(word)
    return given


def command_to_go_on(
    arguments: Sequence[str],
    *,
    ranks: int,
    ranks_here: int,
    runner: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the command that takes a run up again where it ended.

    Args:
        arguments: Those of the training script, as this rank got them.
        ranks: All of the run.
        ranks_here: Those on this machine.
        runner: The command line of the `deepspeed` command above this rank, where there is one:
            what was typed, with its own options.
        environment: Of that command.
    """
    typed = _after_interpreter(runner)
    if typed:
        visible = (environment or {}).get(VISIBLE)
        prefix = f"{VISIBLE}={visible} " if visible else ""
        return prefix + shlex.join(without_resume(typed))
    if ranks == 1:
        words = ["python", SCRIPT]
    elif ranks == ranks_here:
        words = ["deepspeed", "--num_gpus", str(ranks), SCRIPT]
    else:
        words = ["deepspeed", "--hostfile", "FILE", SCRIPT]
    return shlex.join([*words, *without_resume(arguments)])


def _after_interpreter(command_line: Sequence[str]) -> list[str]:
    """Return `deepspeed ...` as typed; nothing when that command is none."""
    for place, word in enumerate(command_line):
        if Path(word).name == "deepspeed":
            # Found by PATH, its whole path is there, which nobody typed.
            name = "deepspeed" if Path(word).is_absolute() else word
            return [name, *command_line[place + 1 :]]
    return []
