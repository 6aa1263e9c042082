from __future__ import annotations

import contextlib
import http.server
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from wandb_files import offline_sessions

from refocused.metrics.trackers import Record
from refocused.metrics.wandb import (
    WandbNote,
    WandbRun,
    WandbTracker,
    has_key,
    is_reachable,
    read_note,
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


HISTOGRAMS: Record = {
    "kind": "histograms",
    "step": 3,
    "weights": {
        "head.weight": {
            "low": -1.0,
            "high": 1.0,
            "counts": (1, 0, 2, 1),
            "total": 0.5,
            "squares": 2.0,
        }
    },
    "gradients": {},
}


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Session:
    """One session of a run, told to W&B."""

    def __init__(self, folder: Path, note: WandbNote, *, step: int = 0) -> None:
        self.file, self.metrics = folder / "wandb" / "note.json", folder / "metrics.jsonl"
        self.clock = Clock()
        about = WandbRun(
            project="me/demo",
            run="tiny",
            folder=folder,
            settings={"optimizer": {"lr": 3e-4}, "run": {"name": "tiny"}},
            step=step,
            note=note,
            note_file=self.file,
            metrics_file=self.metrics,
        )
        self.tracker = WandbTracker(about, clock=self.clock)

    def tell(self, *records: Record) -> tuple[str, str]:
        opened = self.tracker.open()
        for record in records:
            self.tracker.write(record)
        return opened, self.tracker.close(0)


def step(number: int) -> Record:
    return {"kind": "step", "step": number, "loss": 3.5 - number, "mfu_fraction": None}


def test_without_a_key_all_goes_to_files_that_sync_later(tmp_path: Path) -> None:
    random_before = random.getstate(), np.random.get_state()[1].tolist()
    opened, closed = Session(tmp_path, WandbNote("tiny-1", 0)).tell(
        step(1),
        {"kind": "validation", "step": 1, "validation_loss": 3.0},
        step(2),
        {"kind": "sample", "step": 2, "sample": "a < b"},
    )
    assert opened.startswith("offline, no key (WANDB_API_KEY, or wandb login): wandb sync ")
    assert closed == f"wandb sync {tmp_path}/wandb/offline-run-* sends it"
    (told,) = offline_sessions(tmp_path)
    assert (told.id, told.project, told.step_metric) == ("tiny-1", "demo", "train/step")
    assert told.config["optimizer"] == {"lr": 3e-4}
    shown = [
        {name: one for name, one in record.items() if not name.startswith("_")}
        for record in told.history
    ]
    assert shown[:3] == [
        {"train/step": 1, "train/loss": 2.5},
        {"train/step": 1, "validation/loss": 3.0},
        {"train/step": 2, "train/loss": 1.5},
    ]
    assert shown[3]["train/step"] == 2
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_text() == "<pre>a &lt; b</pre>"
    # The saved random states of a rank would otherwise depend on who is told of the run.
    assert (random.getstate(), np.random.get_state()[1].tolist()) == random_before


def test_a_session_that_repeats_steps_tells_none_of_them_twice(tmp_path: Path) -> None:
    first = Session(tmp_path, WandbNote("tiny-1", 0))
    first.tell(*(step(number) for number in range(1, 8)))
    note = read_note(first.file)
    assert note == WandbNote("tiny-1", 0, {"step": 7})
    validation: Record = {"kind": "validation", "step": 5, "validation_loss": 3.0}
    Session(tmp_path, note).tell(*(step(number) for number in range(5, 10)), validation)
    told = offline_sessions(tmp_path)
    assert [one.id for one in told] == ["tiny-1", "tiny-1"]
    assert [one.steps for one in told] == [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert [one["validation/loss"] for one in told[1].history if "validation/loss" in one] == [3.0]


def test_the_cost_at_the_end_takes_the_place_of_the_last_steps(tmp_path: Path) -> None:
    paid: Record = {**step(3), "cost_usd": 4.15}
    end: Record = {"kind": "end", "step": 3, "cost_usd": 4.48}
    Session(tmp_path, WandbNote("tiny-1", 0)).tell(paid, end)
    (told,) = offline_sessions(tmp_path)
    costs = [record["train/cost_usd"] for record in told.history if "train/cost_usd" in record]
    assert costs == [4.15, 4.48]
    assert read_note(tmp_path / "wandb" / "note.json") == WandbNote("tiny-1", 0, {"step": 3})


def test_histograms_are_told(tmp_path: Path) -> None:
    Session(tmp_path, WandbNote("tiny-1", 0)).tell(HISTOGRAMS)
    ((record,),) = [told.history for told in offline_sessions(tmp_path)]
    drawn = {
        name.removeprefix("weights/head.weight/"): value
        for name, value in record.items()
        if name.startswith("weights/head.weight/")
    }
    assert (record["train/step"], drawn["_type"]) == (3, "histogram")
    assert drawn["values"] == [1, 0, 2, 1]
    assert drawn["bins"] == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_what_a_kill_may_have_lost_is_told_again(tmp_path: Path) -> None:
    session = Session(tmp_path, WandbNote("tiny-1", 0))
    session.tracker.open()
    for number in range(1, 5):
        session.clock.now += 1.0
        session.tracker.write(step(number))
    # W&B writes its file every second; what is two seconds old is there.
    assert read_note(session.file) == WandbNote("tiny-1", 0, {"step": 2})
    session.tracker.close(0)
    assert read_note(session.file) == WandbNote("tiny-1", 0, {"step": 4})


def test_what_it_lacks_is_told_from_the_runs_own_file(tmp_path: Path) -> None:
    session = Session(tmp_path, WandbNote("tiny-1", 0, {"step": 2}), step=4)
    session.metrics.write_text("".join(f"{json.dumps(step(number))}\n" for number in range(1, 8)))
    session.tell(step(5), step(6))
    (told,) = offline_sessions(tmp_path)
    assert told.steps == [3, 4, 5, 6]


def test_a_host_that_refuses_is_left_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_host() as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        opened, _ = Session(tmp_path, WandbNote("tiny-1", 0)).tell(step(1))
    assert opened.startswith("offline, CommError: ")
    assert [one.steps for one in offline_sessions(tmp_path)] == [[1]]


def test_a_host_that_is_not_there_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    opened, _ = Session(tmp_path, WandbNote("tiny-1", 0)).tell(step(1))
    assert "did not answer within 5 s" in opened
    assert [one.steps for one in offline_sessions(tmp_path)] == [[1]]


def test_a_person_may_choose_to_be_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    opened, _ = Session(tmp_path, WandbNote("tiny-1", 0)).tell(step(1))
    assert opened.startswith("WANDB_MODE=offline: ")


def test_an_environment_that_switches_it_off_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(ValueError, match="WANDB_MODE=disabled is set"):
        Session(tmp_path, WandbNote("tiny-1", 0)).tell(step(1))
    assert offline_sessions(tmp_path) == []


def test_whether_a_host_answers() -> None:
    with refusing_host() as url:
        assert is_reachable(url)
    assert not is_reachable(f"http://127.0.0.1:{closed_port()}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not is_reachable(address, limit_seconds=0.05)
    assert not is_reachable("no address")


def test_a_key_is_found_where_wandb_finds_it(tmp_path: Path) -> None:
    url = "https://api.example.org/x"
    assert has_key(url, "key")
    assert not has_key(url, None)
    netrc = tmp_path / "netrc"  # which NETRC names
    netrc.write_text("machine other.example.org login user password key\n")
    assert not has_key(url, None)
    netrc.write_text("machine api.example.org login user password key\n")
    assert has_key(url, None)
    netrc.write_text("machine\n")
    assert not has_key(url, None)


class Refusal(http.server.BaseHTTPRequestHandler):
    """Answers 404 to everything."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def refusing_host() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
