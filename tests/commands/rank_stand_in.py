"""A `deepspeed` with its launcher and ranks in miniature: `rank_stand_in.py ROLE ...`.

The processes and what they do with signals are those of DeepSpeed 0.19.8 on one machine; the ranks
use our own notes and handlers, and train nothing.

    deepspeed SCENARIO   starts the launcher and returns its code; a signal ends it alone
    launcher SCENARIO    starts two ranks; ends them one after another when one fails
    rank SCENARIO        opens the run `runs/stand_in` and trains, if the scenario lets it
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from refocused.system.processes import identify
from refocused.train.lifecycle.session import Session, begin_session

RUN = Path("runs/stand_in")


def be_deepspeed(scenario: str) -> int:
    with Path("given").open("a") as file:  # the ranks' arguments, a line for each launch
        file.write(f"{shlex.join(sys.argv[4:])}\n")
    command = [sys.executable, __file__, "launcher", scenario, "deepspeed.launcher.launch"]
    return max(subprocess.Popen(command).wait(), 0)


def be_launcher(scenario: str) -> int:
    command = [sys.executable, __file__, "rank", scenario]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]

    def end(number: int, frame: object) -> None:
        for rank in ranks:
            rank.terminate()
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()
        sys.exit(code or 1)

    code = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while any(rank.poll() is None for rank in ranks):
        code = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if code:
            end(signal.SIGTERM, None)
        time.sleep(0.05)
    return next((rank.returncode for rank in ranks if rank.returncode), 0) % 256


def be_rank(scenario: str) -> int:
    rank = int(os.environ["RANK"])
    session = begin_session(rank)
    code = _train(scenario, rank, session)
    session.report(exit_code=code)
    return code


def _train(scenario: str, rank: int, session: Session) -> int:
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / f"pid-{rank}").write_text(str(os.getpid()))
    if scenario == "imports":  # before anything is open
        time.sleep(600)
    session.joined.set()
    session.report(run=str(RUN), training=True)
    session.signals.notices = session.training_notices
    if scenario == "hangs":  # besides, a process of the rank's would outlive it
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    (RUN / f"training-{rank}").touch()
    if scenario == "works":
        return 5
    if scenario == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "gains":  # a step a start, then it dies; the third start lives
        return _gain(rank)
    while not (RUN / f"pid-{1 - rank}").exists():
        time.sleep(0.01)
    while not session.signals.asked and not session.ancestors.gone:
        time.sleep(0.01)
        if not _lives(RUN / f"pid-{1 - rank}"):  # as a collective notices it
            return 1
    if scenario == "hangs" and rank == 1:
        time.sleep(600)
    session.report(reason="SIGNAL" if session.signals.asked else "PARENT_GONE")
    return 130


def _lives(file: Path) -> bool:
    return not file.exists() or identify(int(file.read_text() or os.getpid())) is not None


def _gain(rank: int) -> int:
    steps = len(list((RUN / "checkpoints").glob("*"))) if rank == 0 else 0
    if rank == 0 and steps == 2:
        return 0
    if rank == 0:
        (RUN / "checkpoints" / f"checkpoint_step_{steps + 1}").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return 0


if __name__ == "__main__":
    roles = {"deepspeed": be_deepspeed, "launcher": be_launcher, "rank": be_rank}
    sys.exit(roles[sys.argv[1]](sys.argv[2]))
