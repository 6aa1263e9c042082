from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from monitor.watched_run import GPU, NOW, STEP_SECONDS, iso, new_run

from refocused.monitor.run_status import RunView
from refocused.monitor.screen.dashboard_gpus import gpu_trouble
from refocused.monitor.screen.dashboard_words import tokens_text
from refocused.monitor.screen.run_lines import all_lines, run_rows


def printed(view: RunView) -> str:
    return "\n".join(line.plain for line in all_lines(view, now=NOW, events=5))


def test_time_and_money_of_a_live_run_go_on_since_its_last_line(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    view = run.follower().view(now=NOW)
    assert (view.status, view.step, view.is_live) == ("training", 1000, True)
    assert view.seconds_trained == pytest.approx(1500 + 10)
    assert view.cost_usd == pytest.approx(20 + 10 * 36 / 3600)
    assert view.seconds_left == pytest.approx(1000 * STEP_SECONDS - 10)
    assert view.cost_left_usd == pytest.approx(1490 * 36 / 3600)
    assert view.ends == pytest.approx(NOW + 1490)
    assert view.progress_fraction == 0.5


def test_those_of_a_run_that_ended_stand_still(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(step=2000, status="finished", age=86400.0, exit_code=0)
    view = run.follower(alive=False).view(now=NOW)
    assert (view.status, view.exit_code) == ("finished", 0)
    assert (view.seconds_trained, view.cost_usd) == (3000, 20.0)
    assert (view.seconds_left, view.ends) == (None, None)


def test_a_run_that_says_it_trains_and_is_gone_has_crashed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(age=3600.0)
    view = run.follower(alive=False).view(now=NOW)
    assert view.status == "crashed"
    assert view.cost_usd == 20.0  # a dead run costs no more
    assert view.ends is None


@pytest.mark.parametrize("status", ["training", "failed", "stopped"])
def test_what_is_left_of_a_run_that_ended_early_counts_from_its_checkpoint(
    tmp_path: Path, status: str
) -> None:
    run = new_run(tmp_path)
    run.begin(status=status, age=3600.0)
    view = run.follower(alive=False).view(now=NOW)
    assert view.resumes_from == 900
    # 1,000 steps were left at the last line, and 100 are lost
    assert view.seconds_left == pytest.approx(1100 * STEP_SECONDS)
    assert view.cost_left_usd == pytest.approx(1100 * STEP_SECONDS * 36 / 3600)
    assert "left 27.5 min $16.50 from checkpoint 900 on" in printed(view)
    assert "lost 100 steps = 2.5 min" in printed(view)


def test_a_crashed_run_goes_on_from_what_only_the_mirror_has_or_anew(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    for saved in (run.folder / "checkpoints").iterdir():
        saved.rmdir()
    view = run.follower(alive=False).view(now=NOW)
    assert view.seconds_left == pytest.approx(2000 * STEP_SECONDS)
    assert "from the start on" in printed(view)
    (run.folder / "mirror.json").write_text(json.dumps({"bucket": "gs://b", "mirrored": [800]}))
    view = run.follower(alive=False).view(now=NOW)
    assert (view.resumes_from, view.seconds_left) == (800, pytest.approx(1200 * STEP_SECONDS))


def test_a_crash_before_a_sessions_first_line_leaves_what_the_last_one_left(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(just_begun=True)
    view = run.follower(alive=False).view(now=NOW)
    assert view.last_step is None
    assert view.seconds_left == pytest.approx(1100 * STEP_SECONDS)


@pytest.mark.parametrize(("age", "status"), [(119.0, "training"), (121.0, "silent")])
def test_a_run_is_silent_when_the_alarm_would_say_so(
    tmp_path: Path, age: float, status: str
) -> None:
    run = new_run(tmp_path)
    run.begin()
    assert run.follower().view(now=NOW - 10 + age).status == status


def test_a_session_may_take_its_time_for_its_first_line(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(just_begun=True, session_began=iso(NOW - 10))
    assert run.follower().view(now=NOW - 10 + 1799).status == "training"
    assert run.follower().view(now=NOW - 10 + 1801).status == "silent"


def test_after_the_last_step_no_line_is_waited_for(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(step=2000)
    assert run.follower().view(now=NOW + 3600).status == "training"


def test_before_a_sessions_first_line_the_earlier_speed_is_not_shown(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(just_begun=True)
    view = run.follower().view(now=NOW)
    assert view.last_step is None
    assert view.seconds_left is None
    assert len(view.steps) == 100  # the curves are there


def test_what_is_at_risk_is_what_came_after_the_last_save(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    saves = run.follower().view(now=NOW).saves
    assert (saves.newest_step, saves.local, saves.steps_at_risk) == (900, 2, 100)
    assert saves.seconds_at_risk == pytest.approx(150)


def test_the_shards_are_what_training_says(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(shards_local=214, shards_total=1774, shards_ready=6)
    view = run.follower().view(now=NOW)
    assert (
        " data 214/1,774 shards local, next 6 ready  1 M tokens trained on"
        in printed(view).splitlines()
    )
    assert view.as_record()["shards"] == {"local": 214, "total": 1774, "ready": 6}
    run.state(step=1000, status="training", shards_total=1774)  # it takes what others fetch
    view = run.follower().view(now=NOW)
    assert view.shards is None
    assert "shards" not in printed(view)


def test_the_mirror_is_what_it_says(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    status = {"bucket": "gs://b", "mirrored": [700, 800], "waiting": [900], "done_bytes": 3}
    status |= {"total_bytes": 4, "failed": {"600": "damaged"}, "last_error": "503"}
    (run.folder / "mirror.json").write_text(json.dumps(status))
    lines = printed(run.follower().view(now=NOW))
    assert "mirror 800, 1 behind (75%), 1 cannot be copied" in lines
    assert " mirror's last error: 503" in lines.splitlines()


def test_alarms_stand_until_they_end_the_critical_ones_first(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    run.alarm(name="gpu_throttle", critical=False)
    run.alarm(name="gpu_lost")
    run.alarm(name="gpu_ecc")
    run.alarm(name="gpu_ecc", raised=False)
    view = run.follower().view(now=NOW)
    assert [alarm.name for alarm in view.alarms] == ["gpu_lost", "gpu_throttle"]
    assert " ALARM  2.0 min  GPU 7: gpu_lost" in printed(view).splitlines()


def test_gpus_are_shown_as_they_were_sampled_last(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    gone = dataclasses.replace(GPU, index=3)
    run.gpus(GPU, gone, age=3600.0)
    hot = dataclasses.replace(GPU, index=1, throttle_reasons=("hw_slowdown", "hw_thermal"))
    lost = dataclasses.replace(GPU, index=2, lost=True)
    run.gpus(dataclasses.replace(GPU, temperature_celsius=70), hot, lost)
    view = run.follower().view(now=NOW)
    assert [gpu.index for gpu in view.gpus] == [0, 1, 2]  # GPU 3 was of an earlier session
    text = printed(view)
    assert "0    97%    48.4/79.6  70 C  640/700  1905/1980  18/18    0" in text
    assert "HW THERMAL" in text
    assert " 2   LOST   fallen off the bus" in text
    assert "CPU 12%  RAM 180/1,800 GiB" in text


def test_without_samples_it_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    assert "no GPU samples" in printed(run.follower().view(now=NOW))


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({}, ""),
        ({"ecc_uncorrected": 2}, "memory errors"),
        ({"remap_pending": True}, "row remap pending"),
        ({"throttle_reasons": ("sw_thermal", "hw_power_brake")}, "POWER BRAKE"),
    ],
)
def test_the_worst_of_a_gpu_is_named(change: dict[str, object], trouble: str) -> None:
    assert gpu_trouble(dataclasses.replace(GPU, **change)) == trouble


def test_damaged_files_cost_only_what_is_damaged(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    run.gpus(GPU)
    for name in ("training_metrics", "events", "gpu_metrics"):
        with (run.folder / "logs" / f"{name}.jsonl").open("ab") as torn:
            torn.write(b'{"kind": "gpu", "host": 3}\n\xff\xfe{"kind": "st')
    (run.folder / "mirror.json").write_bytes(b"\xff{")
    (run.folder / "run.yaml").write_bytes(b"\xff: [")
    view = run.follower().view(now=NOW)
    assert (view.step, len(view.steps), len(view.gpus)) == (1000, 100, 1)
    assert view.mirror is None
    (run.folder / "state.json").write_text('{"step": "many", "status": 3}')
    view = run.follower().view(now=NOW)
    assert view.status == "unknown"
    assert " state.json names no status that is known: 3" in printed(view).splitlines()


@pytest.mark.parametrize(
    ("content", "trouble"),
    [(b"", "it is empty"), (b'{"step": 10', "it is torn, or no JSON object")],
)
def test_a_state_that_cannot_be_read_is_said_and_all_else_is_shown(
    tmp_path: Path, content: bytes, trouble: str
) -> None:
    run = new_run(tmp_path)
    run.begin()
    run.gpus(GPU)
    run.alarm()
    validation = {"kind": "validation", "step": 1000, "validation_loss": 3.05}
    run.line("training_metrics", NOW - 5, validation)
    (run.folder / "run.yaml").write_text("run: {steps: 2000}\n")
    (run.folder / "state.json").write_bytes(content)
    view = run.follower().view(now=NOW)
    assert (view.status, view.is_live, view.has_ended) == ("unknown", False, False)
    lines = printed(view).splitlines()
    assert lines[0] == " one  UNKNOWN  step 1,000/2,000 50.0%"
    assert lines[1] == f" state.json cannot be read: {trouble}"
    assert lines[2].startswith(" loss 3.1000  best val 3.0500 at 1,000  1.5 s/step")
    assert any("ALARM" in line for line in lines)
    assert any("48.4/79.6" in line for line in lines)
    assert run_rows([view])[0].plain.endswith(f"state.json cannot be read: {trouble}")


def test_a_state_that_may_not_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    run.begin()
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "state.json":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read everything
    assert run.follower().view(now=NOW).note == "state.json cannot be read: Permission denied"


def test_a_folder_with_nothing_in_it_is_a_run_that_starts(tmp_path: Path) -> None:
    view = new_run(tmp_path, "new").follower().view(now=NOW)
    assert (view.name, view.status, view.step) == ("new", "starting", 0)
    assert "STARTING" in printed(view)
    assert run_rows([view])[0].plain.startswith(" new  starting  step 0")


def test_old_samples_say_how_old_they_are(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    run.gpus(GPU, age=600.0)
    lines = printed(run.follower().view(now=NOW)).splitlines()
    assert any(line.startswith(" 10.0 min ago: CPU 12%") for line in lines)
    assert any(line.startswith(" GPU util") and line.endswith(" 10.0 min ago") for line in lines)


def test_a_run_that_ended_says_when(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin(age=7200.0)
    text = printed(run.follower(alive=False).view(now=NOW))
    assert text.startswith(" one  CRASHED 2.0 h ago  step 1,000/2,000 50.0%  without a word")


def test_json_holds_everything_but_the_curves(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    run.gpus(GPU)
    record = json.loads(json.dumps(run.follower().view(now=NOW).as_record()))
    assert record["saves"]["steps_at_risk"] == 100
    assert record["gpus"][0]["temperature_celsius"] == 66
    assert not {"steps", "validations"} & set(record)


def test_after_a_rewind_the_curve_is_that_of_the_way_taken(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.begin()
    follower = run.follower()
    follower.view(now=NOW)
    run.metrics([510, 520], last=520, loss=1.0)
    view = follower.view(now=NOW)
    assert [point.step for point in view.steps[-3:]] == [500, 510, 520]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(40_960, "40,960 tokens"), (41_000_000, "41 M tokens"), (43_232_788_480, "43.23 B tokens")],
)
def test_tokens_are_spelled_in_their_unit(tokens: int, words: str) -> None:
    assert tokens_text(tokens) == words
