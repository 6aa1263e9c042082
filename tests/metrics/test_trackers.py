"""Records of a session, and the run they belong to, for the tests of trackers."""

import dataclasses
import http.server
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from thread_ranks import on_two_ranks, results
from wandb_files import offline_sessions

from refocused.config.outputs import TrackingConfig
from refocused.metrics import wandb as wandb_module
from refocused.metrics.tracker_files import OpenMetricsTracker, TensorBoardTracker
from refocused.metrics.trackers import (
    Histogram,
    Record,
    TrackedRun,
    Trackers,
    scalars,
    start_tracking,
)
from refocused.metrics.wandb import (
    NOTE_FILE,
    WandbNote,
    WandbTracker,
    continued,
    read_note,
    write_note,
)

SETTINGS = {"optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]}, "run": {"name": "tiny"}, "none": None}
LOSS = {"validation_loss": 3.0, "perplexity": 20.0, "bits_per_byte": 1.25}
VALIDATION: Record = {"kind": "validation", "step": 1, **LOSS}
SAMPLE: Record = {"kind": "sample", "step": 2, "sample": "def f():\n    return a < b"}
HISTOGRAMS: Record = {
    "kind": "histograms",
    "step": 3,
    "histograms": [Histogram("weights/head.weight", -1.0, 1.0, (1, 0, 2, 1), 0.5, 2.0)],
}


def step(number, loss=None, **more):
    loss = 3.5 - number if loss is None else loss
    return {"kind": "step", "step": number, "loss": loss, "mfu_fraction": None, **more}


def tracked_run(folder, *, at=0, **tracking):
    """A run named `tiny` whose session starts at a step."""
    config = TrackingConfig(**tracking)
    return TrackedRun(folder, "tiny", step=at, settings=SETTINGS, tracking=config)


class Listener:
    """A tracker that notes its records, and fails or waits as a test wants."""

    name = "listener"

    def __init__(self, *, fails_at="", waits=False):
        self.steps: list[object] = []
        self.exit_codes: list[int] = []
        self.fails_at = fails_at
        self.has_record, self.may_go_on = threading.Event(), threading.Event()
        if not waits:
            self.may_go_on.set()

    def open(self):
        self._fail("open")
        return "is open"

    def write(self, record):
        self.has_record.set()
        self.may_go_on.wait(60)
        if record["step"] == 2:
            self._fail("write")
        self.steps.append(record["step"])

    def close(self, exit_code):
        self._fail("close")
        self.exit_codes.append(exit_code)
        return "has ended"

    def _fail(self, when):
        if self.fails_at == when:
            raise ConnectionResetError(f"no\n{when}")


class Session:
    """Trackers and what they report."""

    def __init__(self, *listeners, room=1000):
        self.reports: list[tuple[str, str]] = []
        self.trackers = Trackers(
            listeners, report=lambda kind, text: self.reports.append((kind, text)), room=room
        )

    def record(self, *steps):
        for number in steps:
            self.trackers.record(step(number))

    def close(self, limit_seconds=60.0):
        """End the trackers; return the warnings."""
        self.trackers.close(4, limit_seconds=limit_seconds)
        return [text for kind, text in self.reports if kind == "tracker_warning"]


def test_a_tracker_gets_records_in_order_and_the_exit_code():
    listener = Listener()
    session = Session(listener)
    session.record(*range(1, 6))
    assert session.close() == []
    assert (listener.steps, listener.exit_codes) == ([1, 2, 3, 4, 5], [4])
    assert session.reports == [
        ("tracker", "  tracker  listener: is open"),
        ("tracker", "  tracker  listener: has ended"),
    ]


def test_a_slow_tracker_delays_nothing_and_what_it_lacks_is_counted():
    listener = Listener(waits=True)
    session = Session(listener, room=3)
    session.record(1)
    assert listener.has_record.wait(60)  # it has taken that one, and takes no other
    session.record(*range(2, 11))  # would wait for ever if it waited
    listener.may_go_on.set()
    too_slow, lacks = session.close()
    assert listener.steps == [1, 2, 3, 4]
    assert "is too slow" in too_slow
    assert "lacks 6 records: 6 dropped while it was too slow, 0 refused" in lacks


def test_a_tracker_that_cannot_be_opened_is_reported_once_and_left_alone():
    listener, other = Listener(fails_at="open"), Listener(fails_at="close")
    session = Session(listener, other)
    session.record(1, 3)
    warnings = sorted(session.close())
    assert "failed to close: ConnectionResetError: no close" in warnings[0]
    assert "records nothing in this session: ConnectionResetError: no open" in warnings[1]
    assert (len(warnings), listener.steps, other.steps) == (2, [], [1, 3])


def test_a_refused_record_is_reported_and_later_ones_are_written():
    listener = Listener(fails_at="write")
    session = Session(listener)
    session.record(1, 2, 3, 4)
    refused, lacks = session.close()
    assert listener.steps == [1, 3, 4]
    assert "refused a record: ConnectionResetError: no write" in refused
    assert "lacks 1 records: 0 dropped while it was too slow, 1 refused" in lacks


@pytest.mark.parametrize("room", [1, 10])
def test_a_tracker_that_hangs_does_not_keep_a_run_from_ending(room):
    listener = Listener(waits=True)
    session = Session(listener, room=room)
    session.record(1)
    assert listener.has_record.wait(60)
    session.record(2)
    assert any("did not finish in time" in text for text in session.close(limit_seconds=0.05))
    assert listener.exit_codes == []
    listener.may_go_on.set()


def test_a_tracker_that_is_off_is_not_imported():
    program = (
        "import sys, pathlib, refocused.metrics.trackers as trackers\n"
        "from refocused.config.outputs import TrackingConfig\n"
        "run = trackers.TrackedRun(pathlib.Path(), 'x', 0, {}, TrackingConfig())\n"
        "from refocused.system.world import World\n"
        "assert trackers.start_tracking(run, World(), track=print, report=print) is None\n"
        "ours = {f'refocused.metrics.{one}' for one in trackers.TRACKERS}\n"
        "assert not {'wandb', 'tensorboard', 'prometheus_client', *ours} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("kind", "fields", "numbers"),
    [
        (
            "step",
            {"loss": 2.5, "mfu_fraction": None, "mfu_refused": True, "sources": {"web": {"n": 3}}},
            {"train/loss": 2.5, "train/sources/web/n": 3.0},
        ),
        (
            "validation",
            {"validation_loss": 2.0, "ppl": 7.4, "sources": {"web": {"validation_loss": 1.5}}},
            {"validation/loss": 2.0, "validation/ppl": 7.4, "validation/sources/web/loss": 1.5},
        ),
        (
            "tasks",
            {"tasks": {"piqa": {"items": 3, "acc": {"value": 0.5, "standard_error": None}}}},
            {"tasks/piqa/items": 3.0, "tasks/piqa/acc/value": 0.5},
        ),
        ("sample", {"sample": "text"}, {}),
    ],
)
def test_numbers_have_constant_names(kind, fields, numbers):
    assert scalars({"kind": kind, "step": 7, **fields}) == numbers


@pytest.mark.parametrize(("project", "wandb_id"), [("demo", None), (None, "tiny-1")])
def test_rank_0_alone_tracks_and_every_rank_knows_the_wandb_id(
    tmp_path, monkeypatch, project, wandb_id
):
    monkeypatch.setattr(WandbTracker, "open", lambda self: "")
    monkeypatch.setattr(WandbTracker, "close", lambda self, exit_code: "")
    run = dataclasses.replace(tracked_run(tmp_path, at=10, wandb=project), wandb_id=wandb_id)
    tracked: dict[int, Trackers] = {}

    def action(world):
        return start_tracking(
            run,
            world,
            track=lambda trackers: tracked.update({world.rank: trackers}),
            report=lambda kind, text: None,
        )

    first, second = results(on_two_ranks(action))
    assert first is not None
    assert first.startswith("tiny-")
    assert second == first
    if project is None:
        assert (first, tracked) == ("tiny-1", {})  # the id of the checkpoint stays
    else:
        assert list(tracked) == [0]
        tracked[0].close(0, limit_seconds=60)


def read_prometheus(file):
    """Parse as OpenMetrics and as Prometheus' older form; both must find the same."""
    found = []
    for parse in (text_string_to_metric_families, parser.text_string_to_metric_families):
        values = {}
        for family in parse(file.read_text()):
            assert (family.type, bool(family.documentation)) == ("gauge", True)
            (sample,) = family.samples
            assert sample.labels == {"run": "tiny"}
            assert sample.timestamp is None  # node exporter refuses a file with one
            values[sample.name.removeprefix("refocused_")] = sample.value
        found.append(values)
    assert str(found[0]) == str(found[1])  # as texts: NaN equals nothing
    return found[0]


def tracker(file):
    run = tracked_run(file.parent, openmetrics=str(file))
    return OpenMetricsTracker(run, clock=lambda: 1.7e9)


def test_the_file_holds_the_newest_of_every_figure(tmp_path):
    file, known = tmp_path / "run.prom", {"gradient_norm": math.inf, "cost_usd": 1.5, "epoch": 0}
    opened = tracker(file)
    opened.open()
    assert not file.exists()
    opened.write(step(40, math.nan, **known))
    values = read_prometheus(file)
    assert math.isnan(values["train_loss"]) and values["train_step"] == 40
    opened.write({**VALIDATION, "step": 40})
    opened.write(step(50, 3.125, **known))
    opened.write({"kind": "sample", "step": 50, "sample": "text"})
    assert read_prometheus(file) == {
        "train_step": 50,
        "train_loss": 3.125,
        "train_gradient_norm": math.inf,
        "train_cost_usd": 1.5,
        "validation_loss": 3.0,
        "validation_bits_per_byte": 1.25,
        "validation_step": 40,
        "training": 1,
        "updated_timestamp_seconds": 1.7e9,
    }  # what is unknown is left out
    opened.write({"kind": "end", "step": 50, "seconds_trained": 100.0, "cost_usd": 1.75})
    values = read_prometheus(file)
    assert (values["train_cost_usd"], values["train_loss"]) == (1.75, 3.125)
    opened.close(0)
    assert read_prometheus(file)["training"] == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tracker(tmp_path / "nowhere" / "run.prom").open()


def write_events(folder, *records, at=0):
    tracker = TensorBoardTracker(tracked_run(folder, at=at))
    assert str(folder / "tensorboard") in tracker.open()
    for record in records:
        tracker.write(record)
    tracker.close(0)


def read_events(folder):
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def curve(folder, tag="train/loss"):
    return [(event.step, event.value) for event in read_events(folder).Scalars(tag)]


def test_numbers_samples_and_settings_can_be_read_back(tmp_path):
    before, sources = torch.get_rng_state(), {"web": {"tokens": 5}}
    write_events(tmp_path, step(1, 3.5), VALIDATION, step(2, 3.25, sources=sources), SAMPLE)
    found = read_events(tmp_path)
    assert curve(tmp_path) == [(1, 3.5), (2, 3.25)]
    assert curve(tmp_path, "validation/loss") == [(1, 3.0)]
    assert curve(tmp_path, "validation/bits_per_byte") == [(1, 1.25)]
    assert curve(tmp_path, "train/sources/web/tokens") == [(2, 5.0)]
    assert "train/mfu_fraction" not in found.Tags()["scalars"]  # unknown is left out
    (sample,) = found.Tensors("sample/text_summary")
    assert sample.step == 2
    text = sample.tensor_proto.string_val[0].decode()
    assert text == "    def f():\n        return a < b\n"  # a block that Markdown leaves as it is
    start = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = parse_session_start_info_plugin_data(start).hparams
    assert shown["optimizer.lr"].number_value == 3e-4
    assert shown["optimizer.betas"].string_value == "[0.9, 0.95]"
    assert shown["none"].string_value == "None"
    # Else the random numbers of training would depend on its trackers.
    assert torch.equal(torch.get_rng_state(), before)


def test_histograms_can_be_read_back(tmp_path):
    write_events(tmp_path, HISTOGRAMS)
    (event,) = read_events(tmp_path).Histograms("weights/head.weight")
    found = event.histogram_value
    assert event.step == 3
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (-1, 1, 4, 0.5, 2)
    assert (list(found.bucket_limit), list(found.bucket)) == ([-0.5, 0, 0.5, 1], [1, 0, 2, 1])


def test_after_a_rewind_every_step_is_there_once(tmp_path):
    write_events(tmp_path, *(step(number, 3.0) for number in range(1, 8)))
    validation = {**VALIDATION, "step": 4}
    write_events(tmp_path, validation, *(step(number, 2.0) for number in range(5, 7)), at=4)
    assert curve(tmp_path) == [*((n, 3.0) for n in range(1, 5)), (5, 2.0), (6, 2.0)]
    assert curve(tmp_path, "validation/loss") == [(4, 3.0)]
    write_events(tmp_path, step(1, 1.0))  # a start from scratch
    assert curve(tmp_path) == [(1, 1.0)]


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path, monkeypatch):
    """What the person who tests has of W&B is not used, and no other host is asked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


class WandbSession:
    """One session of a run that is logged to W&B, with a clock that a test moves."""

    def __init__(self, folder):
        self.now = 1000.0
        run = dataclasses.replace(tracked_run(folder, wandb="me/demo"), wandb_id="tiny-1")
        self.tracker = WandbTracker(run, clock=lambda: self.now)

    def log(self, *records):
        opened = self.tracker.open()
        for record in records:
            self.tracker.write(record)
        return opened, self.tracker.close(0)


def test_without_a_key_all_goes_to_files_that_sync_later(tmp_path):
    end: Record = {"kind": "end", "step": 3, "cost_usd": 4.48}
    records = (step(1), VALIDATION, SAMPLE, HISTOGRAMS, step(3, cost_usd=4.15), end)
    opened, closed = WandbSession(tmp_path).log(*records)
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
    figures = {"validation/loss": 3.0, "validation/perplexity": 20.0, "val_bpb": 1.25}
    assert validation == {"train/step": 1, **figures}
    assert sample["train/step"] == 2
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert page.read_text() == "<pre>def f():\n    return a &lt; b</pre>"
    drawn = "weights/head.weight"
    assert histogram[f"{drawn}/values"] == [1, 0, 2, 1]
    assert histogram[f"{drawn}/bins"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    # The cost at the end takes the place of the last step's.
    assert (last["train/cost_usd"], cost["train/cost_usd"]) == (4.15, 4.48)
    assert read_note(tmp_path / NOTE_FILE) == WandbNote("tiny-1", 0, last=3)


def test_a_session_that_repeats_steps_logs_none_of_them_twice(tmp_path):
    WandbSession(tmp_path).log(*(step(number) for number in range(1, 4)))
    validation: Record = {**VALIDATION, "step": 3}  # the first session ended before it
    WandbSession(tmp_path).log(step(2), step(3), validation, step(4))
    found = offline_sessions(tmp_path)
    assert [one.id for one in found] == ["tiny-1", "tiny-1"]
    assert [one.steps for one in found] == [[1, 2, 3], [4]]
    assert [one["validation/loss"] for one in found[1].history if "validation/loss" in one] == [3.0]


def test_what_a_kill_may_have_lost_is_not_noted(tmp_path):
    session = WandbSession(tmp_path)
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

    def do_HEAD(self):
        self.send_error(404)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def refusing_host():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def missing_host():
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
    tmp_path, monkeypatch, request, environment, reason
):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    for name, value in environment.items():
        value = request.getfixturevalue(value) if value.endswith("_host") else value
        monkeypatch.setenv(name, value)
    opened, _ = WandbSession(tmp_path).log(step(1))
    assert reason in opened
    assert [one.steps for one in offline_sessions(tmp_path)] == [[1]]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(ValueError, match="WANDB_MODE=disabled is set"):
        WandbSession(tmp_path).log(step(1))


@pytest.fixture
def silent_host():
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
def test_what_keeps_a_run_offline(tmp_path, monkeypatch, request, host, key, netrc, reason):
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
def test_which_run_there_a_session_continues(note, known, step, is_automatic, expected):
    run = dataclasses.replace(
        tracked_run(Path(), at=step), name="run-2", wandb_id=known, is_automatic=is_automatic
    )
    assert continued(note, run, token="new0") == expected


def test_a_run_with_a_long_name_is_recognized():
    run = dataclasses.replace(tracked_run(Path()), name="n" * 100)
    first = continued(None, run, token="aaaa")
    again = continued(None, dataclasses.replace(run, wandb_id=first.id, step=5), token="bbbb")
    assert (len(first.id), again.id) == (55, first.id)


def test_a_note_survives_and_a_torn_one_is_none(tmp_path):
    file = tmp_path / NOTE_FILE
    assert read_note(file) is None
    write_note(file, HERE)
    assert read_note(file) == HERE
    for torn in (b"", b"[]", b'{"id": "x"}', b'{"id": "x", "began": 1, "more": 2}', b"\xff"):
        file.write_bytes(torn)
        assert read_note(file) is None
