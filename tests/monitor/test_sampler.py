"""The process that samples a machine: what it writes, when it ends, and whom it tells."""

import dataclasses
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from ranks import until

from refocused.config.outputs import CostConfig, LogConfig
from refocused.metrics.jsonl import JsonLines, write_state
from refocused.monitor.readings import AlarmEvent
from refocused.monitor.sampler import alarms, gpu_reader, hangs, start_sampler, watchdog
from refocused.monitor.sampler.alarms import AlarmMessages, alarm_rules
from refocused.monitor.sampler.sampler import Sampler, take_turn
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.processes import identify, this_process
from refocused.system.progress import Place, Progress
from refocused.system.world import World

COST = CostConfig(per_hour_usd=24, budget_usd=400, credit_usd=500)


class Site:
    """A run's folder on a machine with eight GPUs, and what samplers write there."""

    def __init__(self, run, machine):
        self.run, self.machine = run, machine

    def settings(self, training=None, **more):
        rank = training or this_process()
        return SamplerSettings(run=self.run, training=rank, interval_seconds=0.1, ranks=8, **more)

    def lines(self, name="gpu_metrics"):
        file = self.run / "logs" / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def alarms(self):
        found = [line for line in self.lines("events") if line["kind"] == "alarm"]
        return [(one["alarm"], one["subject"].rpartition(" ")[2], one["raised"]) for one in found]

    def await_lines(self, count, name="gpu_metrics"):
        until(lambda: len(self.lines(name)) >= count)


@pytest.fixture
def site(tmp_path, eight_gpus):
    return Site(tmp_path, eight_gpus)


def test_alarms_begin_and_end_and_a_new_start_looks_for_itself(site, monkeypatch):
    for alarm in ("gpu_temperature", "gpu_throttle"):
        at_once = dataclasses.replace(alarm_rules()[alarm], begins_after=0.0, ends_after=0.0)
        monkeypatch.setitem(alarm_rules(), alarm, at_once)
    sampler = Sampler(site.settings(visible_devices="4,5,6,7,0,1,2,3"))
    sampler.round()
    found = site.lines()
    assert [line["kind"] for line in found] == ["gpu"] * 8 + ["system"]
    assert [line["local_rank"] for line in found[:8]] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert (found[8]["gpus"], site.alarms) == (8, [])
    site.machine.gpu(5, temperature=88, clock_events=0x44, sm_clock=1305)
    site.machine.gpu(2, ecc_uncorrected=3)
    site.machine.gpu(7, lost=1)
    sampler.round()
    sampler.round()
    hot = {("gpu_temperature", "5"), ("gpu_throttle", "5")}
    raised = hot | {("gpu_ecc", "2"), ("gpu_lost", "7")}
    assert sorted(site.alarms) == sorted((*alarm, True) for alarm in raised)
    site.machine.gpu(5, temperature=70, clock_events=0x4)
    sampler.round()
    assert sorted(site.alarms[4:]) == sorted((*alarm, False) for alarm in hot)
    site.machine.gpu(7, lost=0)
    Sampler(site.settings()).round()
    ended = [("gpu_ecc", "2", False), ("gpu_lost", "7", False)]
    assert sorted(site.alarms[6:8]) == ended
    assert site.alarms[8:] == [("gpu_ecc", "2", True)]


def test_the_first_machine_watches_the_run_and_the_others_files_are_their_own(site):
    write_state(site.run / "state.json", {"status": "training", "step": 1})
    metrics = JsonLines(site.run / "logs" / "training_metrics.jsonl")
    first, second = (Sampler(site.settings(node=node)) for node in (0, 1))
    metrics.write({"kind": "step", "step": 1, "loss": None})
    first.round()
    second.round()
    assert site.alarms == [("non_finite", "run", True)]
    assert len(site.lines("gpu_metrics-node-1")) == 9
    assert site.lines("events-node-1") == []


@pytest.mark.slow
def test_the_watchdog_tells_whether_a_rank_hangs_and_what_it_does(site, monkeypatch):
    monkeypatch.setattr(hangs, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.02)
    write_state(site.run / "state.json", {"status": "training", "step": 1})
    progress, me = Progress.shared(), this_process()
    assert progress.files is not None
    place = Place(rank=0, node=0, host="node1", process=me, files=progress.files)
    progress.beaten = time.monotonic_ns() + 10**15  # it has the interpreter all the time
    progress.step(1)  # or the sampler would wait for it
    sampler = Sampler(site.settings(places=(place,), hang_minutes=0))

    def hangs_after_a_round():
        sampler.round()
        return ("no_step", "run", True) in site.alarms

    with progress.doing("save"):  # which may take an hour
        time.sleep(1)
        sampler.round()
        assert not site.alarms and not sampler.watchdog.is_stepping
    for step in range(2, 5):
        progress.step(step)
    assert sampler.watchdog.is_stepping  # so that GPUs should be busy
    until(hangs_after_a_round)  # and the run is not stopped
    progress.begin("save")
    until(lambda: sampler.round() or site.alarms[-1] == ("no_step", "run", False))


def test_without_a_rank_nothing_is_said_of_a_run(site):
    write_state(site.run / "state.json", {"status": "training", "step": 1})
    site.machine.gpu(7, lost=1)
    alone = SamplerSettings(run=site.run, training=None)
    assert take_turn(alone)
    assert not take_turn(alone)  # another one samples: nothing to wait for
    Sampler(alone).round()
    assert site.alarms == [("gpu_lost", "7", True)]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "sampler", "has no NVIDIA driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "sampler_warning", "Restart the machine"),
    ],
)
def test_a_machine_without_a_driver_is_watched_without_gpus(site, code, kind, words):
    site.machine.driver(init=code)
    sampler = Sampler(site.settings())
    sampler.round()
    sampler.round()
    [first, second] = site.lines()
    assert first["kind"] == second["kind"] == "system"
    assert first["gpus"] is second["gpus"] is None
    [event] = site.lines("events")
    assert (event["kind"], event["text"]) == (kind, first["gpu_note"])
    assert words in event["text"]


def test_a_round_that_fails_is_logged_once_and_costs_no_other(site, monkeypatch, caplog):
    sampler = Sampler(site.settings())
    with monkeypatch.context() as broken:
        broken.setattr(gpu_reader.GpuReader, "samples", lambda self: 1 / 0)
        sampler.round()
        sampler.round()
    sampler.round()
    assert caplog.messages == ["A round of samples failed"]
    assert len(site.lines()) == 9


class Rank:
    """A process that stands for the rank that starts the sampler."""

    def __init__(self):
        self._process = subprocess.Popen(["sleep", "600"])
        identity = identify(self._process.pid)
        assert identity is not None
        self.identity = identity

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def rank():
    started = Rank()
    yield started
    started.kill()


def test_the_process_ends_with_its_rank_says_that_it_was_killed_and_keeps_the_secret(site, rank):
    write_state(site.run / "state.json", {"status": "training", "step": 12})
    command = f"env > {site.run}/environment; cat > {site.run}/got # SECRET"
    pid = start_sampler.start_sampler(site.settings(rank.identity, on_alarm=command))
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1"  # no rank's
    site.await_lines(18)
    assert "SECRET" not in Path(f"/proc/{pid}/cmdline").read_text()
    site.machine.gpu(7, lost=1)
    site.await_lines(1, "events")
    rank.kill()
    until(lambda: identify(pid) is None)
    assert site.alarms == [("gpu_lost", "7", True), ("run_died", "run", True)]
    log = (site.run / "logs" / "training.log").read_text()
    assert " sampler WARNING ALARM: " in log
    assert "ended without reporting why; it was probably killed (step 12). Read the end of" in log
    assert (site.run / "logs" / "sampler.log").read_text() == ""
    assert json.loads((site.run / "got").read_text())["alarm"] == "run_died"
    assert "SECRET" not in (site.run / "environment").read_text()


@pytest.mark.slow
def test_of_two_on_a_machine_one_samples(site, rank):
    """The sampler of a start that was killed ends; that of the next one goes on for it."""
    later = Rank()
    first = start_sampler.start_sampler(site.settings(rank.identity))
    site.await_lines(9)
    second = start_sampler.start_sampler(site.settings(later.identity))
    os.kill(first, signal.SIGSTOP)
    count = len(site.lines())
    time.sleep(0.5)
    assert len(site.lines()) == count  # the second one waits
    os.kill(first, signal.SIGCONT)
    rank.kill()
    until(lambda: identify(first) is None)
    site.await_lines(count + 27)
    assert identify(second) is not None
    later.kill()
    until(lambda: identify(second) is None)


@pytest.mark.parametrize(
    ("changes", "seconds", "ranks"),
    [
        ({}, 5.0, 8),
        ({"rank": 8, "node": 1}, 2.0, 8),
        ({"device_kind": "cpu"}, 5.0, 0),
        ({"local_rank": 1}, 5.0, None),  # each machine's first rank starts one
        ({}, 0.0, None),  # where it is wanted
    ],
)
def test_the_sampler_that_a_rank_starts(tmp_path, monkeypatch, changes, seconds, ranks):
    started: list[SamplerSettings] = []
    monkeypatch.setattr(start_sampler, "start_sampler", started.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    world = World(world_size=16, local_world_size=8, device_kind="cuda")
    world = dataclasses.replace(world, **changes)
    log = LogConfig(sample_seconds=seconds)
    start_sampler.start_sampling(tmp_path, world, log=log, cost=COST)
    for found in started:
        assert found.training == this_process()
        assert (found.node, found.ranks, found.interval_seconds) == (world.node, ranks, seconds)
        assert (found.visible_devices, found.cuda_order, found.cost) == ("1,0", "PCI_BUS_ID", COST)
        assert SamplerSettings.model_validate_json(found.model_dump_json()) == found
    assert len(started) == (ranks is not None)


def test_a_sampler_that_cannot_be_started_is_reported_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    start_sampler.start_sampling(tmp_path, World(), log=LogConfig(), cost=COST)
    assert "sampler of GPUs and machine could not be started" in caplog.text


class Server(http.server.ThreadingHTTPServer):
    """A web server that keeps what it gets, and responds with `status` once `open` is set."""

    got: list[dict[str, Any]]
    open: threading.Event
    status = 200


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        assert self.path == "/SECRET?key=SECRET"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.server.open.wait()
        self.send_response(self.server.status)
        self.end_headers()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(alarms, "PAUSES_SECONDS", (0.01, 0.01))
    with Server(("127.0.0.1", 0), Handler) as found:
        found.got, found.open = [], threading.Event()
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.open.set()
        found.shutdown()


def address(server):
    return f"http://user:pass@127.0.0.1:{server.server_port}/SECRET?key=SECRET"


def test_critical_alarms_of_a_run_are_posted(site, server):
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


def send(target, *events, done):
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
        ([(True, 0), (False, 1), (True, 2), (None, 600)], [True, False, True]),
        ([(True, 0), (False, 1), (True, 2), (None, 599)], [True, False]),
        ([(True, 0), (False, 1), (True, 2), (False, 3), (None, 600)], [True, False]),
        ([(False, 0), (True, 1)], [False, True]),  # first, the clearing of an earlier session's
    ],
)
def test_a_flapping_alarm_is_sent_seldom(tmp_path, events, expected):
    send(f"cat >> {tmp_path}/got; echo >> {tmp_path}/got", *events, done=lambda: True)
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [one["raised"] for one in got] == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("refuses", "HTTP 300"),
        ("hangs", "ReadTimeout"),
        ("sleep 600", "the command took longer than 0.2 s"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_failure_delays_no_end_and_is_logged_once_without_the_address(
    server, monkeypatch, caplog, kind, reason
):
    if kind == "refuses":
        server.status = 300
        server.open.set()
    else:
        monkeypatch.setattr(alarms, "LIMIT_SECONDS", 0.2)
    target = address(server) if kind in ("refuses", "hangs") else kind
    attempts = 6 if kind == "refuses" else 0  # three for each message
    send(target, (True, 0), (False, 1), done=lambda: len(server.got) >= attempts)
    assert caplog.messages == [f"log.on_alarm: an alarm could not be sent ({reason})."]
