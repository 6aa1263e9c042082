"""`launch/train.sh` after the set-up: train under a supervisor that returns the true exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from refocused.checkpoints.step.branches import saved_steps
from refocused.commands import train
from refocused.commands.arguments import Parser, dashed
from refocused.commands.monitor import open_in_screen
from refocused.commands.output import count
from refocused.commands.supervisor import StopSignals, Supervisor, Verdict
from refocused.commands.train import VISIBLE, without_resume
from refocused.config.load_run import LoadedRun
from refocused.doctor.early import refuse_early
from refocused.estimate.memory_plan import refuse_cpu
from refocused.monitor.sampler.gpu_reader import NoGpusError, gpu_capabilities
from refocused.system.errors import ConfigError, ExitCode, RefocusedError, ShardError
from refocused.train.lifecycle.launch_session import Launch, write_summary

GRACE_SECONDS = 300
SPOT_GRACE_SECONDS = 25  # a spot machine is gone about 30 s after its notice
RESTART_PAUSE_SECONDS = 3.0  # until GPUs and ports are free again
CPU_RANKS = 2
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.py"


def build_parser() -> Parser:
    """Describe the command line; what is not its own goes to `launch/train.py`."""
    parser = Parser(
        prog="train.sh",
        description="Train under a supervisor: signals reach all ranks at once, nothing is left "
        "behind, and the exit code is that of the run. All other arguments go to launch/train.py.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("--help", "-h", action="store_true", help="show this, then the options of train.py")
    grace = f"time to save after a signal, then everything is killed ({GRACE_SECONDS})"
    add("--grace", type=count, metavar="SECONDS", help=grace)
    spot = f"for spot (preemptible) machines: --grace {SPOT_GRACE_SECONDS}"
    add("--spot", action="store_true", help=spot)
    restarts = (
        "start again after a crash, and give up after N starts in a row that ended without a newer "
        "checkpoint (0: never)"
    )
    add("--restarts", type=int, default=0, metavar="N", help=restarts)
    screen = "also show the run in a screen session; `screen -U -r monitor` opens it"
    add("--monitor", action="store_true", help=screen)
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
    wanted = train.read_arguments(arguments)
    try:
        loaded = train.load(wanted)
        gpus = _check(loaded, wanted)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    grace = own.grace or (SPOT_GRACE_SECONDS if own.spot else GRACE_SECONDS)
    launches = Launches(loaded, gpus, typed, arguments, grace, began)
    launches.signals.install()
    if own.monitor:
        say(open_in_screen(launches.run))
    return launches.until_the_end(restarts=own.restarts)


def _check(loaded: LoadedRun, wanted: argparse.Namespace) -> int:
    """Refuse what cannot start before ranks take their time to find out; return the usable GPUs.

    Raises:
        ConfigError: Everything that was found.
    """
    from refocused.data.manifest.vocabulary import decide_vocabulary, require_room_for_tokenizer

    with contextlib.suppress(ShardError):  # rank 0 reads it, maybe on another machine
        require_room_for_tokenizer(loaded, fetch=False)
        loaded = decide_vocabulary(loaded)
    gpus = usable_gpus(loaded)
    if wanted.print_config:
        return gpus
    device = loaded.config.run.device
    if device == "cuda" and not gpus:
        raise ConfigError(
            "run.device is cuda, and the NVIDIA driver lists no GPU on this machine. Check "
            "nvidia-smi, or set run.device=cpu for a trial."
        )
    asked, visible = os.environ.get("RANKS"), os.environ.get(VISIBLE)
    if asked and not (asked.isdecimal() and int(asked)):
        raise ConfigError(f"RANKS={asked}: a whole number of at least 1 is wanted.")
    seen = len(visible.split(",")) if visible and gpus else gpus
    ranks = int(asked or seen or CPU_RANKS)
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
    """The launches of one command: the first, and those after a crash.

    `typed` is its whole command line, and `arguments` the part for `launch/train.py`.
    """

    loaded: LoadedRun
    gpus: int
    typed: Sequence[str]
    arguments: Sequence[str]
    grace_seconds: float
    began_seconds: float
    signals: StopSignals = dataclasses.field(default_factory=StopSignals)

    def __post_init__(self) -> None:
        section = self.loaded.config.run
        self.run = Path(section.directory) / section.name
        chosen = {name: os.environ.get(name) for name in (VISIBLE, "RANKS")}  # chose the GPUs
        words = [f"{name}={value}" for name, value in chosen.items() if value]
        self.resume_command = shlex.join([*words, "launch/train.sh", *without_resume(self.typed)])

    def until_the_end(self, *, restarts: int) -> int:
        """Launch, again after a crash if that is allowed; return the true exit code."""
        fruitless = 0  # starts in a row that ended without a newer checkpoint
        while True:
            before = newest_step(self.run)
            verdict = self._launch()
            newest = newest_step(self.run)
            fruitless = 0 if newest > before else fruitless + 1
            if verdict.text:
                say(verdict.text)
            is_asked_to_stop = self.signals.times or (self.run / "STOP").exists()
            if is_asked_to_stop or not verdict.crashed or fruitless > restarts or not restarts:
                break
            say(f"Starting again after step {newest:,} (--restarts {restarts}).")
            time.sleep(RESTART_PAUSE_SECONDS)
            with contextlib.suppress(RefocusedError):  # a GPU may have been what crashed
                self.gpus = usable_gpus(self.loaded) or self.gpus
        if verdict.code != ExitCode.OK and (trouble := summarize(self.run)):
            say(trouble)
        if verdict.text or verdict.crashed:
            saved = f"The last checkpoint is step {newest:,}. Resume" if newest else ""
            say(f"{saved or 'Nothing is saved. Again'}: {self.resume_command}")
        return verdict.code

    def _launch(self) -> Verdict:
        environment = training_environment(os.environ, gpus=self.gpus)
        command = [*deepspeed_command(environment, gpus=self.gpus), str(SCRIPT), *self.arguments]
        began, grace = self.began_seconds, self.grace_seconds
        launch = Launch.create(
            began_seconds=began, grace_seconds=grace, command=self.resume_command
        )
        try:
            verdict = Supervisor(launch, command, environment, self.signals, say).run()
            if any(note.training for note in launch.notes()):
                # What was asked for is done: to resume from there once more would lose steps.
                self.arguments = without_resume(self.arguments)
            return verdict
        finally:
            launch.remove()


def say(text: str) -> None:
    """Print for a person, who may have closed the terminal."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def usable_gpus(loaded: LoadedRun) -> int:
    """Count the machine's GPUs; 0 where the run is to train on the CPU.

    Raises:
        RefocusedError: The driver hangs.
    """
    if loaded.config.run.device == "cpu":
        return 0
    try:
        return len(gpu_capabilities())
    except NoGpusError as error:
        say(f"WARN  {error}")
        return 0


def training_environment(environment: Mapping[str, str], *, gpus: int) -> dict[str, str]:
    """Return the environment to train in."""
    chosen = {"PYTHONWARNINGS": "ignore", **environment}
    if not gpus and not environment.get("RANKS"):
        # Or DeepSpeed searches for a GPU in every process, with warnings.
        chosen["DS_ACCELERATOR"] = "cpu"
    return chosen


def deepspeed_command(environment: Mapping[str, str], *, gpus: int) -> list[str]:
    """Return what starts one rank a GPU, or two on a machine without any.

    With a number DeepSpeed takes the first GPUs, whatever CUDA_VISIBLE_DEVICES says; so it gets
    none where that is set, unless `RANKS` insists on a number.
    """
    ranks = environment.get("RANKS")
    if not ranks and not (gpus and environment.get(VISIBLE)):
        ranks = str(gpus or CPU_RANKS)
    numbered = ["--num_gpus", ranks] if ranks else []
    with socket.socket() as free:  # a port of its own, so that two runs here do not meet
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    return [deepspeed, *numbered, "--master_port", port, "--log_level", "critical"]


def newest_step(run: Path) -> int:
    """Return the newest step saved in a run's folder; 0 without any."""
    return max(saved_steps(run / "checkpoints"), default=0)


def summarize(run: Path) -> str:
    """Write the summary of a run that failed, where rank 0 wrote none; return what went wrong."""
    summary, state = run / "SUMMARY.md", run / "state.json"
    written = summary.stat().st_mtime if summary.is_file() else 0.0
    return write_summary(run) if state.is_file() and state.stat().st_mtime > written else ""


if __name__ == "__main__":
    sys.exit(main())
