"""Kill processes of a training at chosen moments, and record the result of each start."""

import dataclasses
import random
import re
import time
from collections import Counter
from collections.abc import Callable

from chaos_site import (
    COMMAND,
    LAUNCHER,
    MIRROR,
    RANK,
    SAMPLER,
    SUPERVISOR,
    Process,
    Site,
    kill,
    living,
    steps_made,
    wait_until,
)
from measuring import say

SESSION_SECONDS = 240.0  # of one start, until its kill has come and its processes are gone
VANISHING_SECONDS = 90.0  # for all processes of a start whose command or rank was killed
AT_ONCE_SHARE = 0.5  # of the kills of those above the ranks, followed by a start at once
SUPERVISED_SHARE = 0.5  # of the starts whose victim any start has
ASYNC_SHARE = 0.5  # of the starts that save in the background
DRAIN_SECONDS = 120.0

IN_STEPS, IN_SAVE, IN_UPLOAD, IN_START, IN_DOWNLOAD = "steps", "save", "upload", "start", "download"
ONE_RANK, ALL_RANKS = "one rank", "all ranks"
MOMENTS = (IN_STEPS, IN_SAVE, IN_UPLOAD, IN_START, IN_DOWNLOAD)
OUTLIVING = (MIRROR, SAMPLER)  # they end by themselves after the ranks
VICTIMS = (ONE_RANK, ALL_RANKS, LAUNCHER, COMMAND, SUPERVISOR, MIRROR)
NEEDS_START = (IN_START, IN_DOWNLOAD)  # moments of a start, in which there is no mirror yet


@dataclasses.dataclass(frozen=True)
class Kill:
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
    """Return `count` kills: repeated shuffles of all pairs of victim and moment."""
    pairs = [
        Kill(victim, moment)
        for victim in VICTIMS
        for moment in MOMENTS
        if not (victim == MIRROR and moment in NEEDS_START)
    ]
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
        found = re.search(r"resume   step ([\d,]+)", said)
        if found:
            return int(found[1].replace(",", ""))
        return 0 if "from step 0" in said else None

    def processes(self) -> list[Process]:
        """Return this start's living processes, including its mirror."""
        return [process for process in living(self.name) if process.session == self.name]

    def reach(self, moment: str, *, start_seconds: float) -> bool:
        """Wait for a moment and a random time in it; return False if the start has ended."""
        if moment == IN_START:
            return self._sleep(self.chance.uniform(0.3, start_seconds))
        if moment == IN_DOWNLOAD:
            return self._until(self._is_downloading) and self._sleep(self.chance.uniform(0, 1.0))
        enough = self.count() + self.chance.randint(1, 8)
        if not self._until(lambda: self.count() >= enough):
            return False
        if moment == IN_SAVE:
            return self._until(self._is_saving) and self._sleep(self.chance.uniform(0, 0.03))
        if moment == IN_UPLOAD:
            seen = len(self.place.store.proxy.requests)
            return self._until(lambda: self._is_uploading(seen)) and self._sleep(
                self.chance.uniform(0, 0.2)
            )
        return self._sleep(self.chance.uniform(0, 0.1))

    def kill(self, victim: str) -> bool:
        """Kill one of its processes, or all ranks; return False if there is none."""
        roles = {ONE_RANK: RANK, ALL_RANKS: RANK}
        wait_until(lambda: bool(self._playing(roles.get(victim, victim))), seconds=30, poll=0.1)
        chosen = self._playing(roles.get(victim, victim))
        if victim == ONE_RANK and chosen:
            chosen = [self.chance.choice(chosen)]
        kill(chosen)
        return bool(chosen)

    def _playing(self, role: str) -> list[Process]:
        return [process for process in self.processes() if process.role == role]

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

    def _sleep(self, seconds: float) -> bool:
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

    def _disturb(self, session: Session, wanted: Kill, kills: list[Kill]) -> None:
        """Kill until the start has ended; a killed mirror does not end it."""
        while True:
            if not session.reach(wanted.moment, start_seconds=self._start_seconds):
                self._note_end(session, wanted)
                return
            if wanted.moment == IN_DOWNLOAD and session.count():
                wanted = Kill(wanted.victim, IN_STEPS)  # there is nothing to download yet
            killed = session.kill(wanted.victim)
            at = max(steps_made(self.place.run), default=0)
            say(
                f"start {self.outcome.starts:>3}  step {at:>4}  kill {wanted.victim} in "
                f"{wanted.moment}{'' if killed else ': nobody there'}"
            )
            self.outcome.kills[wanted] += killed
            if wanted.victim != MIRROR:
                break
            wanted = self._next_in_training(session, kills)
        at_once = (
            wanted.victim in (LAUNCHER, COMMAND, SUPERVISOR)
            and self.chance.random() < AT_ONCE_SHARE
        )
        if not at_once:
            self._wait_until_gone()
            self.outcome.broken += self.place.broken()
        session.command.wait(SESSION_SECONDS)

    def _next_in_training(self, session: Session, kills: list[Kill]) -> Kill:
        for kill_ in reversed(kills):
            possible = session.supervised or kill_.victim != SUPERVISOR
            if possible and kill_.moment not in NEEDS_START:
                kills.remove(kill_)
                return kill_
        return Kill(ALL_RANKS, IN_STEPS)

    def _note_end(self, session: Session, wanted: Kill) -> None:
        """Handle a start that ended before its kill, which is right only at the training's end."""
        if session.late:
            self.outcome.odd.append(f"{session.name} never came to {wanted.moment}")
            kill(session.processes())
        self._wait_until_gone()
        code = session.command.wait(SESSION_SECONDS)
        if not self._is_finished():
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
        """Wait until only mirrors are left; record and kill other processes."""

        def staying() -> list[Process]:
            return [process for process in living(self.place.mark) if process.role not in OUTLIVING]

        if not wait_until(lambda: not staying(), seconds=VANISHING_SECONDS, poll=0.3):
            self.outcome.odd += [f"{p.role} {p.pid} of {p.session} stayed" for p in staying()]
            kill(staying())

    def _is_finished(self) -> bool:
        return max(steps_made(self.place.run), default=0) >= self.place.steps

    def _wait_for_the_end(self) -> None:
        session = self._start(supervised=True)
        code = session.command.wait(20 * SESSION_SECONDS)
        self._account(session)
        if code:
            words = " | ".join(self.place.said(session.name).splitlines()[-6:])
            self.outcome.odd.append(f"the last start ended with code {code}: {words}")
        self._wait_until_gone()
        if not wait_until(lambda: not living(self.place.mark), seconds=DRAIN_SECONDS, poll=0.3):
            self.outcome.odd += [f"mirror {p.pid} stayed" for p in living(self.place.mark)]
        self.outcome.broken += self.place.broken()
        self.place.harvest()
