import dataclasses
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics.session_records import HISTOGRAMS, SAMPLE, VALIDATION, step, tracked_run
from wandb_files import offline_sessions

from refocused.metrics import wandb as wandb_module
from refocused.metrics.trackers import Record
from refocused.metrics.wandb import (
    NOTE_FILE,
    WandbNote,
    WandbTracker,
    continued,
    read_note,
    write_note,
)


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who tests has of W&B is not used, and no other host is asked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Session:
    """One session of a run that is logged to W&B, with a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        run = dataclasses.replace(tracked_run(folder, wandb="me/demo"), wandb_id="tiny-1")
        self.tracker = WandbTracker(run, clock=lambda: self.now)

    def log(self, *records: Record) -> tuple[str, str]:
        opened = self.tracker.open()
        for record in records:
            self.tracker.write(record)
        return opened, self.tracker.close(0)


def test_without_a_key_all_goes_to_files_that_sync_later(tmp_path: Path) -> None:
    end: Record = {"kind": "end", "step": 3, "cost_usd": 4.48}
    records = (step(1), VALIDATION, SAMPLE, HISTOGRAMS, step(3, cost_usd=4.15), end)
    opened, closed = Session(tmp_path).log(*records)
    assert opened.startswith("offline, no key (WANDB_API_KEY, or wandb login): wandb sync ")
    assert closed == f"wandb sync {tmp_path}/wandb/offline-run-* sends it"
    (found,) = offline_sessions(tmp_path)
    assert (found.id, found.project, found.step_metric) == ("tiny-1", "demo", "train/step")
    assert found.config["optimizer"] == {"lr": 3e-4, "betas": [0.9, 0.95]}
    first, validation, sample, histogram, last, cost = (
        {name: one for name, one in record.items() if not name.startswith("_")}
        for record in found.history
    )
    assert first == {"train/step": 1, "train/loss": 2.5}
    assert validation == {"train/step": 1, "validation/loss": 3.0, "validation/perplexity": 20.0}
    assert sample["train/step"] == 2
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_text() == "<pre>def f():\n    return a &lt; b</pre>"
    drawn = "weights/head.weight"
    assert histogram[f"{drawn}/values"] == [1, 0, 2, 1]
    assert histogram[f"{drawn}/bins"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    # The cost at the end takes the place of the last step's.
    assert (last["train/cost_usd"], cost["train/cost_usd"]) == (4.15, 4.48)
    assert read_note(tmp_path / NOTE_FILE) == WandbNote("tiny-1", 0, last=3)


def test_a_session_that_repeats_steps_logs_none_of_them_twice(tmp_path: Path) -> None:
    Session(tmp_path).log(*(step(number) for number in range(1, 4)))
    validation: Record = {**VALIDATION, "step": 3}  # the first session ended before it
    Session(tmp_path).log(step(2), step(3), validation, step(4))
    found = offline_sessions(tmp_path)
    assert [one.id for one in found] == ["tiny-1", "tiny-1"]
    assert [one.steps for one in found] == [[1, 2, 3], [4]]
    assert [one["validation/loss"] for one in found[1].history if "validation/loss" in one] == [3.0]


def test_what_a_kill_may_have_lost_is_not_noted(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.tracker.open()
    noted = []
    for number in range(1, 7):
        session.now += 1.0
        session.tracker.write(step(number))
        noted.append(getattr(read_note(tmp_path / NOTE_FILE), "last", None))
    # W&B writes its file every second; what is two seconds old is there.
    assert noted == [0, 0, 0, 1, 1, 3]
    session.tracker.close(0)
    assert read_note(tmp_path / NOTE_FILE) == WandbNote("tiny-1", 0, last=6)


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers 404 to everything."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing_host() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def missing_host() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"WANDB_BASE_URL": "refusing_host"}, "offline, CommError: "),
        ({"WANDB_MODE": "offline"}, "WANDB_MODE=offline: "),
    ],
)
def test_a_run_that_cannot_be_online_is_written_to_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    for name, value in environment.items():
        value = request.getfixturevalue(value) if value.endswith("_host") else value
        monkeypatch.setenv(name, value)
    opened, _ = Session(tmp_path).log(step(1))
    assert reason in opened
    assert [one.steps for one in offline_sessions(tmp_path)] == [[1]]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(ValueError, match="WANDB_MODE=disabled is set"):
        Session(tmp_path).log(step(1))


@pytest.fixture
def silent_host() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


NETRC = "machine 127.0.0.1 login user password key\n"
NO_KEY = "offline, no key (WANDB_API_KEY, or wandb login)"


@pytest.mark.parametrize(
    ("host", "key", "netrc", "reason"),
    [
        ("missing_host", "", "", NO_KEY),
        ("missing_host", "", NETRC.replace("127.0.0.1", "other.example.org"), NO_KEY),
        ("missing_host", "", "machine\n", NO_KEY),
        ("missing_host", "", NETRC, "did not answer within 0.5 s"),
        ("silent_host", "x" * 40, "", "did not answer within 0.5 s"),
        ("refusing_host", "x" * 40, "", None),
    ],
)
def test_what_keeps_a_run_offline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    host: str,
    key: str,
    netrc: str,
    reason: str | None,
) -> None:
    (tmp_path / "netrc").write_text(netrc)  # which NETRC names
    monkeypatch.setenv("WANDB_BASE_URL", request.getfixturevalue(host))
    monkeypatch.setattr(wandb_module, "REACH_SECONDS", 0.5)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    found = wandb_module.what_keeps_offline()
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


HERE = WandbNote("run-2-abcd", 0, last=17)
LATER = WandbNote("run-2-efgh", 10, last=12)


@pytest.mark.parametrize(
    ("note", "known", "step", "is_automatic", "expected"),
    [
        # A first session begins a run there; a resume continues it, also on another disk.
        (None, None, 0, True, WandbNote("run-2-new0", 0)),
        (HERE, "run-2-abcd", 10, True, HERE),
        (None, "run-2-abcd", 10, True, WandbNote("run-2-abcd", 10, last=10)),
        (LATER, "run-2-abcd", 12, True, WandbNote("run-2-abcd", 12, last=12)),
        # A crash before the first save continues it too, also that of another branch.
        (HERE, None, 0, True, HERE),
        (LATER, None, 10, True, LATER),
        (LATER, "run-2-abcd", 10, True, LATER),
        # A start from an earlier step on purpose begins another run there.
        (HERE, "run-2-abcd", 10, False, WandbNote("run-2-new0", 10)),
        (None, "run-2-abcd", 10, False, WandbNote("run-2-new0", 10)),
        (HERE, None, 0, False, WandbNote("run-2-new0", 0)),
        (HERE, "run-2-abcd", 16, False, WandbNote("run-2-new0", 16)),
        (HERE, "run-2-abcd", 17, False, HERE),  # nothing comes after the step that was named
        # A checkpoint of another run does not bring its id.
        (None, "run-abcd", 10, True, WandbNote("run-2-new0", 10)),
    ],
)
def test_which_run_there_a_session_continues(
    note: WandbNote | None, known: str | None, step: int, is_automatic: bool, expected: WandbNote
) -> None:
    run = dataclasses.replace(
        tracked_run(Path(), at=step), name="run-2", wandb_id=known, is_automatic=is_automatic
    )
    assert continued(note, run, token="new0") == expected


def test_a_run_with_a_long_name_is_recognized() -> None:
    run = dataclasses.replace(tracked_run(Path()), name="n" * 100)
    first = continued(None, run, token="aaaa")
    again = continued(None, dataclasses.replace(run, wandb_id=first.id, step=5), token="bbbb")
    assert (len(first.id), again.id) == (55, first.id)


def test_a_note_survives_and_a_torn_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / NOTE_FILE
    assert read_note(file) is None
    write_note(file, HERE)
    assert read_note(file) == HERE
    for torn in (b"", b"[]", b'{"id": "x"}', b'{"id": "x", "began": 1, "more": 2}', b"\xff"):
        file.write_bytes(torn)
        assert read_note(file) is None
