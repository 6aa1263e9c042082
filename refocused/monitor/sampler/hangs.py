"""When a run hangs, which rank is missing, and the report; pure functions of what was seen."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from refocused.system.number_text import duration
from refocused.system.progress import EVALUATION_FACTOR, LEAST_SECONDS, OTHER_SECONDS, Moment

STEPS = 20  # the limit that is derived from the measured time of steps
FIRST_STEPS = 2
BEAT_SECONDS = 5.0  # a thread that wants the interpreter each second gets it sooner, if at all
LONGEST_POLL_SECONDS = 2.0
MOST_NAMED = 8
# In the kernel, what a thread that waits for a disk waits in.
DISK_WAIT = re.compile(
    r"request_wait_answer|fuse|nfs|rpc_|io_schedule|folio|wait_on_page|wait_on_buffer|jbd2|xfs|"
    r"ext4|btrfs|wait_for_partner|percpu_rwsem|blk_|cifs|netfs|lustre|cl_sync|gpfs"
)

Cause = Literal["stopped", "disk", "interpreter", "network", "busy", "collective", "none"]
CAUSES = get_args(Cause)  # the most certain first


class Watch:
    """Finds out from moments of this machine's ranks whether they hang.

    Time is counted while it watches: a machine or a control group that was suspended as a whole
    does not look like a hang.
    """

    def __init__(self, hang_minutes: float | None) -> None:
        self._minutes = hang_minutes
        self._watched, self._last = 0.0, float("inf")
        self._values: dict[object, tuple[object, float]] = {}  # by what, and since when
        self._steps: collections.deque[float] = collections.deque(maxlen=50)
        self._step = 0

    @property
    def limit_seconds(self) -> float:
        """How long a step may make no progress: `run.hang_minutes`, or derived from its time."""
        derived = max(LEAST_SECONDS, STEPS * statistics.median(self._steps or [0.0]))
        return derived if self._minutes is None else self._minutes * 60

    def observe(self, ranks: Mapping[int, Moment], now: float) -> float:
        """Return for how many seconds no rank has made progress, if that is a hang; else 0.

        `ranks` are all of this machine that run, `now` is in monotonic seconds.
        """
        self._watched += max(0.0, min(LONGEST_POLL_SECONDS, now - self._last))
        self._last, moments = now, ranks.values()
        idle = min((self._unchanged(rank, ranks[rank].changes) for rank in ranks), default=0.0)
        newest = max((moment.step for moment in moments), default=0)
        if newest > self._step > 0:
            self._steps.append(self._unchanged("step", self._step) / (newest - self._step))
        self._step = newest
        self._unchanged("step", newest)
        # Ranks whose batches are late call each other all the time.
        is_fetching = ranks and all(moment.activity == "data" for moment in moments)
        fetching = self._unchanged("data", newest if is_fetching else now)
        if fetching > max(OTHER_SECONDS, self.limit_seconds):
            return fetching
        # A rank that does not beat is stopped or holds the interpreter, whatever it does.
        if any(min(idle, moment.beat_seconds) > self.limit_seconds for moment in moments):
            return idle
        # Ranks that are in a call of the control plane wait for those that are not.
        late = [moment for moment in moments if not moment.call] or moments
        return idle if ranks and idle > max(self._limit(moment) for moment in late) else 0.0

    def _unchanged(self, what: object, value: object) -> float:
        """Return for how many seconds `what` has had this value."""
        if self._values.get(what, (None, 0.0))[0] != value:
            self._values[what] = value, self._watched
        return self._watched - self._values[what][1]

    def _limit(self, moment: Moment) -> float:
        step = self.limit_seconds
        if moment.activity == "validation":
            return EVALUATION_FACTOR * step
        is_step = moment.activity in ("step", "data")
        return step if is_step and moment.taken > FIRST_STEPS else max(step, OTHER_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found out about one rank that makes no progress."""

    rank: int
    host: str
    pid: int
    moment: Moment
    state: str = "S"  # of its main thread, as in /proc; empty: the process has ended
    kernel: str = ""  # the kernel's function in which the main thread waits
    frames: tuple[str, ...] = ()  # of the main thread, innermost first
    collectives: Sequence[str] = ()  # that are not complete, oldest first
    unanswered: Sequence[str] = ()  # addresses of hosts that acknowledge nothing

    @property
    def cause(self) -> Cause:
        """Why it does not go on, as far as it alone shows."""
        if self.state in ("T", "t"):
            return "stopped"
        if self.state == "D" or DISK_WAIT.search(self.kernel):
            return "disk"
        if self.moment.beat_seconds > BEAT_SECONDS:
            return "interpreter"
        return "collective" if self.moment.call or self.collectives else "busy"

    @property
    def waits_in(self) -> str:
        """The collective that it waits in, the same text on all ranks that wait for each other."""
        call = f"{self.moment.call}, call {self.moment.calls:,} of the control plane"
        return ", in ".join([*self.collectives[:1], *[call] * bool(self.moment.call)])

    @property
    def doing(self) -> str:
        """What it does, in words that follow `it is`, and where."""
        kernel = self.kernel and f", in {self.kernel} of the kernel"
        seconds = duration(self.moment.beat_seconds)
        texts: dict[Cause, str] = {
            "stopped": f"stopped (state {self.state}: by SIGSTOP or a debugger)",
            "disk": f"waiting for a disk{kernel}",
            "interpreter": f"holding Python's interpreter lock (GIL) for {seconds}",
            "busy": "waiting for no other rank",
            "collective": f"waiting in {self.waits_in}",
        }
        caller = [frame for frame in self.frames if "refocused/" in frame][:1]
        frames = dict.fromkeys([*self.frames[:1], *caller])
        place = ", called by ".join(frames) or "an unknown place"
        return (
            f"{texts[self.cause]}, at {place} (step {self.moment.step:,}, {self.moment.activity})"
        )


class Explanation(NamedTuple):
    """Why a run hangs."""

    cause: Cause
    missing: Sequence[Seen]  # ranks for which the others wait; empty: not known
    text: str


def explain(ranks: Sequence[Seen]) -> Explanation:
    """Find the ranks for which this machine's `ranks` wait, and why."""
    lost = sorted({address for rank in ranks for address in rank.unanswered})
    for cause in CAUSES[: CAUSES.index("network" if lost else "collective")]:
        if missing := [rank for rank in ranks if rank.cause == cause]:
            first, *rest = missing
            more = f" So are ranks {_numbers(rest)}." if rest else ""
            text = f"Rank {first.rank} on {first.host} (process {first.pid}) is missing: it is "
            return Explanation(cause, missing, f"{text}{first.doing}.{more}")
    if lost:
        text = f"The network between {ranks[0].host} and {', '.join(lost[:MOST_NAMED])} is dead: "
        text += "nothing that was sent there is acknowledged. No rank of this host is missing."
        return Explanation("network", (), text)
    counts = collections.Counter(rank.waits_in for rank in ranks).most_common()
    if len(counts) > 1:
        # Among equal groups nothing shows which one left the common path: all are named.
        is_clear = counts[0][1] > counts[1][1]
        odd = [rank for rank in ranks if not is_clear or rank.waits_in != counts[0][0]]
        texts = "; ".join(f"rank {rank.rank} is {rank.doing}" for rank in odd[:MOST_NAMED])
        return Explanation("collective", odd, f"Ranks wait in different collectives: {texts}.")
    where = counts[0][0] if counts else "an unknown place"
    text = f"No rank of this machine is missing: all wait in {where}. See the reports of other "
    return Explanation("none", (), text + "machines, and check the network and the GPUs' links.")


def _numbers(ranks: Sequence[Seen]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(str(rank.rank) for rank in ranks[:MOST_NAMED]) + more


def report(
    ranks: Sequence[Seen], why: Explanation, idle: float, limit: float, code: int, file: object
) -> str:
    """Return what a person reads when a run is stopped."""
    step = max((rank.moment.step for rank in ranks), default=0)
    lines = [
        f"HANG  No rank has made progress for {duration(idle)} (allowed: {duration(limit)}; "
        f"run.hang_minutes), at step {step:,}.",
        why.text,
    ]
    others = collections.defaultdict[str, list[Seen]](list)
    for rank in ranks:
        others[rank.doing] += [rank] if rank not in why.missing else []
    for doing, them in list(others.items())[:MOST_NAMED]:
        if them:
            lines.append(f"Rank{'s' * (len(them) > 1)} {_numbers(them)}: {doing}.")
    lines += [
        f"All stacks, collectives and GPUs: {file}",
        f"The run stops with exit code {code}. The last checkpoint is good: start the same "
        "command again (launch --restarts N does so by itself).",
    ]
    return "\n      ".join(lines)
