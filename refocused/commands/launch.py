"""`launch`, which is also `launch/train.sh`: train under a supervisor, restart after crashes."""

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.checkpoints.step.checkpoint_directory import saved_steps
from refocused.commands import train
from refocused.commands.arguments import NO_FAILURES, Parser, dashed, report
from refocused.commands.monitor import open_in_screen
from refocused.commands.output import count
from refocused.commands.supervisor import StopSignals, Supervisor, Verdict
from refocused.commands.train import printed, without_resume
from refocused.config.load_run import LoadedRun, load_run
from refocused.config.prices import read_prices
from refocused.doctor.early import refuse_early
from refocused.estimate.memory_plan import refuse_cpu
from refocused.monitor.sampler.gpu_reader import NoGpusError, gpu_capabilities
from refocused.system.errors import (
    ConfigError,
    ExitCode,
    RefocusedError,
    ShardError,
    as_typed,
    counted,
)
from refocused.system.launchers import VISIBLE, end_with_parent, free_port, visible_gpus
from refocused.system.logs import print_message
from refocused.system.number_text import duration
from refocused.train.lifecycle.launch_session import Launch, write_summary
from refocused.train.lifecycle.run_folder import StartNotice, has_newer_stop

GRACE_SECONDS = 300
SPOT_GRACE_SECONDS = 25  # a spot machine is taken away about 30 s after its notice
# Before a restart, doubled after each launch that gained no checkpoint; none after one that did,
# since all its processes have ended, and the launcher takes seconds before it needs a GPU.
RESTART_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 3.0, 300.0
POLL_SECONDS = 0.1
CPU_RANKS = 2
RENTED, LARGE_RUN = "H100 SXM", "gpt2_1b_8xh100_fast"
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.py"


def build_parser() -> Parser:
    """Describe the supervisor's own options; all other arguments go to `train`."""
    parser = Parser(
        as_typed("launch"),
        description="Train under a supervisor: signals reach all ranks at once, no process is "
        "left behind, and the exit code is the run's. Takes the options of train, too.",
        examples=("", "--config gpt2_124m --restarts 3 --monitor"),
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.group("options")
    add("--help -h", "show this, then the options of train")
    add("--grace SECONDS", f"time to save after a signal (default: {GRACE_SECONDS})", type=count)
    add("--spot", f"for spot (preemptible) machines: --grace {SPOT_GRACE_SECONDS}")
    restarts = "start again after a crash, at once or after a pause that doubles; give up after N "
    restarts += "starts without a new checkpoint"
    add("--restarts N", restarts, type=int, default=0)
    add("--monitor", "also show the run in a screen session; `screen -U -r monitor` opens it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    began = time.monotonic()
    typed = [dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    own, arguments = build_parser().parse_known_args(typed)
    if own.help:
        build_parser().print_help()
        train.build_parser().print_help()
        return ExitCode.OK
    if own.restarts < 0:
        build_parser().error(f"argument --restarts: {own.restarts}: expected 0 or more")
    if own.spot and own.grace:
        build_parser().error("--spot has no effect with --grace. Keep one")
    wanted = train.read_arguments(arguments)
    if wanted.first_step is not None:
        end_with_parent(os.getppid())  # the doctor
    if wanted.print_config or wanted.settings is not None:  # which need no ranks
        return train.main(arguments)
    try:
        loaded = train.load(wanted)
        gpus = _check(loaded, wanted)
    except RefocusedError as error:
        return report(error)
    grace = own.grace or (SPOT_GRACE_SECONDS if own.spot else GRACE_SECONDS)
    launches = Launches(loaded, gpus, typed, arguments, grace, began, is_dry_run=wanted.dry_run)
    launches.signals.install()
    if own.monitor:
        print_message(None, open_in_screen(launches.run))
    return launches.until_the_end(restarts=own.restarts)


def _check(loaded: LoadedRun, wanted: argparse.Namespace) -> int:
    """Check the run before any rank starts; return the number of usable GPUs."""
    from refocused.data.manifest.vocabulary import decide_vocabulary, require_room_for_tokenizer

    with contextlib.suppress(ShardError):  # rank 0 may read the data on another machine
        require_room_for_tokenizer(loaded, fetch=False)
        loaded = decide_vocabulary(loaded)
    gpus = usable_gpus(loaded)
    device = loaded.config.run.device
    if device == "cuda" and not gpus:
        raise ConfigError(
            "run.device is cuda, and the NVIDIA driver lists no GPU on this machine, or "
            f"{VISIBLE} hides all. Check nvidia-smi, or set run.device=cpu for a trial."
        )
    asked = os.environ.get("RANKS")
    if asked and not (asked.isdecimal() and int(asked)):
        raise ConfigError(f"RANKS={asked} is not a whole number of at least 1.")
    ranks = int(asked or gpus or CPU_RANKS)
    if ranks > gpus > 0 and visible_gpus(os.environ):
        raise ConfigError(
            f"RANKS={ranks}, but {VISIBLE}={os.environ[VISIBLE]} has {counted(gpus, 'GPU')}."
        )
    if not gpus:
        refuse_cpu(loaded, ranks=ranks)
    refuse_early(
        loaded,
        ranks=ranks,
        ranks_here=ranks,
        device="cuda" if gpus and device != "cpu" else "cpu",
        resume=wanted.resume,
        credentials_file=wanted.gcs_credentials,
    )
    return gpus


@dataclasses.dataclass
class Launches:
    """All launches of one command: the first, and restarts after a crash.

    `typed` is the whole command line, `arguments` the part for `train`.
    """

    loaded: LoadedRun
    gpus: int
    typed: Sequence[str]
    arguments: Sequence[str]
    grace_seconds: float
    began_seconds: float
    is_dry_run: bool = False
    signals: StopSignals = dataclasses.field(default_factory=StopSignals)
    _crashed_seconds: float | None = None  # monotonic time of the crash before the next launch

    def __post_init__(self) -> None:
        section = self.loaded.config.run
        self.run = Path(section.directory) / section.name
        chosen = {name: os.environ.get(name) for name in (VISIBLE, "RANKS")}
        words = [f"{name}={value}" for name, value in chosen.items() if value is not None]
        words += shlex.split(as_typed("launch"))
        self.resume_command = printed([*words, *without_resume(self.typed)])
        self.same_command = printed([*words, *self.typed])

    def until_the_end(self, *, restarts: int) -> int:
        """Launch, and restart after crashes as often as allowed; return the run's exit code."""
        fruitless = 0  # launches in a row that saved no new checkpoint
        notice = self._notice("starts its ranks")
        while True:
            before = newest_step(self.run)
            verdict = self._launch()
            notice.withdraw()
            newest = newest_step(self.run)
            fruitless = 0 if newest > before else fruitless + 1
            if verdict.text:
                is_failure = verdict.code not in NO_FAILURES
                print_message("error" if is_failure else None, verdict.text)
            if not verdict.crashed or fruitless > restarts or not restarts or self._should_stop():
                break
            seconds = restart_pause(fruitless)
            pause = f" in {duration(seconds)}" if seconds else ""
            text = f"Restarting from step {newest:,}{pause} (--restarts {restarts})."
            print_message("warning", text)
            notice = self._notice(f"starts again after a crash{pause}")
            ends = time.monotonic() + seconds
            while time.monotonic() < ends and not self._should_stop():
                time.sleep(POLL_SECONDS)
            if self._should_stop():
                notice.withdraw()
                break
            self._crashed_seconds = verdict.ended_seconds
            with contextlib.suppress(RefocusedError):  # maybe it was a GPU that crashed
                self.gpus = usable_gpus(self.loaded) or self.gpus
        if self.is_dry_run and verdict.code != ExitCode.OK:
            return verdict.code  # nothing was saved or changed
        if verdict.code != ExitCode.OK and (trouble := summarize(self.run)):
            print_message("warning", trouble)
        if verdict.text or verdict.crashed:
            # Without a checkpoint the same command again: `--resume STEP --as NAME` took none over.
            hint = f"No checkpoint was saved. Start again: {self.same_command}"
            if newest:
                hint = f"The last checkpoint is step {newest:,}. Resume: {self.resume_command}"
            print_message("hint", hint)
        elif verdict.code == ExitCode.OK and not self.gpus:
            with contextlib.suppress(RefocusedError, OSError):  # too large, or no screen
                print(*rental_lines(self.loaded), sep="\n", flush=True)
        return verdict.code

    def _should_stop(self) -> bool:
        """Return whether a signal or a STOP file asked for it since the command began."""
        is_asked = not self.is_dry_run and has_newer_stop(self.run, self.began_seconds)
        return is_asked or bool(self.signals.times)

    def _notice(self, phase: str) -> StartNotice:
        notice = StartNotice(None if self.is_dry_run else self.run)
        notice.show(phase)
        return notice

    def _launch(self) -> Verdict:
        environment = training_environment(os.environ, gpus=self.gpus)
        program = [str(SCRIPT)]
        if as_typed("train") == "refocused train":
            program = ["--module", "refocused", "train"]
            environment["PYTHONSAFEPATH"] = "1"  # import nothing from the current folder
        command = [*deepspeed_command(environment, gpus=self.gpus), *program, *self.arguments]
        began, grace = self.began_seconds, self.grace_seconds
        launch = Launch.create(
            began_seconds=began,
            grace_seconds=grace,
            command=self.resume_command,
            crashed_seconds=self._crashed_seconds,
        )
        try:
            verdict = Supervisor(
                launch, command, environment, self.signals, self._should_stop
            ).run()
            if any(note.training for note in launch.notes()):
                # --resume applies to the first launch only: a restart from there would lose steps.
                self.arguments = without_resume(self.arguments)
            return verdict
        finally:
            launch.end()


def restart_pause(fruitless: int) -> float:
    """Return the seconds before a restart after so many launches in a row without a checkpoint."""
    doubled = RESTART_PAUSE_SECONDS * 2 ** (fruitless - 1)
    return min(LONGEST_PAUSE_SECONDS, doubled) if fruitless else 0.0


def rental_lines(loaded: LoadedRun) -> list[str]:
    """Return what this run, and one of a 1B model, are estimated to take on rented GPUs."""
    from refocused.estimate.run_cost import START_UP_SECONDS, TasksWork, estimate

    free: dict[str, Any] = {"per_hour_usd": None, "budget_usd": None, "sweep": ()}
    prices, command = read_prices(), as_typed("estimate_cost")
    how = f"{command} --config NAME --gpus N; {duration(START_UP_SECONDS)} of it start-up"
    lines = [f"      on rented GPUs, estimated ({how}):"]
    for name, run, gpus in (("this run", loaded, 1), (LARGE_RUN, load_run(LARGE_RUN, []), 8)):
        found = estimate(run, gpus=gpus, gpu=RENTED, prices=prices, tasks=TasksWork(), **free)
        for offer in [one for one in found.offers if one.price.gpus == gpus][:1]:
            text = f"      {name}: about {duration(found.main.likely.hours * 3600)} and "
            text += f"${offer.cost_usd:,.2f} on {gpus} x {RENTED} (${offer.per_hour_usd:.2f} an "
            lines.append(f"{text}hour at {offer.price.provider} on {offer.price.looked_up})")
    return lines


def usable_gpus(loaded: LoadedRun) -> int:
    """Count the GPUs that CUDA shows, 0 for a run on the CPU.

    Raises:
        RefocusedError: The driver is silent.
    """
    visible = visible_gpus(os.environ)
    if loaded.config.run.device == "cpu" or visible == []:
        return 0
    try:
        gpus = len(gpu_capabilities())
        return gpus if visible is None else min(gpus, len(visible))
    except NoGpusError as error:
        print_message("warning", str(error))
        return 0


def training_environment(environment: Mapping[str, str], *, gpus: int) -> dict[str, str]:
    """Return the environment variables of the launch."""
    chosen, visible = {"PYTHONWARNINGS": "ignore", **environment}, visible_gpus(environment)
    if visible == [] or not (gpus or environment.get("RANKS")):
        # Otherwise DeepSpeed searches for a GPU in every process, with warnings.
        chosen["DS_ACCELERATOR"] = "cpu"
    elif visible:
        chosen[VISIBLE] = ",".join(visible[: int(environment.get("RANKS") or len(visible))])
    return chosen


def deepspeed_command(environment: Mapping[str, str], *, gpus: int) -> list[str]:
    """Return the command that starts one rank a GPU, or two on a machine without GPUs.

    Given a number, DeepSpeed takes the first GPUs and ignores CUDA_VISIBLE_DEVICES. So there is no
    number where that variable names GPUs: `training_environment` leaves it as many as `RANKS`.
    """
    visible = visible_gpus(environment)
    ranks = environment.get("RANKS") or str((gpus if visible != [] else 0) or CPU_RANKS)
    numbered = [] if gpus and visible else ["--num_gpus", ranks]
    port = free_port()  # its own, so that two runs on a machine do not collide
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    return [deepspeed, *numbered, "--master_port", port, "--log_level", "critical"]


def newest_step(run: Path) -> int:
    """Return the newest step saved in a run's folder; 0 if there is none."""
    return max(saved_steps(run / "checkpoints"), default=0)


def summarize(run: Path) -> str:
    """Write the summary of a failed run unless rank 0 did; return an error text, or nothing."""
    summary, state = run / "SUMMARY.md", run / "state.json"
    written = summary.stat().st_mtime if summary.is_file() else 0.0
    return write_summary(run) if state.is_file() and state.stat().st_mtime > written else ""


if __name__ == "__main__":
    sys.exit(main())
