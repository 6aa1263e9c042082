"""Weights & Biases: what is logged, and under which run id after a resume."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import netrc
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from refocused.metrics.jsonl import as_record, whole_number
from refocused.metrics.trackers import END, Record, histograms, scalars, step_of
from refocused.system.atomic_files import replace_file
from refocused.system.strict_json import parse_json_object

# Under which id Weights & Biases knows a run, and what it was told of it.
#
# A run there is a list of records that only grows. So a session that repeats steps after a crash
# tells only what is new, and one that goes back on purpose, to take another way from an earlier
# step, begins another run of the same group. What a run there lacks of the way to where a session
# begins (a crash lost it, the network was away, nobody had asked) is told from the run's own file.


_KINDS = ("step", "validation", "tasks", "sample", "histograms")
_LONGEST_NAME = 50  # of a run, in its id


@dataclasses.dataclass(frozen=True, slots=True)
class WandbNote:
    """What a session leaves to the next one on this disk.

    Attributes:
        id: Of the run at Weights & Biases.
        began: Step at which it was begun, or first met on this disk.
        told: The last step it was told of, by the kind of record.
    """

    id: str
    began: int
    told: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def is_told(self, kind: str, step: int) -> bool:
        """Whether a record of this kind and step is there already."""
        return step <= self.told.get(kind, -1)

    def with_told(self, kind: str, step: int) -> WandbNote:
        """Return the note after one more record."""
        return dataclasses.replace(self, told={**self.told, kind: step})


def continued(
    note: WandbNote | None,
    *,
    known: str | None,
    run: str,
    step: int,
    is_automatic: bool,
    token: str,
) -> WandbNote:
    """Decide under which id a session tells, and what of it is there already.

    Args:
        note: Of the session before on this disk; None: there was none.
        known: The id in the checkpoint that training starts from.
        run: The run's name, with which its ids begin.
        step: Where training starts.
        is_automatic: It starts from the newest step there is, and so repeats what came after; not
            from one that a person chose.
        token: Ends a new id; nobody else's.
    """
    if note is not None and is_automatic and note.began == step:
        return note  # it began here, and nothing was saved since
    name = run[:_LONGEST_NAME]
    if known is not None and known.rpartition("-")[0] == name:
        if note is None or note.id != known:
            # Another disk told it of all that comes before.
            note = WandbNote(known, step, dict.fromkeys(_KINDS, step)) if is_automatic else None
        if note is not None and (is_automatic or max(note.told.values(), default=0) <= step):
            return note
    return WandbNote(f"{name}-{token}", step)


def missing_records(lines: Iterable[bytes], note: WandbNote, *, step: int) -> list[dict[str, Any]]:
    """Return what a run there lacks of the way to a step, in the order of the steps.

    Args:
        lines: Of the run's metrics file. A record of an earlier step than the one before it begins
            another way, which takes the place of what lies beyond.
        note: What it was told.
        step: Where the way ends for now.
    """
    way: dict[tuple[int, str], dict[str, Any]] = {}
    newest = 0
    for record in map(as_record, lines):
        at = whole_number(record, "step") if record is not None else None
        if record is None or at is None or record.get("kind") not in _KINDS:
            continue
        if at < newest:
            way = {place: one for place, one in way.items() if place[0] <= at}
        newest = at
        way[at, record["kind"]] = record
    return [way[at, kind] for at, kind in sorted(way) if at <= step and not note.is_told(kind, at)]


def read_note(file: Path) -> WandbNote | None:
    """Read what `write_note` wrote; None: nothing, or nothing that can be read."""
    try:
        return WandbNote(**parse_json_object(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # then records are told twice, or under another id


def write_note(file: Path, note: WandbNote) -> None:
    """Replace the note.

    Raises:
        OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(dataclasses.asdict(note)).encode())


REACH_SECONDS = 5.0
_INIT_SECONDS = 60.0
_FINISH_SECONDS = 20.0  # below the time that training waits for at its end
_FLUSH_SECONDS = 1.0  # the default, 15 s, is what a killed run would lack
# What was told longer ago than this outlives the death of this process and of W&B's own, which ends
# with it: offline it is in the file by then, online it is sent.
_SAFE_SECONDS = {"offline": 2 * _FLUSH_SECONDS, "online": 60.0}
_STEP = "train/step"


@dataclasses.dataclass(frozen=True, slots=True)
class WandbRun:
    """The run as Weights & Biases is told of it.

    Attributes:
        project: `PROJECT` or `ENTITY/PROJECT`.
        run: The run's name, the group of all that belongs to it.
        folder: The run's, in which `wandb/` is made.
        settings: Of the run, and what follows from them, nested.
        step: Where the session begins.
        note: Its id, and what is there already.
        note_file: Where the note is kept.
        metrics_file: The run's own records.
    """

    project: str
    run: str
    folder: Path
    settings: Mapping[str, object]
    step: int
    note: WandbNote
    note_file: Path
    metrics_file: Path


class WandbTracker:
    """Tells Weights & Biases, online if that can be, else into files for `wandb sync`.

    `wandb.init` would wait 100 s for a host that is not there, and stop without a key; so what it
    shall do is decided before.
    """

    name = "wandb"

    def __init__(self, run: WandbRun, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; `open` connects.

        Args:
            run: What to tell, and where.
            clock: Monotonic seconds.
        """
        self._about, self._note, self._clock = run, run.note, clock
        self._unsafe: deque[tuple[float, WandbNote]] = deque()
        self._safe_seconds = 0.0
        self._run: Any = None

    def open(self) -> str:
        """Connect, or begin files, and tell what they lack of the way until here.

        Raises:
            ValueError: The environment switches Weights & Biases off.
        """
        write_note(self._about.note_file, self._note)
        import wandb  # two seconds, in the tracker's thread

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode == "disabled":
            raise ValueError("WANDB_MODE=disabled is set")
        why = _why_offline(settings)
        if why is None:
            try:
                self._init("online")
            except Exception as error:  # this edge: a refusal, a proxy, a time-out
                why = f"offline, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                wandb.teardown()  # else its process has the id in use
        if why is not None:
            self._init("offline")
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)  # not the count of records
        self._safe_seconds = _SAFE_SECONDS["online" if why is None else "offline"]
        self._catch_up()
        return f"{self._run.url}" if why is None else f"{why}: {self._sync_later()}"

    def write(self, record: Record) -> None:
        """Tell of a record that is not there yet."""
        kind, step = str(record["kind"]), step_of(record)
        if self._note.is_told(kind, step):
            return
        self._run.log({**_values(record), _STEP: step})
        if kind == END:  # of every session, also where it repeats steps
            return
        self._note = self._note.with_told(kind, step)
        self._unsafe.append((self._clock(), self._note))
        self._note_what_is_safe()

    def close(self, exit_code: int) -> str:
        """Send what waits, for some seconds."""
        import wandb

        is_offline = self._run.offline
        self._run.finish(exit_code=exit_code)
        write_note(self._about.note_file, self._note)
        wandb.teardown()  # its process ends too
        return self._sync_later() if is_offline else ""

    def _init(self, mode: Literal["online", "offline"]) -> None:
        import wandb

        about = self._about
        entity, _, project = about.project.rpartition("/")
        folder = about.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            id=self._note.id,
            name=about.run,
            group=about.run,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=dict(about.settings),
            settings=wandb.Settings(
                console="off",  # the screen and its log are ours
                silent=True,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,
            ),
        )

    def _catch_up(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._about.metrics_file.open("rb") as lines:
            for record in missing_records(lines, self._note, step=self._about.step):
                self.write(record)

    def _note_what_is_safe(self) -> None:
        safe, now = None, self._clock()
        while self._unsafe and self._unsafe[0][0] <= now - self._safe_seconds:
            _, safe = self._unsafe.popleft()
        if safe is not None:
            write_note(self._about.note_file, safe)

    def _sync_later(self) -> str:
        return f"wandb sync {self._about.folder / 'wandb'}/offline-run-* sends it"


def what_keeps_offline() -> str | None:
    """Return why a run of this machine would not be online; None: nothing keeps it from that."""
    import wandb

    try:
        return _why_offline(wandb.setup(wandb.Settings(silent=True)).settings)
    finally:
        wandb.teardown()


def _values(record: Record) -> dict[str, object]:
    """Return what a record is drawn from: numbers, a text, histograms."""
    import wandb

    if record["kind"] == "sample":
        text = html.escape(str(record["sample"]))
        return {"sample": wandb.Html(f"<pre>{text}</pre>", inject=False)}
    if record["kind"] == "histograms":
        return {
            one.name: wandb.Histogram(np_histogram=(list(one.counts), list(one.edges)))
            for one in histograms(record)
        }
    return dict(scalars(record))


def _why_offline(settings: Any) -> str | None:
    """Return what keeps from being online; None: nothing does."""
    if settings.mode != "online":
        return f"WANDB_MODE={settings.mode}"
    if not has_key(settings.base_url, settings.api_key or settings.identity_token_file):
        return "offline, no key (WANDB_API_KEY, or wandb login)"
    if not is_reachable(settings.base_url):
        return f"offline, {settings.base_url} did not answer within {REACH_SECONDS:.0f} s"
    return None


def has_key(url: str, key: str | None) -> bool:
    """Whether there is a key for a host: one that was set, or one in the netrc file."""
    if key:
        return True
    file = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return urllib.parse.urlsplit(url).hostname in netrc.netrc(file).hosts
    return False


def is_reachable(url: str, *, limit_seconds: float = REACH_SECONDS) -> bool:
    """Whether a host answers, whatever it says; through the proxy, if the environment names one."""
    try:
        with urllib.request.urlopen(url, timeout=limit_seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
