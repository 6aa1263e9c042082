"""What the files of a run show: as figures, and as the lines of one print."""

import dataclasses
import json
from typing import Any

import pytest
from monitor.watched_run import GPU, NOW, STEP_SECONDS, iso, new_run

from refocused.metrics.expected_loss import expected_text
from refocused.monitor.readings import as_record
from refocused.monitor.run_reader import METRICS_BYTES, RECENT_STEPS, RunReader
from refocused.monitor.screen.run_lines import all_lines, run_rows

PRINTED = """\
 one  TRAINING  step 1,000/2,000 50.0%  last line 10 s ago
 loss 3.1000  best val 3.0500 (0.9500 bits/byte) at 900  lr 3.00e-04  gnorm 0.67
 1.5 s/step  700,000 tok/s
 elapsed 25.2 min $20.10 of $400  left 24.8 min $14.90  ends Fri 15 Jan 08:24 UTC
 saved 900  at risk 100 steps = 2.5 min  mirror 800, 1 behind (75%), 1 cannot be copied
 mirror error: 503
 data 214/1,774 shards local, next 6 ready  wait 2.0%  1.00 M tokens trained on
 ranks slowest: rank 9 on node1 +12.3% (backward)
 CPU 12%  RAM 180/1,800 GB  GPU peak 80%
 ALARM  2.0 min  GPU 7: gpu_lost Restart or replace the machine, and resume the run from its \
last checkpoint.
 WARN   2.0 min  GPU 7: gpu_throttle Restart or replace the machine, and resume the run from its \
last checkpoint.
 GPU util    memory GB  temp  power W     SM MHz   link  ECC  note, recent util
 0    97%    48.4/79.6  70 C  640/700  1905/1980  18/18    0  \u2588\u2588
 1    97%    48.4/79.6  66 C  640/700  1905/1980  18/18    2  HW THERMAL; memory errors; row remap \
pending \u2588
 2   LOST   fallen off the bus\x20
 07:58:00 GPU 7: gpu_ecc
 07:59:00 save 900 local 1.9 s"""


def printed(view):
    return [line.plain for line in all_lines(view, events=2)]


def test_a_run_with_every_file_is_printed(tmp_path):
    run = new_run(tmp_path)
    run.begin()
    bare = printed(run.view())
    assert " no GPU readings" in bare and not any("shards" in line for line in bare)
    shards = {"shards_local": 214, "shards_total": 1774, "shards_ready": 6}
    run.state(step=1000, status="training", **shards)
    slowest = {"rank": 9, "excess_fraction": 0.123, "limit_fraction": 0.05, "phase": "backward"}
    slowest |= {"host": "node1"}
    figures = {"learning_rate": 3e-4, "gradient_norm": 0.67, "step_seconds": STEP_SECONDS}
    figures |= {"tokens_per_second": 7e5, "seconds_left": 1500.0, "gpu_memory_fraction": 0.8}
    step: dict[str, Any] = {"kind": "step", "step": 1000, "loss": 3.1, "slowest": slowest}
    run.line("training_metrics", NOW - 10, {**step, **figures, "data_wait_fraction": 0.02})
    progress = {"done_bytes": 3, "total_bytes": 4, "last_error": "503"}
    run.mirror(mirrored=[700, 800], waiting=[900], failed={"600": "damaged"}, **progress)
    run.gpus(GPU, dataclasses.replace(GPU, index=3), age=65.5)  # GPU 3 of an earlier session
    hot = dataclasses.replace(GPU, index=1, throttle_reasons=("hw_slowdown", "hw_thermal"))
    hot = dataclasses.replace(hot, ecc_uncorrected=2, remap_pending=True)
    lost = dataclasses.replace(GPU, index=2, lost=True)
    run.gpus(dataclasses.replace(GPU, temperature_celsius=70), hot, lost)
    run.alarm(name="gpu_throttle", critical=False)
    for name, raised in (("gpu_lost", True), ("gpu_ecc", True), ("gpu_ecc", False)):
        run.alarm(name=name, raised=raised)
    run.line("events", NOW - 60, {"kind": "save", "text": "save  900 local 1.9 s", "step": 900})
    assert printed(run.view()) == PRINTED.splitlines()
    assert " CPU 12%  RAM 180/1,800 GB  GPU peak 80%" in printed(run.view(after=55))
    later = printed(run.view(after=56))
    assert any(line.startswith(" 61 s ago: CPU 12%") for line in later)
    assert any(line.startswith(" GPU util") and line.endswith(" 61 s ago") for line in later)
    # A rank that is hardly slower, or a damaged line, names none.
    for number, changes in ((1011, {"excess_fraction": 0.015}), (1020, {"rank": None})):
        line = {"kind": "step", "step": number, "slowest": {**slowest, **changes}}
        run.line("training_metrics", NOW, line)
        assert not any("slowest" in line for line in printed(run.view()))
    record = json.loads(json.dumps(run.view().as_record()))
    saves = {name: record["saves"][name] for name in ("steps_at_risk", "seconds_ago", "local")}
    assert saves == {"steps_at_risk": 100, "seconds_ago": 60.0, "local": 2}
    assert record["gpus"][0]["temperature_celsius"] == 70
    assert run.view().tokens_per_second == pytest.approx(7e5)  # the damaged lines have no speed
    assert not {"steps", "validations"} & set(record)


def test_time_and_money_of_a_live_run_go_on_from_its_last_line(run):
    view = run.view()
    assert (view.status, view.step, view.is_live) == ("training", 1000, True)
    assert view.seconds_trained == pytest.approx(1500 + 10)
    assert view.cost_usd == pytest.approx(20 + 10 * 36 / 3600)
    assert view.seconds_left == pytest.approx(1000 * STEP_SECONDS - 10)
    assert view.cost_left_usd == pytest.approx(1490 * 36 / 3600)
    assert (view.ends, view.progress_fraction) == (pytest.approx(NOW + 1490), 0.5)


@pytest.mark.parametrize("status", ["training", "failed", "stopped"])
def test_what_is_left_of_a_run_that_ended_early_counts_from_its_checkpoint(run, status):
    run.state(step=1000, status=status, age=7200.0)
    view = run.view(alive=False)
    assert view.status == ("crashed" if status == "training" else status)
    assert (view.cost_usd, view.ends) == (20.0, None)  # a dead run costs no more
    # 1,000 steps were left at the last line, and 100 are lost
    assert (view.resumes_from, view.seconds_left) == (900, pytest.approx(1100 * STEP_SECONDS))
    assert view.cost_left_usd == pytest.approx(1100 * STEP_SECONDS * 36 / 3600)
    text = "\n".join(printed(view))
    assert text.startswith(f" one  {view.status.upper()} 2.0 h ago  step 1,000/2,000 50.0%")
    assert "left 27.5 min $16.50 from checkpoint 900" in text
    assert "lost 100 steps = 2.5 min" in text
    for saved in (run.folder / "checkpoints").iterdir():
        saved.rmdir()
    view = run.view(alive=False)
    assert view.seconds_left == pytest.approx(2000 * STEP_SECONDS)
    assert any("from the start" in line for line in printed(view))
    run.mirror(mirrored=[800])
    view = run.view(alive=False)
    assert (view.resumes_from, view.seconds_left) == (800, pytest.approx(1200 * STEP_SECONDS))


@pytest.mark.parametrize(("alive", "left"), [(True, None), (False, 1100 * STEP_SECONDS)])
def test_before_a_sessions_first_line_the_earlier_speed_is_not_shown(run, alive, left):
    run.state(step=1000, status="training", just_begun=True)
    view = run.view(alive=alive)
    assert (view.last_step, len(view.steps)) == (None, 100)  # the curves are there
    assert view.seconds_left == (None if left is None else pytest.approx(left))


@pytest.mark.parametrize(
    ("facts", "seconds", "status"),
    [
        ({}, 1800.0, "training"),
        ({}, 1801.0, "silent"),
        ({"just_begun": True, "session_began": iso(NOW - 10)}, 1801.0, "silent"),
        ({"step": 2000}, 3600.0, "training"),  # after the last step no line is waited for
    ],
)
def test_a_run_is_silent_when_nothing_is_written_or_the_watchdog_says_so(
    tmp_path, facts, seconds, status
):
    run = new_run(tmp_path)
    run.begin(**facts)
    assert run.view(after=seconds - 10).status == status
    run.gpus(GPU, age=-seconds)  # the sampler goes on in a long validation
    assert run.view(after=seconds).status == "training"
    run.alarm(name="no_step")
    assert run.view(after=seconds).status == "silent"


def test_damaged_files_cost_only_what_is_damaged(run):
    run.gpus(GPU)
    damage = {"power_watts": "x", "lost": [1], "time": "yesterday"}
    run.line("gpu_metrics", NOW, as_record(dataclasses.replace(GPU, index=1)) | damage)
    for name in ("training_metrics", "events", "gpu_metrics"):
        with (run.folder / "logs" / f"{name}.jsonl").open("ab") as torn:
            torn.write(b'{"kind": "gpu", "host": 3}\n\xff\xfe{"kind": "st')
    (run.folder / "mirror.json").write_bytes(b"\xff{")
    (run.folder / "run.yaml").write_bytes(b"\xff: [")
    view = run.view()
    assert (view.step, len(view.steps), view.mirror) == (1000, 100, None)
    assert view.gpus == [GPU, dataclasses.replace(GPU, index=1, power_watts=None)]
    (run.folder / "state.json").write_text('{"step": "many", "status": 3}')
    view = run.view()
    assert view.status == "unknown"
    assert " state.json has an unknown status: 3" in printed(view)


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (b"", "it is empty"),
        (b'{"step": 10', "it is torn, or no JSON object"),
        (None, "Is a directory"),
    ],
)
def test_a_state_that_cannot_be_read_is_reported_and_all_else_is_shown(run, content, trouble):
    run.gpus(GPU)
    run.alarm()
    loss = {"validation_loss": 3.05, "bits_per_byte": 0.875}
    validation = {"kind": "validation", "step": 1000, **loss}
    run.line("training_metrics", NOW - 5, validation)
    (run.folder / "run.yaml").write_text("run: {steps: 2000}\n")
    state = run.folder / "state.json"
    state.unlink()
    state.write_bytes(content) if content is not None else state.mkdir()
    view = run.view()
    assert (view.status, view.is_live, view.has_ended) == ("unknown", False, False)
    lines = printed(view)
    assert lines[:2] == [
        " one  UNKNOWN  step 1,000/2,000 50.0%",
        f" state.json cannot be read: {trouble}",
    ]
    assert lines[2].startswith(
        " loss 3.1000  best val 3.0500 (0.8750 bits/byte) at 1,000  lr 3.00e-04"
    )
    assert lines[3].startswith(" 1.5 s/step")
    for part in ("ALARM", "48.4/79.6"):
        assert any(part in line for line in lines)
    assert run_rows([view])[0].plain.endswith(f"state.json cannot be read: {trouble}")
    # The steps of a run by tokens stand in its lines alone.
    (run.folder / "run.yaml").write_text("run: {steps: null, tokens: 3000000}\n")
    step = {"kind": "step", "step": 1500, "total_steps": 3000, "tokens": 1_500_000}
    run.line("training_metrics", NOW, step)
    view = run.view()
    assert (view.total_steps, view.tokens, view.progress_fraction) == (3000, 1_500_000, 0.5)
    assert (view.validation_loss, view.bits_per_byte) == (3.05, 0.875)


def numbers(view):
    return [point.step for point in view.steps]


@pytest.mark.parametrize("recent_only", [False, True])
def test_a_reader_follows_what_is_written(tmp_path, recent_only):
    run = new_run(tmp_path)
    reader = RunReader(run.folder, recent_only=recent_only)
    view = reader.read(NOW)
    assert (numbers(view), view.state, view.mirror, view.status) == ([], None, None, "starting")
    run.metrics([10, 20], last=20)
    run.state(step=20, status="training")
    run.mirror(waiting=[5, 7], last_error="503", heartbeat=12.0, drained=1)
    view = reader.read(NOW)
    assert (numbers(view), view.step) == ([10, 20], 20)
    mirror = view.mirror
    assert mirror is not None
    assert dataclasses.astuple(mirror) == ("gs://b", None, 2, None, 0, "503", 12.0, True)
    # A file that cannot be read leaves what was known.
    for name in ("state", "mirror"):
        (run.folder / f"{name}.json").write_text("{half")
    view = reader.read(NOW)
    assert view.state_trouble is not None
    assert (view.step, view.mirror) == (20, mirror)
    # Training goes back: what lies beyond belongs to another branch.
    run.metrics([10, 15], last=15)
    assert numbers(reader.read(NOW)) == [10, 15]


def test_alarms_read_the_end_of_a_long_file_and_the_readings_of_other_machines(tmp_path):
    run = new_run(tmp_path)
    run.metrics(range(1, 3000), last=3000)
    file = run.folder / "logs" / "training_metrics.jsonl"
    assert file.stat().st_size > 2 * METRICS_BYTES
    reader = RunReader(run.folder, recent_only=True)
    assert numbers(reader.read(NOW)) == list(range(3000 - RECENT_STEPS, 3000))
    run.metrics([3000], last=3000)
    run.gpus(GPU)
    run.line("gpu_metrics-node-1", NOW - 64, as_record(dataclasses.replace(GPU, host="node2")))
    view = reader.read(NOW)
    assert numbers(view) == list(range(3001 - RECENT_STEPS, 3001))
    assert [gpu.host for gpu in view.gpus] == ["node2"]
    assert [gpu.host for gpu in run.view().gpus] == ["node1", "node2"]


def test_the_loss_is_shown_beside_the_expected_one(tmp_path):
    run = new_run(tmp_path)
    run.begin()
    file, billion = run.folder / "expected_loss.json", 1_000_000_000

    def expected(loss: float, tokens: int) -> tuple[list[str], str]:
        run.line(
            "training_metrics", NOW, {"kind": "step", "step": 1010, "loss": loss, "tokens": tokens}
        )
        view = run.view()
        text = expected_text(view.expected_loss, view.steps)
        return [line for line in printed(view) if " expected " in line], text

    assert expected(3.12, 4 * billion) == ([], "")  # an older run
    file.write_text(json.dumps({"curve": [[billion, 4.0], [4 * billion, 3.0], [8 * billion, 2.8]]}))
    # Half a band of 0.3 + 0.1 ln 2; at the end 2.8 + 0.12, with 0.02 + 0.15 ln 2.
    end = "end 2.92 +- 0.12 by the losses so far"
    (line,), text = expected(3.12, 4 * billion)
    assert line == f" expected 2.63 to 3.37 at 4.00 B tokens; {end}"
    assert line.endswith(text)
    assert expected(3.4, 4 * billion)[1].startswith("2.63 to 3.37 at 4.00 B tokens (it is above)")
    # Before the curve begins, and after its end, that of the end is known.
    for tokens in (billion // 2, 9 * billion):
        assert expected(5.0, tokens)[1] == "2.50 to 3.10 at 8.00 B tokens, the end"
    # Why there is none stands in the summary alone.
    file.write_text(json.dumps({"reason": "the run continues another model"}))
    assert expected(3.12, 4 * billion) == ([], "the run continues another model")
    file.write_text('{"curve": [[2, ')
    assert expected(3.12, 4 * billion) == ([], "")
