import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from monitor.watched_run import ADVICE, GPU, NOW, STEP_SECONDS, WatchedRun, iso, new_run

from refocused.monitor.readings import as_record
from refocused.monitor.run_reader import METRICS_BYTES, RECENT_STEPS, RunReader, RunView
from refocused.monitor.screen.run_lines import all_lines, run_rows


def printed(view: RunView) -> list[str]:
    return [line.plain for line in all_lines(view, events=5)]


def test_time_and_money_of_a_live_run_go_on_from_its_last_line(run: WatchedRun) -> None:
    view = run.view()
    assert (view.status, view.step, view.is_live) == ("training", 1000, True)
    assert view.seconds_trained == pytest.approx(1500 + 10)
    assert view.cost_usd == pytest.approx(20 + 10 * 36 / 3600)
    assert view.seconds_left == pytest.approx(1000 * STEP_SECONDS - 10)
    assert view.cost_left_usd == pytest.approx(1490 * 36 / 3600)
    assert view.ends == pytest.approx(NOW + 1490)
    assert view.progress_fraction == 0.5


@pytest.mark.parametrize("status", ["training", "failed", "stopped"])
def test_what_is_left_of_a_run_that_ended_early_counts_from_its_checkpoint(
    run: WatchedRun, status: str
) -> None:
    run.state(step=1000, status=status, age=7200.0)
    view = run.view(alive=False)
    assert view.status == ("crashed" if status == "training" else status)
    assert (view.cost_usd, view.ends) == (20.0, None)  # a dead run costs no more
    assert view.resumes_from == 900
    # 1,000 steps were left at the last line, and 100 are lost
    assert view.seconds_left == pytest.approx(1100 * STEP_SECONDS)
    assert view.cost_left_usd == pytest.approx(1100 * STEP_SECONDS * 36 / 3600)
    text = "\n".join(printed(view))
    assert text.startswith(f" one  {view.status.upper()} 2.0 h ago  step 1,000/2,000 50.0%")
    assert "left 27.5 min $16.50 from checkpoint 900" in text
    assert "lost 100 steps = 2.5 min" in text


def test_a_crashed_run_goes_on_from_what_only_the_mirror_has_or_anew(run: WatchedRun) -> None:
    for saved in (run.folder / "checkpoints").iterdir():
        saved.rmdir()
    view = run.view(alive=False)
    assert view.seconds_left == pytest.approx(2000 * STEP_SECONDS)
    assert any("from the start" in line for line in printed(view))
    run.mirror(mirrored=[800])
    view = run.view(alive=False)
    assert (view.resumes_from, view.seconds_left) == (800, pytest.approx(1200 * STEP_SECONDS))


@pytest.mark.parametrize(("alive", "left"), [(True, None), (False, 1100 * STEP_SECONDS)])
def test_before_a_sessions_first_line_the_earlier_speed_is_not_shown(
    run: WatchedRun, alive: bool, left: float | None
) -> None:
    run.state(step=1000, status="training", just_begun=True)
    view = run.view(alive=alive)
    assert view.last_step is None
    assert view.seconds_left == (None if left is None else pytest.approx(left))
    assert len(view.steps) == 100  # the curves are there


@pytest.mark.parametrize(
    ("facts", "seconds", "status"),
    [
        ({}, 1799.0, "training"),
        ({}, 1801.0, "silent"),
        ({"just_begun": True, "session_began": iso(NOW - 10)}, 1801.0, "silent"),
        ({"step": 2000}, 3600.0, "training"),  # after the last step no line is waited for
    ],
)
def test_a_run_is_silent_when_nothing_is_written(
    tmp_path: Path, facts: dict[str, Any], seconds: float, status: str
) -> None:
    run = new_run(tmp_path)
    run.begin(**facts)
    assert run.view(after=seconds - 10).status == status
    run.gpus(GPU, age=-seconds)  # the sampler goes on in a long validation
    assert run.view(after=seconds).status == "training"
    run.alarm(name="no_step")
    assert run.view(after=seconds).status == "silent"


def test_shards_and_mirror_are_what_their_files_say(run: WatchedRun) -> None:
    assert run.view().shards is None
    assert not any("shards" in line for line in printed(run.view()))
    shards = {"shards_local": 214, "shards_total": 1774, "shards_ready": 6}
    run.state(step=1000, status="training", **shards)
    progress = {"done_bytes": 3, "total_bytes": 4, "last_error": "503"}
    run.mirror(mirrored=[700, 800], waiting=[900], failed={"600": "damaged"}, **progress)
    lines = printed(run.view())
    assert " data 214/1,774 shards local, next 6 ready  1.00 M tokens trained on" in lines
    assert any("mirror 800, 1 behind (75%), 1 cannot be copied" in line for line in lines)
    assert " mirror error: 503" in lines


def test_the_slowest_rank_and_its_machine_are_shown(run: WatchedRun) -> None:
    assert not any("slowest" in line for line in printed(run.view()))
    slowest = {"rank": 9, "excess_fraction": 0.123, "limit_fraction": 0.05, "phase": "backward"}
    record: dict[str, Any] = {"kind": "step", "step": 1010, "slowest": {**slowest, "host": "node1"}}
    run.line("training_metrics", NOW, record)
    assert " ranks slowest: rank 9 on node1 +12.3% (backward)" in printed(run.view())
    equal = {**slowest, "host": "node1", "excess_fraction": 0.015}
    run.line("training_metrics", NOW, {**record, "step": 1011, "slowest": equal})
    assert not any("slowest" in line for line in printed(run.view()))
    del record["slowest"]["rank"]  # damaged
    run.line("training_metrics", NOW, {**record, "step": 1020})
    assert not any("slowest" in line for line in printed(run.view()))


def test_alarms_see_the_readings_of_other_machines(run: WatchedRun) -> None:
    run.gpus(GPU)
    run.line("gpu_metrics-node-1", NOW, as_record(dataclasses.replace(GPU, host="node2")))
    found = RunReader(run.folder, recent_only=True).read(NOW)
    assert [gpu.host for gpu in found.gpus] == ["node2"]
    assert [gpu.host for gpu in run.view().gpus] == ["node1", "node2"]


def test_alarms_stand_until_they_end_the_critical_ones_first(run: WatchedRun) -> None:
    run.alarm(name="gpu_throttle", critical=False)
    run.alarm(name="gpu_lost")
    run.alarm(name="gpu_ecc")
    run.alarm(name="gpu_ecc", raised=False)
    assert [alarm.name for alarm in run.view().alarms] == ["gpu_lost", "gpu_throttle"]
    assert f" ALARM  2.0 min  GPU 7: gpu_lost {ADVICE}" in printed(run.view())


def test_gpus_are_shown_as_they_were_sampled_last(run: WatchedRun) -> None:
    assert " no GPU readings" in printed(run.view())
    run.gpus(GPU, dataclasses.replace(GPU, index=3), age=3600.0)
    hot = dataclasses.replace(GPU, index=1, throttle_reasons=("hw_slowdown", "hw_thermal"))
    lost = dataclasses.replace(GPU, index=2, lost=True)
    hot = dataclasses.replace(hot, ecc_uncorrected=2, remap_pending=True)
    run.gpus(dataclasses.replace(GPU, temperature_celsius=70), hot, lost)
    view = run.view()
    assert [gpu.index for gpu in view.gpus] == [0, 1, 2]  # GPU 3 was of an earlier session
    text = "\n".join(printed(view))
    assert "0    97%    48.4/79.6  70 C  640/700  1905/1980  18/18    0" in text
    assert "HW THERMAL; memory errors; row remap pending" in text
    assert " 2   LOST   fallen off the bus" in text
    assert "CPU 12%  RAM 180/1,800 GB" in text
    lines = [line.plain for line in all_lines(run.view(after=595), events=5)]
    assert any(line.startswith(" 10.0 min ago: CPU 12%") for line in lines)
    assert any(line.startswith(" GPU util") and line.endswith(" 10.0 min ago") for line in lines)


def test_damaged_files_cost_only_what_is_damaged(run: WatchedRun) -> None:
    run.gpus(GPU)
    damaged = as_record(dataclasses.replace(GPU, index=1)) | {"power_watts": "x", "lost": [1]}
    run.line("gpu_metrics", NOW, damaged)
    for name in ("training_metrics", "events", "gpu_metrics"):
        with (run.folder / "logs" / f"{name}.jsonl").open("ab") as torn:
            torn.write(b'{"kind": "gpu", "host": 3}\n\xff\xfe{"kind": "st')
    (run.folder / "mirror.json").write_bytes(b"\xff{")
    (run.folder / "run.yaml").write_bytes(b"\xff: [")
    view = run.view()
    assert (view.step, len(view.steps), len(view.gpus)) == (1000, 100, 2)
    assert view.gpus[1] == dataclasses.replace(GPU, index=1, power_watts=None)
    assert view.mirror is None
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
def test_a_state_that_cannot_be_read_is_reported_and_all_else_is_shown(
    run: WatchedRun, content: bytes | None, trouble: str
) -> None:
    run.gpus(GPU)
    run.alarm()
    validation = {"kind": "validation", "step": 1000, "validation_loss": 3.05}
    run.line("training_metrics", NOW - 5, validation)
    (run.folder / "run.yaml").write_text("run: {steps: 2000}\n")
    state = run.folder / "state.json"
    state.unlink()
    state.write_bytes(content) if content is not None else state.mkdir()
    view = run.view()
    assert (view.status, view.is_live, view.has_ended) == ("unknown", False, False)
    lines = printed(view)
    assert lines[0] == " one  UNKNOWN  step 1,000/2,000 50.0%"
    assert lines[1] == f" state.json cannot be read: {trouble}"
    assert lines[2].startswith(" loss 3.1000  best val 3.0500 at 1,000  lr 3.00e-04")
    assert lines[3].startswith(" 1.5 s/step")
    assert any("ALARM" in line for line in lines)
    assert any("48.4/79.6" in line for line in lines)
    assert run_rows([view])[0].plain.endswith(f"state.json cannot be read: {trouble}")


def test_json_holds_everything_but_the_curves(run: WatchedRun) -> None:
    run.gpus(GPU)
    record = json.loads(json.dumps(run.view().as_record()))
    assert record["saves"]["steps_at_risk"] == 100
    assert record["gpus"][0]["temperature_celsius"] == 66
    assert not {"steps", "validations"} & set(record)


def numbers(found: RunView) -> list[int]:
    return [point.step for point in found.steps]


@pytest.mark.parametrize("recent_only", [False, True])
def test_a_reader_follows_what_is_written(tmp_path: Path, recent_only: bool) -> None:
    run = new_run(tmp_path)
    reader = RunReader(run.folder, recent_only=recent_only)
    found = reader.read(NOW)
    assert (numbers(found), found.state, found.mirror) == ([], None, None)
    assert found.status == "starting"
    run.metrics([10, 20], last=20)
    run.state(step=20, status="training")
    run.mirror(waiting=[5, 7], last_error="503", heartbeat=12.0, drained=1)
    found = reader.read(NOW)
    assert found.state is not None
    assert (numbers(found), found.state["step"]) == ([10, 20], 20)
    mirror = found.mirror
    assert mirror is not None
    assert (mirror.waiting, mirror.last_error, mirror.heartbeat, mirror.drained) == (
        *(2, "503", 12.0, True),
    )
    # A file that cannot be read leaves what was known.
    for name in ("state", "mirror"):
        (run.folder / f"{name}.json").write_text("{half")
    found = reader.read(NOW)
    assert found.state_trouble is not None
    assert found.state is not None
    assert (found.state["step"], found.mirror) == (20, mirror)
    # Training goes back: what lies beyond belongs to another branch.
    run.metrics([10, 15], last=15)
    assert numbers(reader.read(NOW)) == [10, 15]


def test_only_the_end_of_a_long_metrics_file_is_read_for_alarms(tmp_path: Path) -> None:
    def log(steps: Iterable[int]) -> None:
        run.metrics(list(steps), last=3000)

    run = new_run(tmp_path)
    log(range(1, 3000))
    file = run.folder / "logs" / "training_metrics.jsonl"
    assert file.stat().st_size > 2 * METRICS_BYTES
    reader = RunReader(run.folder, recent_only=True)
    assert numbers(reader.read(NOW)) == list(range(3000 - RECENT_STEPS, 3000))
    log([3000])
    assert numbers(reader.read(NOW)) == list(range(3001 - RECENT_STEPS, 3001))
