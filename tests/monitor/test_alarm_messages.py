import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor.test_sampler import Rank, Site, rank, site  # noqa: F401 - fixtures
from ranks import until

from refocused.metrics.jsonl import write_state
from refocused.monitor.readings import AlarmEvent
from refocused.monitor.sampler import alarms, start_sampler
from refocused.monitor.sampler.alarms import REPEAT_SECONDS, AlarmMessages
from refocused.monitor.sampler.sampler import Sampler
from refocused.system.processes import identify


class Server(http.server.ThreadingHTTPServer):
    """A web server that keeps what it gets, and responds with `status` once `open` is set."""

    got: list[dict[str, Any]]
    open: threading.Event
    status = 204


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/SECRET?key=SECRET"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.server.open.wait()
        self.send_response(self.server.status)
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(alarms, "PAUSES_SECONDS", (0.01, 0.01))
    with Server(("127.0.0.1", 0), Handler) as found:
        found.got, found.open = [], threading.Event()
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.open.set()
        found.shutdown()


def address(server: Server) -> str:
    return f"http://user:pass@127.0.0.1:{server.server_port}/SECRET?key=SECRET"


def test_critical_alarms_of_a_run_are_posted(site: Site, server: Server) -> None:  # noqa: F811
    write_state(site.run / "state.json", {"status": "training", "run": "one", "step": 7})
    sampler = Sampler(site.settings(on_alarm=address(server)))
    for facts in ({"lost": 1}, {"lost": 0}, {"lost": 1, "remap_pending": 1}):
        site.machine.gpu(7, **facts)
        sampler.round()  # a request that hangs does not delay it
    assert len(site.lines()) == 27
    server.open.set()
    until(lambda: len(server.got) == 2)
    raised, cleared = server.got
    assert (raised["run"], raised["alarm"], raised["step"]) == ("one", "gpu_lost", 7)
    assert (raised["severity"], raised["raised"], cleared["raised"]) == ("critical", True, False)
    assert raised["subject"].endswith("GPU 7") and "fallen off the bus" in raised["text"]
    assert raised["advice"].startswith("Restart or replace the machine")
    assert {"host", "time"} <= set(raised)
    assert site.alarms[-1] == ("gpu_lost", "7", True)  # again: too soon for another message


def send(target: str, *events: tuple[bool | None, float], done: Callable[[], bool]) -> None:
    """Send an alarm as it is raised (True), cleared or neither at these times."""
    messages = AlarmMessages(target)
    for raised, now in events:
        event = AlarmEvent("disk_full", "node1", raised is True, "critical", "text", "node1")
        messages.add([] if raised is None else [event], run="one", step=None, now=now)
    until(done)
    messages.close()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([(True, 0), (False, 1), (True, 2), (None, REPEAT_SECONDS)], [True, False, True]),
        ([(True, 0), (False, 1), (True, 2), (False, 3), (None, REPEAT_SECONDS)], [True, False]),
        ([(False, 0), (True, 1)], [False, True]),  # first, the clearing of an earlier session's
    ],
)
def test_a_flapping_alarm_is_sent_seldom(
    tmp_path: Path, events: list[tuple[bool | None, float]], expected: list[bool]
) -> None:
    send(f"cat >> {tmp_path}/got; echo >> {tmp_path}/got", *events, done=lambda: True)
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [one["raised"] for one in got] == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("refuses", "HTTP 500"),
        ("hangs", "ReadTimeout"),
        ("sleep 600", "the command took longer than 0.2 s"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_failure_delays_no_end_and_is_logged_once_without_the_address(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    reason: str,
) -> None:
    if kind == "refuses":
        server.status = 500
        server.open.set()
    else:
        monkeypatch.setattr(alarms, "LIMIT_SECONDS", 0.2)
    target = address(server) if kind in ("refuses", "hangs") else kind
    attempts = 6 if kind == "refuses" else 0  # three for each message
    send(target, (True, 0), (False, 1), done=lambda: len(server.got) >= attempts)
    assert caplog.messages == [f"log.on_alarm: an alarm could not be sent ({reason})."]


def test_the_samplers_process_sends_and_keeps_the_secret(
    site: Site,  # noqa: F811
    rank: Rank,  # noqa: F811
) -> None:
    write_state(site.run / "state.json", {"status": "training", "step": 12})
    command = f"env > {site.run}/environment; cat > {site.run}/got # SECRET"
    pid = start_sampler.start_sampler(site.settings(rank.identity, on_alarm=command))
    site.await_lines(9)
    assert "SECRET" not in Path(f"/proc/{pid}/cmdline").read_text()
    rank.kill()
    until(lambda: identify(pid) is None)
    assert json.loads((site.run / "got").read_text())["alarm"] == "run_died"
    assert "SECRET" not in (site.run / "environment").read_text()
