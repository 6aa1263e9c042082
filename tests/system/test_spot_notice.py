"""Notices that a machine will be taken away: three clouds' metadata servers, and a file."""

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import until

from refocused.system.spot_notice import (
    FIRMWARE,
    MetadataServer,
    SpotNotice,
    cloud_of,
    watch_for_notice,
)

GCE, AWS, AZURE = "/computeMetadata/v1/instance/", "/latest/meta-data/spot/", "/metadata/"
Headers = dict[str, str]


class Server(http.server.ThreadingHTTPServer):
    """A metadata server that answers what a test gives it, and only as its cloud demands."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, str] = {}
        self.tokens = ["t1"]  # AWS: the last one is valid
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def answer(self, path: str, headers: Headers) -> tuple[int, str]:
        self.asked.append(path)
        if path.startswith(GCE) and headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor"
        if path.startswith(AWS) and headers.get("X-aws-ec2-metadata-token") != self.tokens[-1]:
            return 401, ""
        if path.startswith(AZURE) and headers.get("Metadata") != "true":
            return 400, "Bad Request"
        found = self.content.get(path.partition("?")[0])
        return (404, "not found") if found is None else (200, found)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self._send(*self.server.answer(self.path, dict(self.headers)))

    def do_PUT(self) -> None:
        assert isinstance(self.server, Server)
        has_lifetime = "X-aws-ec2-metadata-token-ttl-seconds" in dict(self.headers)
        wanted = self.path == "/latest/api/token" and has_lifetime
        self._send(*((200, self.server.tokens[-1]) if wanted else (400, "")))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        threading.Thread(target=started.serve_forever, args=(0.02,), daemon=True).start()
        yield started
        started.shutdown()


def test_gce_says_that_it_preempts_or_stops_a_machine(server: Server) -> None:
    asked = MetadataServer("gce", server.address)
    assert asked.notice() is None  # a machine that is not preemptible has neither
    server.content = {f"{GCE}preempted": "FALSE", f"{GCE}maintenance-event": "NONE"}
    assert asked.notice() is None
    server.content[f"{GCE}maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # it runs on
    assert asked.notice() is None
    server.content[f"{GCE}maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert asked.notice() == "GCE stops this machine for maintenance"
    server.content[f"{GCE}preempted"] = "TRUE"
    assert asked.notice() == "GCE preempts this machine"


def test_aws_says_what_it_does_and_when_and_tokens_expire(server: Server) -> None:
    asked = MetadataServer("aws", server.address)
    assert asked.notice() is None
    server.tokens.append("t2")
    assert asked.notice() is None  # refused: a new token is fetched
    when = "2026-11-25T08:22:00Z"
    server.content[f"{AWS}instance-action"] = f'{{"action": "terminate", "time": "{when}"}}'
    assert asked.notice() == f"AWS will terminate this machine at {when}"


def test_azure_says_which_machine_of_a_group_goes(server: Server) -> None:
    asked, events = MetadataServer("azure", server.address), f"{AZURE}scheduledevents"
    event = '{"EventType": "%s", "Resources": ["%s"], "NotBefore": "%s"}'
    server.content = {f"{AZURE}instance/compute/name": "node_1", events: '{"Events": []}'}
    assert asked.notice() is None
    others = [event % ("Preempt", "node_0", ""), event % ("Freeze", "node_1", "")]
    server.content[events] = f'{{"Events": [{", ".join(others)}]}}'
    assert asked.notice() is None
    others.append(event % ("Preempt", "node_1", ""))
    server.content[events] = f'{{"Events": [{", ".join(others)}]}}'
    assert asked.notice() == "Azure: Preempt of node_1, now"


def test_a_thread_asks_until_there_is_a_notice_and_bears_a_broken_server(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLL_SECONDS", "SILENT_POLL_SECONDS"):
        monkeypatch.setattr(f"refocused.system.spot_notice.{name}", 0.01)
    asked = MetadataServer("azure", server.address)
    server.content[f"{AZURE}scheduledevents"] = "<html>"
    watched = SpotNotice(asked.notice)
    until(lambda: len(server.asked) > 6)
    assert watched.text is None
    server.content[f"{AZURE}instance/compute/name"] = "a"
    event = '{"EventType": "Terminate", "Resources": ["a"], "NotBefore": "soon"}'
    server.content[f"{AZURE}scheduledevents"] = f'{{"Events": [{event}]}}'
    until(lambda: watched.text)
    assert watched.text == "Azure: Terminate of a, soon"
    server.shutdown()
    server.server_close()
    absent = SpotNotice(MetadataServer("aws", server.address).notice)
    time.sleep(0.1)
    absent.close()
    assert absent.text is None and not caplog.records


@pytest.mark.parametrize("cloud", FIRMWARE)
def test_only_a_cloud_that_the_firmware_names_is_asked(
    tmp_path: Path, server: Server, cloud: str
) -> None:
    threads = threading.active_count()
    assert cloud_of(tmp_path) is None
    (tmp_path / "sys_vendor").write_text("Dell Inc.\n")
    assert watch_for_notice("auto", dmi=tmp_path, address=server.address) is None
    name, content = FIRMWARE[cloud]
    (tmp_path / name).write_text(f"{content}\n")
    assert cloud_of(tmp_path) == cloud
    assert watch_for_notice("none", dmi=tmp_path, address=server.address) is None
    assert threading.active_count() == threads and not server.asked
    watched = watch_for_notice("auto", dmi=tmp_path, address=server.address)
    with contextlib.closing(watched or pytest.fail("not watched")):
        until(lambda: server.asked)


def test_elsewhere_a_file_is_the_notice(tmp_path: Path) -> None:
    watched = watch_for_notice(str(tmp_path / "preempted"))
    assert watched is not None and watched.text is None
    watched.close()
    (tmp_path / "preempted").touch()
    again = watch_for_notice(str(tmp_path / "preempted"))
    assert again is not None
    until(lambda: again.text)
    assert again.text == f"{tmp_path / 'preempted'} exists"
