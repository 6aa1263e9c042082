"""A two-rank training that is killed again and again, over a store with faults, and resumed.

    .venv/bin/python benchmarks/chaos.py [--kills 28] [--seed 0] [--minutes 20] [--json FILE]

Who: one rank, all ranks, DeepSpeed's launcher, the deepspeed command, the supervisor of
launch/train.sh, the mirror; by kill -9. When: in the steps, in a save, in an upload, in a start, in
the download of a resume whose machine was lost; with saves in the background and without. After
each the same command is typed again. In the end every loss that was ever written and every tensor
of the last checkpoint must equal those of an undisturbed run; exit code 3 if anything
differs, or a visible step was ever broken, or a process stayed behind.
"""

import argparse
import dataclasses
import random
import re
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from chaos_site import (
    COMMAND,
    LAUNCHER,
    MIRROR,
    RANK,
    SAMPLER,
    SUPERVISOR,
    Process,
    Site,
    digest,
    kill,
    living,
    losses,
    site,
    steps_made,
    wait_until,
)
from measuring import Column, parser_of, say, table, write_report

STEPS_FOR_A_KILL = 20  # typical progress of a start before its kill
SESSION_SECONDS = 240.0  # of one start, until its kill has come and its processes are gone
VANISHING_SECONDS = 90.0  # for all processes of a start whose command or rank was killed
AT_ONCE_SHARE = 0.5  # of the kills of those above the ranks, followed by a start at once
SUPERVISED_SHARE = 0.5  # of the starts whose victim any start has
ASYNC_SHARE = 0.5  # of the starts that save in the background
DRAIN_SECONDS = 120.0

IN_STEPS, IN_SAVE, IN_UPLOAD, IN_START, IN_DOWNLOAD = "steps", "save", "upload", "start", "download"
ONE_RANK, ALL_RANKS = "one rank", "all ranks"
MOMENTS = (IN_STEPS, IN_SAVE, IN_UPLOAD, IN_START, IN_DOWNLOAD)
VICTIMS = (ONE_RANK, ALL_RANKS, LAUNCHER, COMMAND, SUPERVISOR, MIRROR)
NEEDS_START = (IN_START, IN_DOWNLOAD)  # moments of a start, in which there is no mirror yet


class Kill(NamedTuple):
    """A victim and a moment."""

    victim: str
    moment: str


@dataclasses.dataclass
class Outcome:
    """Results of the kills."""

    kills: Counter[Kill] = dataclasses.field(default_factory=Counter)  # how often each was done
    starts: int = 0  # of the command
    resumes: int = 0  # starts that resumed
    machines_lost: int = 0  # removed folders of the run
    steps_lost: int = 0  # repeated steps of all resumes
    # incomplete visible checkpoints, here or in the store
    broken: list[str] = dataclasses.field(default_factory=list)
    # unexpected: a start that ended by itself, a process that stayed
    odd: list[str] = dataclasses.field(default_factory=list)


def deck(kills: int, chance: random.Random) -> list[Kill]:
    """Return so many kills: repeated shuffles of all pairs of victim and moment."""
    pairs = [Kill(victim, moment) for victim in VICTIMS for moment in MOMENTS]
    pairs = [pair for pair in pairs if pair.victim != MIRROR or pair.moment not in NEEDS_START]
    drawn: list[Kill] = []
    while len(drawn) < kills:
        chance.shuffle(pairs)
        drawn += pairs
    return drawn[:kills]


class Session:
    """One start of the command, until it is killed or ends."""

    def __init__(
        self, place: Site, number: int, chance: random.Random, *, supervised: bool
    ) -> None:
        self.place = place
        self.name = f"{place.mark}-{number}"
        self.chance = chance
        self._already_made = len(steps_made(place.run))
        self._already_written = place.metrics.stat().st_size if place.metrics.exists() else 0
        self.supervised = supervised
        changes = ["checkpoint.async=true"] if chance.random() < ASYNC_SHARE else []
        self.command = place.start(self.name, *changes, supervised=supervised)
        self.began = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the command has."""
        return self.command.poll() is not None

    @property
    def late(self) -> bool:
        """Whether the start has timed out."""
        return time.monotonic() - self.began > SESSION_SECONDS

    def made(self) -> list[int]:
        """Return the steps of this start."""
        return steps_made(self.place.run)[self._already_made :]

    def count(self) -> int:
        """Count the steps of this start; fast, because it is polled."""
        try:
            with self.place.metrics.open("rb") as file:
                file.seek(self._already_written)
                return file.read().count(b'"kind": "step"')
        except FileNotFoundError:
            return 0

    def resumed(self) -> int | None:
        """Return the logged step of the resume; 0 without one."""
        said = self.place.said(self.name)
        resume = re.search(r"resume   step ([\d,]+)", said)
        if resume:
            return int(resume[1].replace(",", ""))
        return 0 if "from step 0" in said else None

    def processes(self, role: str | None = None) -> list[Process]:
        """Return this start's living processes, including its mirror, or those of a role."""
        mine = [process for process in living(self.name) if process.session == self.name]
        return [process for process in mine if role in (None, process.role)]

    def reach(self, moment: str, *, start_seconds: float) -> bool:
        """Wait for a moment and a random time in it; return False if the start has ended."""
        if moment == IN_START:
            return self._sleep(start_seconds, least=0.3)
        if moment == IN_DOWNLOAD:
            return self._until(self._is_downloading) and self._sleep(1.0)
        enough = self.count() + self.chance.randint(1, 8)
        if not self._until(lambda: self.count() >= enough):
            return False
        if moment == IN_SAVE:
            return self._until(self._is_saving) and self._sleep(0.03)
        if moment == IN_UPLOAD:
            seen = len(self.place.store.proxy.requests)
            return self._until(lambda: self._is_uploading(seen)) and self._sleep(0.2)
        return self._sleep(0.1)

    def kill(self, victim: str) -> bool:
        """Kill one of its processes, or all ranks; return False if there is none."""
        role = RANK if victim in (ONE_RANK, ALL_RANKS) else victim
        wait_until(lambda: bool(self.processes(role)), seconds=30, poll=0.1)
        chosen = self.processes(role)
        if victim == ONE_RANK and chosen:
            chosen = [self.chance.choice(chosen)]
        kill(chosen)
        return bool(chosen)

    def _is_saving(self) -> bool:
        staged = self.place.checkpoints.glob(".tmp-*")
        return any(not path.name.endswith("-fetch") for path in staged)

    def _is_downloading(self) -> bool:
        return any(self.place.checkpoints.glob(".tmp-*-fetch")) or self.count() > 0

    def _is_uploading(self, seen: int) -> bool:
        return any(request.is_upload for request in self.place.store.proxy.requests[seen:])

    def _until(self, condition: Callable[[], bool]) -> bool:
        return wait_until(
            lambda: self.ended or self.late or condition(), seconds=SESSION_SECONDS, poll=0.005
        ) and not (self.ended or self.late)

    def _sleep(self, most: float, *, least: float = 0.0) -> bool:
        seconds = self.chance.uniform(least, most)
        return not wait_until(lambda: self.ended, seconds=seconds, poll=0.005)


class Chaos:
    """Carries out the kills of a deck, start by start."""

    def __init__(self, place: Site, chance: random.Random, *, start_seconds: float) -> None:
        self.place = place
        self.chance = chance
        self.outcome = Outcome()
        self._start_seconds = start_seconds
        self._last_made = 0  # the last step before the present start

    def run(self, kills: list[Kill], *, until: float) -> None:
        """Do the kills, one or more a start, in any order that fits; then let the training end.

        No kill begins after `until` (`time.monotonic`).
        """
        while kills and time.monotonic() < until and not self._is_finished():
            first = kills.pop()
            if first.moment == IN_DOWNLOAD:
                self._lose_machine()
            supervised = first.victim == SUPERVISOR or self.chance.random() < SUPERVISED_SHARE
            session = self._start(supervised=supervised)
            self._disturb(session, first, kills)
            self._account(session)
        self._wait_for_the_end()

    def _start(self, *, supervised: bool) -> Session:
        self.outcome.starts += 1
        self.place.store.proxy.requests.clear()
        return Session(self.place, self.outcome.starts, self.chance, supervised=supervised)

    def _disturb(self, session: Session, planned: Kill, kills: list[Kill]) -> None:
        """Kill until the start has ended; a killed mirror does not end it."""
        while True:
            if not session.reach(planned.moment, start_seconds=self._start_seconds):
                self._note_end(session, planned)
                return
            if planned.moment == IN_DOWNLOAD and session.count():
                planned = Kill(planned.victim, IN_STEPS)  # there is nothing to download yet
            killed = session.kill(planned.victim)
            at = max(steps_made(self.place.run), default=0)
            say(
                f"start {self.outcome.starts:>3}  step {at:>4}  kill {planned.victim} in "
                f"{planned.moment}{'' if killed else ': nobody there'}"
            )
            self.outcome.kills[planned] += killed
            if planned.victim != MIRROR:
                break
            planned = self._next_in_training(session, kills)
        is_above = planned.victim in (LAUNCHER, COMMAND, SUPERVISOR)
        if not (is_above and self.chance.random() < AT_ONCE_SHARE):
            self._wait_until_gone()
            self.outcome.broken += self.place.broken()
        session.command.wait(SESSION_SECONDS)

    def _next_in_training(self, session: Session, kills: list[Kill]) -> Kill:
        for planned in reversed(kills):
            possible = session.supervised or planned.victim != SUPERVISOR
            if possible and planned.moment not in NEEDS_START:
                kills.remove(planned)
                return planned
        return Kill(ALL_RANKS, IN_STEPS)

    def _note_end(self, session: Session, planned: Kill) -> None:
        """Handle a start that ended before its kill, which is right only at the training's end."""
        if session.late:
            self.outcome.odd.append(f"{session.name} never came to {planned.moment}")
            kill(session.processes())
        self._wait_until_gone()
        self._expect_no_error(session, is_right=self._is_finished(), seconds=SESSION_SECONDS)

    def _expect_no_error(self, session: Session, *, is_right: bool, seconds: float) -> None:
        code = session.command.wait(seconds)
        if not is_right:
            words = " | ".join(self.place.said(session.name).splitlines()[-6:])
            self.outcome.odd.append(f"{session.name} ended by itself with code {code}: {words}")

    def _account(self, session: Session) -> None:
        resumed, made = session.resumed(), session.made()
        if resumed is not None:
            self.outcome.resumes += resumed > 0
            self.outcome.steps_lost += max(0, self._last_made - resumed)
            self._last_made = max(made, default=resumed)

    def _lose_machine(self) -> None:
        """Remove everything of the run outside the store, and kill the mirror."""
        self._wait_until_gone()
        kill(living(self.place.mark))
        wait_until(lambda: not living(self.place.mark), seconds=VANISHING_SECONDS, poll=0.3)
        self.outcome.machines_lost += 1
        self.place.lose_machine(self.outcome.machines_lost)

    def _wait_until_gone(self) -> None:
        """Wait until only what ends by itself after the ranks is left; record and kill the rest."""

        def staying() -> list[Process]:
            outliving = (MIRROR, SAMPLER)
            return [process for process in living(self.place.mark) if process.role not in outliving]

        if not wait_until(lambda: not staying(), seconds=VANISHING_SECONDS, poll=0.3):
            self.outcome.odd += [f"{p.role} {p.pid} of {p.session} stayed" for p in staying()]
            kill(staying())

    def _is_finished(self) -> bool:
        return max(steps_made(self.place.run), default=0) >= self.place.steps

    def _wait_for_the_end(self) -> None:
        session = self._start(supervised=True)
        code = session.command.wait(20 * SESSION_SECONDS)
        self._account(session)
        self._expect_no_error(session, is_right=not code, seconds=0)
        self._wait_until_gone()
        if not wait_until(lambda: not living(self.place.mark), seconds=DRAIN_SECONDS, poll=0.3):
            self.outcome.odd += [f"mirror {p.pid} stayed" for p in living(self.place.mark)]
        self.outcome.broken += self.place.broken()
        self.place.harvest()


def train_undisturbed(place: Site) -> float:
    """Train without a mirror and without kills; return the seconds until the first step."""
    began, session = time.monotonic(), f"{place.mark}-reference"
    command = place.start(session, "run.directory=reference", "checkpoint.mirror=null")
    wait_until(lambda: bool(steps_made(place.reference)) or command.poll() is not None, seconds=600)
    start_seconds = time.monotonic() - began
    if command.wait(3600):
        sys.exit(place.said(session))
    return start_seconds


def report(place: Site, outcome: Outcome, chosen: argparse.Namespace) -> bool:
    """Print the tables, write the JSON; return whether all checks passed."""
    undisturbed = losses(place.reference)
    lost = [key for key, _ in undisturbed if key not in place.losses]
    differing = [key for key, loss in undisturbed if place.losses.get(key, {loss}) != {loss}]
    differing += [key for key in lost if key.startswith("step ")]
    same = digest(place.run, place.steps) == digest(place.reference, place.steps)
    rows = {
        victim: {moment: outcome.kills[Kill(victim, moment)] or None for moment in MOMENTS}
        for victim in VICTIMS
    }
    columns = [Column(moment, f"in {moment}", "{:.0f}") for moment in MOMENTS]
    print(table(rows, columns, title="Kills -9, by who and when"))
    results: dict[str, object] = {
        "kills": sum(outcome.kills.values()),
        "starts": outcome.starts,
        "resumes": outcome.resumes,
        "machines lost": outcome.machines_lost,
        "steps lost": outcome.steps_lost,
        "steps of the run": place.steps,
        "saves committed": place.said_in_all("save "),
        "uploads committed": len(place.committed()),
        "visible steps broken": len(outcome.broken),
        "losses compared": len(undisturbed),
        "losses that differ": len(differing),
        # A stop may skip a validation, and a resume does not repeat it.
        "validations missed": sum(key.startswith("validation ") for key in lost),
        "digest equal": "yes" if same else "NO",
        "oddities": len(outcome.odd),
    }
    print("\n" + "\n".join(f"{name:<22}{value:>8}" for name, value in results.items()))
    for line in [*outcome.broken, *outcome.odd, *differing[:10]]:
        print(f"! {line}")
    by_pair = {f"{victim} in {moment}": n for (victim, moment), n in outcome.kills.items()}
    details = {"by who and when": by_pair, "broken": outcome.broken, "odd": outcome.odd}
    write_report(chosen, {**results, **details, "differing": differing})
    return same and not (differing or outcome.broken or outcome.odd)


def main() -> int:
    """Train without and with faults; compare."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--kills", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="no kill begins after these")
    parser.add_argument("--work", type=Path, help="folder for the runs; kept")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clean-up below runs
    chance = random.Random(chosen.seed)
    steps = STEPS_FOR_A_KILL * (chosen.kills + 1)
    mark = uuid.uuid4().hex[:12]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with site(folder, steps=steps, mark=mark, seed=chosen.seed) as place:
            try:
                say(f"{steps} steps undisturbed")
                start_seconds = train_undisturbed(place)
                chaos = Chaos(place, chance, start_seconds=start_seconds)
                until = time.monotonic() + chosen.minutes * 60
                chaos.run(deck(chosen.kills, chance), until=until)
            finally:
                kill(living(mark))
            right = report(place, chaos.outcome, chosen)
    return 0 if right else 3


if __name__ == "__main__":
    sys.exit(main())
