"""Log a run to Weights & Biases, under the same run id after a resume."""

import dataclasses
import html
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import requests

from refocused.metrics.jsonl import read_json
from refocused.metrics.trackers import END, Record, TrackedRun, scalars
from refocused.system.atomic_files import replace_file
from refocused.system.errors import short_reason

NOTE_FILE = Path("wandb") / "refocused.json"  # in the run's folder
REACH_SECONDS = 5.0
_INIT_SECONDS = 60.0
_FINISH_SECONDS = 20.0  # less than training waits for trackers at its end
_FLUSH_SECONDS = 1.0  # the default is 15 s, which a killed run would lose
_SAFE_SECONDS = 2 * _FLUSH_SECONDS  # what was logged before is in the file, also after a kill
_LONGEST_NAME = 50  # of a run, in its id
_STEP = "train/step"


@dataclasses.dataclass(frozen=True, slots=True)
class WandbNote:
    """What a session leaves on disk for the next one."""

    id: str  # of the run at Weights & Biases
    began: int  # step at which that run started, or first continued on this disk
    last: int = -1  # last step whose record surely arrived


def continued(note: WandbNote | None, run: TrackedRun, *, token: str) -> WandbNote:
    """Choose the id under which a session logs, from the note that the previous one left.

    The history of a run at Weights & Biases only grows. A resume after a crash continues it; going
    back to an earlier step on purpose starts another run of the same group, whose id ends with the
    unique `token`.
    """
    step, known, is_automatic = run.step, run.wandb_id, run.is_automatic
    if note is not None and is_automatic and note.began == step:
        return note  # it started here, and nothing has been saved since
    name = run.name[:_LONGEST_NAME]
    if known is not None and known.rpartition("-")[0] == name:
        if note is None or note.id != known:  # another disk logged all that comes before
            note = WandbNote(known, step, last=step) if is_automatic else None
        if note is not None and (is_automatic or note.last <= step):
            return note
    return WandbNote(f"{name}-{token}", step)


def read_note(file: Path) -> WandbNote | None:
    """Read a note; None if it is missing or unreadable, so the session gets a new id."""
    note = read_json(file) or {}
    try:
        return WandbNote(**note)
    except TypeError:
        return None


def write_note(file: Path, note: WandbNote) -> None:
    """Replace the note, and create its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(dataclasses.asdict(note)).encode())


class WandbTracker:
    """Logs online if possible, else into files for `wandb sync`.

    That is decided before `wandb.init`, which would wait 100 s for an unreachable host and exit
    without a key.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Choose the run's id; `open` connects. The clock gives monotonic seconds."""
        self._note_file = run.folder / NOTE_FILE
        self._note = continued(read_note(self._note_file), run, token=secrets.token_hex(4))
        self.run_id = self._note.id
        self._about, self._clock = run, clock
        self._logged = self._last = self._note.last  # in earlier sessions, and in this one too
        self._noted_at = clock()  # the note is as of then, and written _SAFE_SECONDS later
        self._run: Any = None

    def open(self) -> str:
        """Connect, or create files; raise ValueError if the environment switches both off."""
        write_note(self._note_file, self._note)
        import wandb  # two seconds, in the tracker's thread

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode == "disabled":
            wandb.teardown()  # else its process would stay
            raise ValueError("WANDB_MODE=disabled is set")
        why = _why_offline(settings)
        if why is None:
            try:
                self._init("online")
                # wandb's resume loads the run's summary, which knows better than our note.
                self._logged = int(self._run.summary.get(_STEP, self._logged))
            except Exception as error:  # this edge: a refusal, a proxy, a time-out
                why = f"offline, {short_reason(error)}"
                wandb.teardown()  # its process still uses the id
        if why is not None:
            self._init("offline")
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)  # not the count of records
        return f"{self._run.url}" if why is None else f"{why}: {self._sync_later()}"

    def write(self, record: Record) -> None:
        """Log a record, unless this session repeats a step that was logged before."""
        kind, step = record["kind"], record["step"]
        is_repeated = step < self._logged or (step == self._logged and kind == "step")
        if is_repeated and kind != END:
            return
        self._run.log({**_values(record), _STEP: step})
        now = self._clock()
        if now - self._noted_at >= _SAFE_SECONDS:
            write_note(self._note_file, self._note)
            self._note = dataclasses.replace(self._note, last=self._last)
            self._noted_at = now
        if kind == "step":
            self._last = max(self._last, step)

    def close(self, exit_code: int) -> str:
        """Flush the queue, for at most some seconds."""
        import wandb

        is_offline = self._run.offline
        self._run.finish(exit_code=exit_code)
        write_note(self._note_file, dataclasses.replace(self._note, last=self._last))
        wandb.teardown()  # its process ends too
        return self._sync_later() if is_offline else ""

    def _init(self, mode: Literal["online", "offline"]) -> None:
        import wandb

        run = self._about
        entity, _, project = str(run.tracking.wandb).rpartition("/")
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            id=self._note.id,
            name=run.name,
            group=run.name,
            resume="allow",
            mode=mode,
            dir=str(run.folder.absolute()),
            config=dict(run.settings),
            settings=wandb.Settings(
                console="off",  # the screen and its log are ours
                silent=True,
                init_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                x_transaction_log_flush_interval=_FLUSH_SECONDS,
            ),
        )

    def _sync_later(self) -> str:
        return f"wandb sync {self._about.folder / 'wandb'}/offline-run-* sends it"


def what_keeps_offline() -> str | None:
    """Return why a run on this machine cannot be online; None if it can."""
    import wandb

    try:
        return _why_offline(wandb.setup(wandb.Settings(silent=True)).settings)
    finally:
        wandb.teardown()


def _values(record: Record) -> dict[str, object]:
    import wandb

    if record["kind"] == "sample":
        text = html.escape(record["sample"])
        return {"sample": wandb.Html(f"<pre>{text}</pre>", inject=False)}
    if record["kind"] == "histograms":
        return {
            histogram.name: wandb.Histogram(np_histogram=(list(histogram.counts), histogram.edges))
            for histogram in record["histograms"]
        }
    numbers = scalars(record)
    bits = numbers.pop("validation/bits_per_byte", None)
    return {**numbers, **({} if bits is None else {"val_bpb": bits})}  # the field's usual name


def _why_offline(settings: Any) -> str | None:
    if settings.mode != "online":
        return f"WANDB_MODE={settings.mode}"
    key = settings.api_key or settings.identity_token_file
    if not (key or requests.utils.get_netrc_auth(settings.base_url)):
        return "offline, no key (WANDB_API_KEY, or wandb login)"
    try:
        requests.head(settings.base_url, timeout=REACH_SECONDS)
    except requests.RequestException:
        return f"offline, {settings.base_url} did not answer within {REACH_SECONDS:g} s"
    return None
