"""`launch`, which is also `launch/train.sh`: train under a supervisor, restart after crashes."""

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from refocused.checkpoints.step.checkpoint_directory import saved_steps
from refocused.commands import train
from refocused.commands.arguments import NO_FAILURES, Parser, dashed, report
from refocused.commands.monitor import open_in_screen
from refocused.commands.output import count
from refocused.commands.train import printed, without_resume
from refocused.config.load_run import LoadedRun, load_run
from refocused.config.prices import read_prices
from refocused.doctor.early import refuse_early
from refocused.estimate.memory_plan import refuse_cpu
from refocused.metrics.jsonl import JsonLinesTail, read_json, whole_number
from refocused.monitor.readings import AlarmEvent
from refocused.monitor.sampler.gpu_reader import NoGpusError, gpu_capabilities
from refocused.monitor.sampler.start_sampler import begin_on_end
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
from refocused.train.lifecycle.launch_session import Launch, RankNote, write_summary
from refocused.train.lifecycle.run_folder import StartNotice, has_newer_stop

POLL_SECONDS = 0.25
RUNNER_SECONDS = 5.0  # for `deepspeed` to end its launchers on other machines
BURST_SECONDS = 0.3  # a closing terminal sends two signals at once: they count as one
HURRIED_SECONDS = 30.0  # grace period after the second signal
LAST_RANKS_SECONDS = 30.0  # for the other ranks once one has ended; they rarely need more than 2


class StopSignals:
    """The times of the signals to stop, over all launches."""

    def __init__(self) -> None:
        self.times: tuple[float, ...] = ()
        self.last_number: int = signal.SIGTERM

    def install(self) -> None:
        """Handle the signals that are not ignored already, as under `nohup`."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal."""
        now = time.monotonic()
        if not self.times or now - self.times[-1] >= BURST_SECONDS:
            self.times, self.last_number = (*self.times, now), number


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a launch ended: the run's exit code, and what the ranks could not print themselves.

    `crashed`: no stop was requested, so a restart may help.
    """

    code: ExitCode
    text: str = ""
    crashed: bool = False
    ended_seconds: float | None = None  # monotonic time when the first rank had ended


@dataclasses.dataclass
class Supervisor:
    """Starts `deepspeed`, forwards signals to all ranks at once, and kills what does not end.

    DeepSpeed's launcher signals one rank after another, 30 s each; its runner dies of a signal and
    leaves the ranks running. So both run in a session of their own, which gets no signals from the
    terminal, and the supervisor signals the ranks itself.
    """

    launch: Launch
    command: Sequence[str]
    environment: Mapping[str, str]
    signals: StopSignals
    should_stop: Callable[[], bool]  # whether a STOP file asks for it, which ranks see once open

    _sent: dict[int, int] = dataclasses.field(default_factory=dict)  # rank -> number of signals
    _abandoned: float | None = None  # monotonic time when the runner had ended
    _rank_ended: float | None = None  # the same, of the first rank
    _killed: bool = False
    _events: JsonLinesTail | None = None
    _hang: str | None = None  # why the watchdog has stopped the run

    def run(self) -> Verdict:
        """Start the launch and wait until all of its processes have ended."""
        with subprocess.Popen(
            self.command,
            env={**self.environment, **self.launch.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as runner:
            while not self._over(runner):
                notes, now = self.launch.notes(), time.monotonic()
                if self._abandoned is None and runner.poll() is not None:
                    self._abandoned = now
                if self._rank_ended is None and any(not note.alive for note in notes):
                    self._rank_ended = now
                is_open = any(note.run for note in notes)
                if not is_open and not self.signals.times and self.should_stop():
                    self.signals.receive(signal.SIGTERM)
                self._send_signals(runner, notes)
                self._print_alarms(notes)
                ends = deadline(
                    self.signals.times,
                    grace_seconds=self.launch.grace_seconds,
                    abandoned=self._abandoned,
                    rank_ended=self._rank_ended,
                )
                if now >= ends:
                    if not self._killed:
                        alive = ", ".join(str(note.rank) for note in notes if note.alive)
                        ranks = f" (ranks {alive})" if alive else ""
                        text = f"Grace period expired; killing the remaining processes{ranks}."
                        print_message("warning", text)
                    self._killed = True
                    self._kill_marked()
                time.sleep(POLL_SECONDS)
        verdict = judge(
            self.launch.notes(),
            launcher_code=runner.returncode,
            signals=len(self.signals.times),
            killed=self._killed,
            hang=self._hang,
        )
        return dataclasses.replace(verdict, ended_seconds=self._rank_ended)

    def _over(self, runner: subprocess.Popen[bytes]) -> bool:
        """Return whether the launch has ended; kill what its ranks left behind."""
        if runner.poll() is None:
            return False
        left = self.launch.marked_processes()
        launching = False
        for process in left:
            with contextlib.suppress(OSError):
                launching |= (
                    b"deepspeed.launcher" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
                )
        if not launching and not any(note.alive for note in self.launch.notes()):
            self._kill_marked()
        return not left

    def _send_signals(self, runner: subprocess.Popen[bytes], notes: Sequence[RankNote]) -> None:
        """Send each rank every signal once; SIGTERM if the runner ended before the ranks."""
        signals, number = len(self.signals.times), self.signals.last_number
        if self._abandoned is not None and not signals:
            signals, number = 1, signal.SIGTERM
        if signals and not any(note.run for note in notes):
            # No rank has opened a run. The runner ends the launchers on other machines.
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.terminate()
                runner.wait(RUNNER_SECONDS)
            self._kill_marked()
            return
        for note in notes:
            if note.exit_code is None and note.alive and self._sent.get(note.rank, 0) < signals:
                self._sent[note.rank] = signals
                _send(note.process.pid, number)

    def _print_alarms(self, notes: Sequence[RankNote]) -> None:
        """Print this launch's new alarms, except the budget's, which the run prints."""
        run = notes[0].run if notes else None
        if run is None:
            return
        if self._events is None:  # skip the events of earlier launches
            self._events = JsonLinesTail(Path(run) / "logs" / "events.jsonl")
            self._events.records()
        for record in self._events.records():
            is_alarm = record.get("kind") == AlarmEvent.kind and record.get("raised")
            if is_alarm and record.get("alarm") == "hang":  # printed at the end, unless a rank does
                self._hang = str(record.get("text"))
                continue
            if is_alarm and not str(record.get("alarm")).startswith("budget"):
                is_critical = record.get("severity") == "critical"
                print_message("error" if is_critical else "warning", str(record.get("text")))

    def _kill_marked(self) -> None:
        for process in self.launch.marked_processes():
            _send(process.pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def deadline(
    signals: Sequence[float],
    *,
    grace_seconds: float,
    abandoned: float | None = None,
    rank_ended: float | None = None,
) -> float:
    """Return when to kill the remaining processes; infinity while none has to end.

    All times are in seconds on one clock: of the signals to stop, of the end of the `deepspeed`
    command (`abandoned`) and of the first rank's. After the first signal, `grace_seconds` remain.
    """
    limits = (grace_seconds, HURRIED_SECONDS, 0.0)
    ends = [when + limit for when, limit in zip(signals, limits, strict=False)]
    if abandoned is not None:
        ends.append(abandoned + grace_seconds)
    if rank_ended is not None:
        ends.append(rank_ended + LAST_RANKS_SECONDS)
    return min(ends, default=math.inf)


def judge(
    notes: Sequence[RankNote], *, launcher_code: int, signals: int, killed: bool, hang: str | None
) -> Verdict:
    """Determine how a launch ended from what each rank left about its end (`notes`).

    `launcher_code` is the exit code of the `deepspeed` command, -N if signal N ended it; `signals`
    counts those to stop; `killed`: the grace period expired before everything had ended; `hang`:
    why the watchdog has stopped the run, if it did.
    """
    is_printed = any(note.exit_code == ExitCode.HUNG for note in notes)
    if is_printed or hang:
        return Verdict(ExitCode.HUNG, "" if is_printed else hang or "", crashed=not signals)
    if notes and notes[0].rank == 0 and notes[0].exit_code not in (None, ExitCode.FAILED):
        crashed = notes[0].reason == "PARENT_GONE" and not signals
        return Verdict(ExitCode(notes[0].exit_code), crashed=crashed)
    if signals and not any(note.training for note in notes):
        return Verdict(ExitCode.INTERRUPTED, "Stopped before training began; nothing was changed.")
    lost = [str(note.rank) for note in notes if note.exit_code is None]
    ranks = f"{'Rank' if len(lost) == 1 else 'Ranks'} {', '.join(lost)}" if lost else "A rank"
    if signals and (killed or lost):
        text = f"{ranks} ended without saving: everything since the last checkpoint is lost."
        return Verdict(ExitCode.FAILED, text)
    if lost:
        text = f"{ranks} {'was' if len(lost) == 1 else 'were'} {_cause(launcher_code)}"
        return Verdict(ExitCode.FAILED, text, crashed=not signals)
    if notes:
        return Verdict(ExitCode.FAILED, crashed=not signals)
    if launcher_code == ExitCode.WRONG_USE:
        return Verdict(ExitCode.WRONG_USE)
    return Verdict(
        ExitCode.FAILED,
        f"deepspeed exited with {launcher_code} before any rank started; its output is above.",
        crashed=launcher_code <= 0,  # it was killed, or returned 0 because its launcher was
    )


def _cause(launcher_code: int) -> str:
    """Describe what killed a rank; the launcher returns 256 - N for signal N."""
    try:
        name = signal.Signals(256 - launcher_code).name
    except ValueError:
        return "killed, usually because memory ran out (see dmesg)."
    if name == "SIGKILL":
        return "killed by SIGKILL, usually because memory ran out (see dmesg)."
    return f"killed by {name}; its output is above or in the run's logs/rank-N.log."


GRACE_SECONDS = 300
SPOT_GRACE_SECONDS = 25  # a spot machine is taken away about 30 s after its notice
# Before a restart, doubled after each launch that gained no checkpoint; none after one that did,
# since all its processes have ended, and the launcher takes seconds before it needs a GPU.
RESTART_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 3.0, 300.0
CPU_RANKS = 2
RENTED, LARGE_RUN = "H100 SXM", "llama_1b_8xh100"
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
    options, arguments = build_parser().parse_known_args(typed)
    if options.help:
        build_parser().print_help()
        train.build_parser().print_help()
        return ExitCode.OK
    if options.restarts < 0:
        build_parser().error(f"argument --restarts: {options.restarts}: expected 0 or more")
    if options.spot and options.grace:
        build_parser().error("--spot has no effect with --grace. Keep one")
    of_train = train.read_arguments(arguments)
    if of_train.first_step is not None:
        end_with_parent(os.getppid())  # the doctor
    if of_train.print_config or of_train.settings is not None:  # which need no ranks
        return train.main(arguments)
    try:
        loaded = train.load(of_train)
        gpus = _check(loaded, of_train)
    except RefocusedError as error:
        return report(error)
    grace = options.grace or (SPOT_GRACE_SECONDS if options.spot else GRACE_SECONDS)
    launches = Launches(loaded, gpus, typed, arguments, grace, began, is_dry_run=of_train.dry_run)
    launches.signals.install()
    if options.monitor:
        print_message(None, open_in_screen(launches.run))
    return launches.until_the_end(restarts=options.restarts)


def _check(loaded: LoadedRun, of_train: argparse.Namespace) -> int:
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
        resume=of_train.resume,
        credentials_file=of_train.gcs_credentials,
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
    _has_trained: bool = False  # in any launch
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
        notice = first = self._notice("starts its ranks")
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
        # A failure without a checkpoint has nothing to lose, but somebody who looks at it.
        is_end = newest or verdict.code in (ExitCode.OK, *NO_FAILURES)
        if is_end and self._has_trained and not self._should_stop():
            config, was_over = self.loaded.config, first.found_complete()
            step = whole_number(read_json(self.run / "state.json") or {}, "step") or 0
            for line in begin_on_end(config, verdict.code, step=step, was_over=was_over):
                print_message(None, line)
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
        launch = Launch(
            began_seconds=self.began_seconds,
            grace_seconds=self.grace_seconds,
            command=self.resume_command,
            crashed_seconds=self._crashed_seconds,
        )
        try:
            verdict = Supervisor(
                launch, command, environment, self.signals, self._should_stop
            ).run()
            if any(note.training for note in launch.notes()):
                # --resume applies to the first launch only: a restart from there would lose steps.
                self.arguments, self._has_trained = without_resume(self.arguments), True
            return verdict
        finally:
            launch.end()


def restart_pause(fruitless: int) -> float:
    """Return the seconds before a restart after so many launches in a row without a checkpoint."""
    doubled = RESTART_PAUSE_SECONDS * 2 ** (fruitless - 1)
    return min(LONGEST_PAUSE_SECONDS, doubled) if fruitless else 0.0


def rental_lines(loaded: LoadedRun) -> list[str]:
    """Return what this run, and one of a 1B model, are estimated to take on rented GPUs."""
    from refocused.estimate.run_cost import START_UP_SECONDS, estimate

    prices, command = read_prices(), as_typed("estimate_cost")
    how = f"{command} --config NAME --gpus N; {duration(START_UP_SECONDS)} of it start-up"
    lines = [f"      on rented GPUs, estimated ({how}):"]
    for name, run, gpus in (("this run", loaded, 1), (LARGE_RUN, load_run(LARGE_RUN, []), 8)):
        expected = estimate(run, gpus=gpus, gpu=RENTED, prices=prices)
        for offer, usd in [pair for pair in expected.offers_usd() if pair[0].gpus == gpus][:1]:
            text = f"      {name}: about {duration(expected.main.likely.hours * 3600)} and "
            text += f"${usd:,.2f} on {gpus} x {RENTED} (${offer.per_hour_usd:.2f} an hour at "
            lines.append(f"{text}{offer.provider} on {offer.looked_up})")
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
