from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refocused.checkpoints.manifest import MANIFEST
from refocused.commands.estimate_cost import main
from refocused.config.decode import load_run, render_run
from refocused.config.prices import read_prices
from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, START_UP_SECONDS
from refocused.monitoring.performance import PERFORMANCE_FILE
from refocused.process_identity import this_process

RUN = "gpt2_1b_8xh100_fast"
TOKENIZER = "data.tokenizer=hub:any/model"


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["checkpoint.mirror=gs://bucket/runs", "run.steps=20000"]
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", *settings)
    # 24 blocks of width 1536 and 50,000 tokens: 6 N and 12 L D T FLOPs a token
    flops = 6 * (24 * 12 * 1536**2 + 50_000 * 1536) + 12 * 24 * 1536 * 2048
    speeds = [share * 8 * 989.4e12 / flops for share in (0.3, 0.4, 0.5)]
    likely = found["scenarios"][1]
    assert [one["tokens_per_second"] for one in found["scenarios"]] == pytest.approx(speeds)
    seconds = 20_000 * 2**20 / speeds[1]
    seconds += 20 * 256 * 2048 / 3 / speeds[1]
    seconds += 20 * likely_save(found) / DISK_BYTES_PER_SECOND + START_UP_SECONDS
    assert likely["hours"] == pytest.approx(seconds / 3600)
    assert likely["cost_usd"] == pytest.approx(seconds / 3600 * 24)
    assert found["storage_bytes"]["mirror"] == 20 * likely_save(found)
    assert found["total_flops"] == 20_000 * 2**20 * flops
    assert found["fits"] is True


def likely_save(found: dict[str, Any]) -> int:
    """Twelve bytes a parameter, with the padding to 50,048 rows."""
    assert found["parameters"]["total"] == 759_905_280
    assert found["storage_bytes"]["checkpoint"] == 12 * (759_905_280 + 48 * 1536)
    return 12 * (759_905_280 + 48 * 1536)


def write_tasks(file: Path, *, items: int) -> str:
    """Write items of 20 bytes of context and two endings of 11 and 31, each behind a space."""
    item = {"ctx": "c" * 20, "endings": ["e" * 11, "f" * 31], "label": 0}
    file.write_text(f"{json.dumps(item)}\n" * items)
    return str(file)


def test_tasks_and_samples_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tasks(tmp_path / "mine.jsonl", items=7)
    settings = ["run.steps=20000", f"evaluation.tasks=['{file}']", "evaluation.task_interval=6000"]
    settings += ["evaluation.task_items=5", "evaluation.sample_prompt=Once upon"]
    settings += ["evaluation.sample_interval=4000", "evaluation.sample_tokens=100", TOKENIZER]
    plain = estimated(capsys, "--config", RUN, "run.steps=20000")["scenarios"][1]
    found = estimated(capsys, "--config", RUN, *settings)
    likely, work = found["scenarios"][1], found["work"]
    # 32 and 52 bytes, four to a token
    assert work["task_tokens"] == 5 * (8 + 13)
    assert (work["task_rounds"], work["samples"]) == (4, 5)
    assert likely["task_seconds"] == pytest.approx(4 * 105 / 3 / likely["tokens_per_second"])
    # 24 layers under ZeRO-3: the host needs 1.7 ms for each
    assert likely["sample_seconds"] == pytest.approx(5 * 100 * 24 * 1.7e-3)
    more = likely["task_seconds"] + likely["sample_seconds"]
    assert likely["hours"] * 3600 == pytest.approx(plain["hours"] * 3600 + more)
    assert main(["--config", RUN, *settings]) == 0
    text = capsys.readouterr().out
    assert "4 x tasks (mine 5 items; about 105 tokens); 5 x a sample of 100 tokens" in text
    bytewise = estimated(capsys, "--config", RUN, *settings[:-1], "data.tokenizer=bytes")
    assert bytewise["work"]["task_tokens"] == 5 * (32 + 52)


def test_tasks_whose_files_are_elsewhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tasks(tmp_path / "mine.jsonl", items=1)
    tasks = f"evaluation.tasks=['{file}','piqa=elsewhere/piqa.jsonl']"
    assert main(["--config", RUN, tasks, TOKENIZER]) == 0
    text = capsys.readouterr().out
    assert "LEFT OUT, as the file is not here: piqa=elsewhere/piqa.jsonl\n" in text
    assert estimated(capsys, "--config", RUN, tasks, TOKENIZER)["tasks"]["missing"] == [
        "piqa=elsewhere/piqa.jsonl"
    ]
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert main(["--config", RUN, tasks, TOKENIZER]) == 1
    assert "mine.jsonl:1: it has no text `ctx`" in capsys.readouterr().err


def test_the_days_of_the_prices_are_told_and_that_nobody_checked_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prices = read_prices()
    days = sorted(one.looked_up for one in prices.machines if one.gpu == "H100 SXM")
    assert main(["--config", RUN, "--per-hour", "24"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("prices"))
    assert "TO BE CHECKED, from config/prices.yaml" in line
    assert f"{prices.bucket.provider} looked up {prices.bucket.looked_up}" in line
    assert f"machines below looked up {days[0]} to {days[-1]}" in line
    assert main(["--config", RUN, "--gpu", "L4"]) == 0
    assert "TO BE CHECKED" in (text := capsys.readouterr().out)
    assert "no machine with L4" in text
    found = estimated(capsys, "--config", RUN)["prices"]
    assert found["to_be_checked"] is True
    assert found["bucket"]["looked_up"] == str(prices.bucket.looked_up)


def test_a_sweep_keeps_the_price_of_a_gpu_and_names_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", "--sweep", "gpus=1,3,16")
    one, three, sixteen = found["sweep"]
    assert (one["per_hour_usd"], sixteen["per_hour_usd"]) == (3.0, 48.0)
    assert one["scenarios"][1]["training_seconds"] == pytest.approx(
        16 * sixteen["scenarios"][1]["training_seconds"]
    )
    assert "not a multiple" in three["refused"]


def test_a_budget_says_how_far_it_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", RUN, "--per-hour", "24", "--budget", "400"]
    found = estimated(capsys, *arguments)
    reach = found["scenarios"][1]["affordable_steps"]
    within = estimated(capsys, *arguments, f"run.steps={reach}")["scenarios"][1]
    beyond = estimated(capsys, *arguments, f"run.steps={reach + 1}")["scenarios"][1]
    assert within["cost_usd"] <= 400 < beyond["cost_usd"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"budget $400.00 at 40% MFU: step {reach:,} of 100,000" in text
    assert main([*arguments, "run.steps=3000"]) == 0
    assert "at 40% MFU: all steps, $36" in capsys.readouterr().out


def test_offers_are_of_the_same_gpu_and_the_cheapest_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimated(capsys, "--config", RUN, "--gpus", "4")
    assert found["per_hour_usd"] is None
    assert {offer["gpu"] for offer in found["offers"]} == {"H100 SXM"}
    costs = [offer["cost_usd"] for offer in found["offers"]]
    assert costs == sorted(costs)
    whole = next(offer for offer in found["offers"] if offer["gpus"] == 8)
    assert whole["all_per_hour_usd"] == whole["per_hour_usd"]  # four of eight are paid in full
    assert main(["--config", RUN]) == 0
    text = capsys.readouterr().out
    assert "TO BE CHECKED" in text and "no price: give --per-hour" in text


def test_a_step_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", RUN, "batch.micro=64", "--gpu", "L4"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


def test_passes_too_short_for_the_host_are_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimated(capsys, "--config", RUN)["host_bound"] is False
    # 113 ms for 4 windows of 2,048: a single one of 512 takes 7 ms, and 24 layers 41 ms of Python.
    short = ["model.sequence_length=512", "batch.micro=1"]
    assert estimated(capsys, "--config", RUN, *short)["host_bound"] is True
    assert main(["--config", RUN, *short]) == 0
    assert "less than the host needs for 24 layers under ZeRO-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "either --config FILE or --measured RUN"),
        (["--config", RUN, "--measured", "x"], "either --config FILE or --measured RUN"),
        (["--config", RUN, "--gpu", "H900"], "Known are A100 40GB"),
        (["--config", RUN, "--sweep", "gpus=1,two"], "numbers of GPUs are wanted"),
        (["--config", RUN, "--gpus", "3"], "not a multiple"),
        (["--measured", "nowhere"], "there is no such folder"),
        (["--measured", "one", "--gpus", "4"], "no settings, --gpus, --gpu or --sweep"),
        (["--measured", "one", "--gpu", "H200"], "no settings, --gpus, --gpu or --sweep"),
    ],
)
def test_wrong_use_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    assert main(arguments) == 2
    assert wanted in capsys.readouterr().err


def test_neither_help_nor_an_estimate_imports_torch() -> None:
    script = (
        "import sys\n"
        "from refocused.commands.estimate_cost import main\n"
        f"assert main(['--config', {RUN!r}, '--sweep', 'gpus=1,2']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def write_run(folder: Path, status: str, **changes: object) -> Path:
    """A run of 1,000 steps of two seconds, at step 500 after a rewind from 480 to 400."""
    run = folder / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    settings = ["run.steps=1000", "checkpoint.interval=100", "evaluation.interval=250"]
    settings.append("schedule.warmup_steps=10")
    (run / "run.yaml").write_text(render_run(load_run(RUN, settings, name="one").config))
    process = this_process()
    state = {
        "run": "one",
        "status": status,
        "host": "elsewhere",
        "pid": process.pid,
        "pid_started": process.started,
        "updated": "2026-11-22T09:00:00.000Z",
        "step": 500,
        "total_steps": 1000,
        "tokens": 500_000_000,
        "seconds": 1300.0,
        "cost_usd": None,
    }
    (run / "state.json").write_text(json.dumps(state | changes))
    saved = run / "checkpoints" / f"checkpoint_step_{(state | changes)['step']}"
    saved.mkdir(parents=True)
    (saved / MANIFEST).touch()
    (run / PERFORMANCE_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in time_lines()))
    validation = {"kind": "validation", "step": 250, "seconds": 20.0}
    (run / "logs" / "training_metrics.jsonl").write_text(f"{json.dumps(validation)}\n")
    return run


def time_lines() -> list[dict[str, Any]]:
    def line(kind: str, at: str, step: int, first: int = 0, **uses: float) -> dict[str, Any]:
        seconds = {f"{name}_seconds": value for name, value in uses.items()}
        moment = f"2026-11-22T{at}.000Z"
        return {"kind": kind, "time": moment, "step": step, "first_step": first, **seconds}

    return [
        line("session", "08:01:00", 0, start_up=60),
        line("time", "08:18:00", 480, 0, forward_backward=900, update=60, save_stall=60),
        line("save", "08:18:00", 400, save_stall=12),
        line("session", "08:30:00", 400, start_up=40),
        line("time", "08:30:40", 410, 400, forward_backward=40),
        line("time", "08:33:40", 500, 410, forward_backward=170, update=10),
    ]


def test_a_stopped_run_by_hand_over_a_rewind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "stopped")
    monkeypatch.chdir(tmp_path)
    found = estimated(capsys, "--measured", "one", "--per-hour", "36", "--budget", "18")
    assert (found["sessions"], found["step_seconds"]) == (2, 2.0)
    # 500 steps, validations at 750 and 1,000, saves at 600 to 1,000
    assert found["seconds_left"] == 500 * 2.0 + 2 * 20.0 + 5 * 12.0
    assert found["cost_left_usd"] == pytest.approx(11.0)
    assert found["cost_usd"] == pytest.approx(13.0)
    assert found["usd_per_million_tokens"] == pytest.approx(13.0 / 500)
    assert found["total_usd"] == pytest.approx(24.0)
    assert found["budget_step"] == 500 + int(500 * 5 / 11)
    # 960 s for 480 steps, of which 80 were lost; 220 s for 100 steps more; 08:00:00 to 08:33:40
    assert found["goodput_fraction"] == pytest.approx((960 * 400 / 480 + 220) / 2020)
    assert main(["--measured", "one", "--per-hour", "36"]) == 0
    text = capsys.readouterr().out
    assert "left       18.3 min, $11.00, ends" in text
    assert "if it goes on now from checkpoint 500\n" in text
    assert "2 s a step, 500,000 tokens/s, 20 s a validation, 12 s a save" in text


def test_a_run_that_trains_has_used_the_time_since_its_last_line(tmp_path: Path) -> None:
    from refocused.commands.run_measured import measure

    run = write_run(tmp_path, "training")
    now = 1_795_338_000.0 + 100  # 2026-11-22T09:00:00Z and a hundred seconds
    found = measure(run, per_hour_usd=None, budget_usd=None, now=now)
    assert found.seconds_left == 1000.0
    assert found.ends == now + 1000.0
    assert (found.cost_usd, found.cost_left_usd, found.budget_step) == (None, None, None)


def test_a_run_whose_process_is_gone_has_crashed(tmp_path: Path) -> None:
    import socket

    from refocused.commands.run_measured import measure

    run = write_run(tmp_path, "training", host=socket.gethostname(), pid=2**22 + 1)
    assert measure(run, per_hour_usd=1.0, budget_usd=None, now=0.0).status == "crashed"


def test_samples_of_a_run_are_measured_too(tmp_path: Path) -> None:
    from refocused.commands.run_measured import measure

    run = write_run(tmp_path, "stopped")
    before = measure(run, per_hour_usd=None, budget_usd=None, now=0.0).seconds_left
    settings = ["run.steps=1000", "checkpoint.interval=100", "evaluation.interval=250"]
    settings += ["schedule.warmup_steps=10", TOKENIZER, "evaluation.sample_prompt=Once"]
    settings += ["evaluation.sample_interval=200"]
    (run / "run.yaml").write_text(render_run(load_run(RUN, settings, name="one").config))
    event = {"kind": "sample", "step": 200, "text": "Once", "seconds": 7.0}
    (run / "logs" / "events.jsonl").write_text(f"{json.dumps(event)}\n")
    after = measure(run, per_hour_usd=None, budget_usd=None, now=0.0).seconds_left
    assert before is not None and after == before + 2 * 7.0  # after 600 and 800


def test_what_a_crashed_run_has_left_counts_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    gone = {"host": socket.gethostname(), "pid": 2**22 + 1}
    run = write_run(tmp_path, "training", step=400, **gone)
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"step": 500}))
    monkeypatch.chdir(tmp_path)
    found = estimated(capsys, "--measured", "one", "--per-hour", "36", "--budget", "18")
    # 600 steps, validations at 500, 750 and 1,000, saves at 500 to 1,000
    assert (found["step"], found["resumes_from"]) == (500, 400)
    assert found["seconds_left"] == 600 * 2.0 + 3 * 20.0 + 6 * 12.0
    assert found["budget_step"] == 400 + int(600 * 5 / (found["seconds_left"] / 100))
    (run / "checkpoints" / "checkpoint_step_400" / MANIFEST).unlink()
    assert main(["--measured", "one"]) == 0
    assert "if it goes on now from the start\n" in capsys.readouterr().out


def test_a_finished_run_tells_what_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "finished", step=1000, tokens=1_000_000_000, cost_usd=50.0)
    monkeypatch.chdir(tmp_path)
    assert main(["--measured", "one"]) == 0
    text = capsys.readouterr().out
    assert "step 1,000 of 1,000, 1.00 B tokens, finished" in text
    assert "in 2 sessions, $50.00, $0.0500 a million tokens" in text
    assert "goodput" in text and "left" not in text


def test_without_a_price_times_are_told_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "stopped")
    monkeypatch.chdir(tmp_path)
    assert main(["--measured", "one", "--budget", "5"]) == 0
    text = capsys.readouterr().out
    assert "in 2 sessions, price unknown: name it by --per-hour" in text
    assert "left       18.3 min, ends" in text
    assert "budget     $5.00: how far it reaches is seen with --per-hour" in text


@pytest.mark.parametrize(
    ("status", "step", "budget", "answer"),
    [
        ("finished", 1000, "60", "enough"),
        ("finished", 1000, "20", "spent, and $30.00 more than that"),
        ("stopped", 500, "49", "spent, and $1.00 more than that"),
        ("stopped", 500, "50", "ends at step 500"),
    ],
)
def test_what_a_budget_was_good_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    step: int,
    budget: str,
    answer: str,
) -> None:
    write_run(tmp_path, status, step=step, cost_usd=50.0)
    monkeypatch.chdir(tmp_path)
    assert main(["--measured", "one", "--per-hour", "36", "--budget", budget]) == 0
    assert f": {answer}\n" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["", "[1]", "\x00", '{"step": 3'])
def test_a_state_that_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    (tmp_path / "state.json").write_text(state)
    assert main(["--measured", str(tmp_path)]) == 1
    assert f"{tmp_path}/state.json cannot be read: it is " in capsys.readouterr().err


@pytest.mark.parametrize("state", [None, "{}", '{"step": 3}'])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str | None
) -> None:
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    assert main(["--measured", str(tmp_path)]) == 1
    assert "state.json is missing or not a run's" in capsys.readouterr().err
    assert main(["--measured", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("--measured nowhere: there is no such folder")
