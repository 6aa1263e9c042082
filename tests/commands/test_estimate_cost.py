"""What a run will take, from its settings, and what it has taken, from its files."""

import functools
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.trained_run import RUN, write_run, write_settings
from evaluate.core_bundle import write_bundle
from ranks import ROOT

from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.commands.main import run_command
from refocused.commands.run_measured import measure
from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, START_UP_SECONDS
from refocused.evaluate.core import read_bundle

main = functools.partial(run_command, "estimate_cost")
MEASURED = ("--measured", "one", "--per-hour", "36", "--budget", "18")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of its own, the current one: a run below it is found by its name."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def estimated(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_a_run_by_hand(capsys):
    settings = ["checkpoint.mirror=gs://bucket/runs", "run.steps=20000"]
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", *settings)
    # 24 blocks of width 1536 and GPT-2's 50,257 ids: 6 N and 12 L D T FLOPs a token
    flops = 6 * (24 * 12 * 1536**2 + 50_257 * 1536) + 12 * 24 * 1536 * 2048
    likely, seconds = found["scenarios"][1], sum(found["step_seconds"].values())
    speeds = [pace * 2**20 / seconds for pace in (0.75, 1, 1.25)]
    assert [one["tokens_per_second"] for one in found["scenarios"]] == pytest.approx(speeds)
    assert likely["mfu_fraction"] == pytest.approx(speeds[1] * flops / (8 * 989.4e12))
    save = 12 * (760_300_032 + 47 * 1536)  # a parameter, with the padding to 50,304 rows
    assert found["parameters"]["total"] == 760_300_032
    assert found["storage_bytes"]["checkpoint"] == save
    seconds = 20_000 * 2**20 / speeds[1] + likely["validation_seconds"]
    seconds += 20 * save / DISK_BYTES_PER_SECOND + START_UP_SECONDS
    assert likely["hours"] == pytest.approx(seconds / 3600)
    assert likely["cost_usd"] == pytest.approx(seconds / 3600 * 24)
    assert found["storage_bytes"]["mirror"] == 20 * save
    assert found["total_flops"] == 20_000 * 2**20 * flops
    assert found["fits"] is True
    reach = estimated(capsys, "--config", RUN, "--per-hour", "24", "--budget", "400")
    steps = reach["scenarios"][1]["affordable_steps"]
    within, beyond = (
        estimated(capsys, "--config", RUN, "--per-hour", "24", f"run.steps={number}")
        for number in (steps, steps + 1)
    )
    assert within["scenarios"][1]["cost_usd"] <= 400 < beyond["scenarios"][1]["cost_usd"]


def test_the_vocabulary_decides_parameters_and_the_bytes_of_a_token(capsys):
    found = estimated(capsys, "--config", RUN, "model.vocabulary=100000", "data.tokenizer=unknown")
    assert found["parameters"]["total"] == 760_300_032 + (100_000 - 50_257) * 1536
    assert found["storage_bytes"]["data"] == 4 * found["tokens"]  # ids above 65,535 take four bytes


def test_tasks_and_samples_are_counted(capsys):
    item = {"ctx": "c" * 20, "endings": ["e" * 11, "f" * 31], "label": 0}
    Path("mine.jsonl").write_text(f"{json.dumps(item)}\n" * 7)
    settings = ["run.steps=20000", "evaluation.tasks=[mine.jsonl]", "evaluation.task_interval=6000"]
    settings += ["evaluation.task_items=5", "evaluation.sample_prompt=Once upon"]
    settings += ["evaluation.sample_interval=4000", "evaluation.sample_tokens=100"]
    work = estimated(capsys, "--config", RUN, *settings, "data.tokenizer=hub:any/model")["work"]
    assert work["task_tokens"] == 5 * (8 + 13)  # 32 and 52 bytes, four to a token
    assert (work["task_rounds"], work["samples"]) == (4, 6)
    # 24 layers under ZeRO-3: the host needs 1.7 ms for each
    assert work["host_seconds"] == pytest.approx(24 * 1.7e-3)
    bytewise = estimated(capsys, "--config", RUN, *settings, "data.tokenizer=bytes")
    assert bytewise["work"]["task_tokens"] == 5 * (32 + 52)
    Path("mine.jsonl").write_text("{}\n")
    assert main(["--config", RUN, *settings, "data.tokenizer=hub:any/model"]) == 1
    assert "mine.jsonl:1: it has no list of texts `endings`" in capsys.readouterr().err


def test_the_bundle_of_core_is_counted(capsys, tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    settings = [f"evaluation.tasks=[core={bundle.parent}, gone.jsonl]", "evaluation.task_items=6"]
    tasks = estimated(capsys, "--config", RUN, *settings, "data.tokenizer=bytes")["tasks"]
    texts = [
        text
        for task in read_bundle(bundle, limit=6)
        for prompts in task.scored_prompts()
        for text in prompts
    ]
    (counted,) = tasks["counted"]
    assert list(counted.values()) == ["core", 5 * 6, sum(map(len, texts))]
    assert tasks["missing"] == ["gone.jsonl"]


def test_offers_are_of_the_same_gpu_and_the_cheapest_comes_first(capsys):
    found = estimated(capsys, "--config", RUN, "--gpus", "4")
    assert {offer["gpu"] for offer in found["offers"]} == {"H100 SXM"}
    costs = [offer["cost_usd"] for offer in found["offers"]]
    assert costs == sorted(costs)
    whole = next(offer for offer in found["offers"] if offer["gpus"] == 8)
    assert whole["all_per_hour_usd"] == whole["per_hour_usd"]  # four of eight are paid in full


def test_a_sweep_keeps_the_price_of_a_gpu_and_names_what_cannot_be(capsys):
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", "--sweep", "gpus=1,3,16")
    one, three, sixteen = found["sweep"]
    assert (one["per_hour_usd"], sixteen["per_hour_usd"]) == (3.0, 48.0)
    times = [1 * one["scenarios"][1]["hours"], 16 * sixteen["scenarios"][1]["hours"]]
    assert times[0] < times[1] < 1.3 * times[0]  # two machines pass weights over a network
    assert "not a multiple" in three["refused"]


def test_a_sweep_compares_stages_and_says_where_hpz_pays(capsys, monkeypatch):
    sweep = ["--per-hour", "24", "--sweep", "gpus=8,64"]

    def at_64():
        here, there = estimated(capsys, "--config", "gpt2_1b_8xh100", *sweep)["sweep"]
        assert [one["zero_stage"] for one in here["by_zero"]] == [1, 2, 3]  # no second node
        by = {(one["zero_stage"], one["zero_partition"]): one for one in there["by_zero"]}
        return there, by

    there, by = at_64()
    assert there["machines"] == 8 and {1, 2, 3} == {stage for stage, _ in by}
    assert by[3, "node"]["memory_bytes"]["peak"] > by[3, "world"]["memory_bytes"]["peak"]
    even = there["hpz_pays_below_bytes_per_second"]
    for rate, pays in ((0.9, True), (1.1, False)):
        monkeypatch.setattr("refocused.estimate.step_time.NETWORK_BYTES_PER_SECOND", rate * even)
        seconds = [
            sum(one["step_seconds"].values())
            for one in (at_64()[1][3, kind] for kind in ("node", "world"))
        ]
        assert (seconds[0] < seconds[1]) is pays


def test_a_step_that_does_not_fit_comes_with_settings_that_do(capsys):
    crowded = ["--config", RUN, "batch.micro_batch_size=64", "--gpu", "L4"]
    assert main([*crowded, "--json"]) == 3
    fix = json.loads(capsys.readouterr().out)["fix"]
    (settings,) = re.findall(r"^A step does not fit .* It fits with: (.*)$", fix)
    assert main([*crowded, *settings.split()]) == 0


def test_neither_help_nor_an_estimate_imports_torch():
    script = (
        "import sys\n"
        "from refocused.commands.main import run_command\n"
        f"assert run_command('estimate_cost', ['--config', {RUN!r}, '--sweep', 'gpus=1,2']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_a_stopped_run_by_hand_over_a_rewind(here, capsys):
    write_run(here, "stopped")
    found = estimated(capsys, *MEASURED)
    assert (found["sessions"], found["step_seconds"]) == (2, 2.0)
    assert found["seconds_left"] == 1100.0  # as it expected at its last line
    assert found["cost_left_usd"] == pytest.approx(11.0)
    assert found["cost_usd"] == pytest.approx(13.0)
    assert found["usd_per_million_tokens"] == pytest.approx(13.0 / 500)
    assert found["total_usd"] == pytest.approx(24.0)
    assert found["budget_step"] == 500 + int(500 * 5 / 11)
    # 960 s for 480 steps, of which 80 were lost; 220 s for 100 steps more; 08:00:00 to 08:33:40
    assert found["goodput_fraction"] == pytest.approx((960 * 400 / 480 + 220) / 2020)


def test_a_run_that_trains_has_used_the_time_since_its_last_line(here):
    run = write_run(here, "training")
    now = 1_795_338_000.0 + 100  # 2026-11-22T09:00:00Z and a hundred seconds
    found = measure(run, per_hour_usd=None, budget_usd=None, now=now).as_record()
    assert found["seconds_left"] == 1000.0
    assert found["ends"] == now + 1000.0
    assert [found[name] for name in ("cost_usd", "cost_left_usd", "budget_step")] == [None] * 3


def test_what_a_crashed_run_has_left_counts_from_its_checkpoint(here, capsys):
    gone = {"host": socket.gethostname(), "pid": 2**22 + 1}  # no process has such a pid
    run = write_run(here, "training", step=400, **gone)
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"step": 500}))
    found = estimated(capsys, *MEASURED)
    # What was left at its last line, and 100 steps again
    assert (found["status"], found["step"], found["resumes_from"]) == ("crashed", 500, 400)
    assert found["seconds_left"] == 1100.0 + 100 * 2.0
    assert found["budget_step"] == 400 + int(600 * 5 / (found["seconds_left"] / 100))
    (run / "checkpoints" / "checkpoint_step_400" / MANIFEST).unlink()
    assert main(["--measured", "one"]) == 0
    assert "if resumed now from the start\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "step", "budget", "answer"),
    [
        ("finished", 1000, "60", "sufficient"),
        ("finished", 1000, "20", "exceeded by $30.00"),
        ("stopped", 500, "49", "exceeded by $1.00"),
        ("stopped", 500, "50", "reached at step 500"),
    ],
)
def test_what_a_run_cost_and_a_budget_was_good_for(here, capsys, status, step, budget, answer):
    write_settings(write_run(here, status, step=step, cost_usd=50.0), "cost.per_hour_usd=36")
    assert main(["--measured", "one", "--per-hour", "72"]) == 0  # for the time so far, too
    assert "in 2 sessions, $26.00, $0.0520 a million tokens" in capsys.readouterr().out
    assert main(["--measured", "one", "--budget", budget]) == 0
    text = capsys.readouterr().out
    assert f": {answer}\n" in text
    assert "in 2 sessions, $50.00, $0.1000 a million tokens" in text
    assert ("left  " in text) == (status == "stopped")


def test_epochs_are_the_tokens_of_the_data(here, capsys):
    (here / "tokens").mkdir()
    np.save(here / "tokens" / "a.npy", np.arange(64_001, dtype=np.uint16) % 100)
    given = ("--config", "demo", "data.source=tokens", "data.validation_files=[]")
    given += ("model.sequence_length=64", "batch.micro_batch_size=2", "batch.global_batch_size=16")
    work = estimated(capsys, *given, "data.validation_fraction=0.1", "run.epochs=1.5")["work"]
    steps = math.ceil(1.5 * 900 / 16)  # of 1,000 sequences, 900 to train
    assert (work["steps"], work["tokens"]) == (steps, steps * 16 * 64)
    # A budget ends the run earlier, and its tokens are then those that the budget buys.
    arguments = (*given, "run.epochs=1e6", "--budget", "9", "--per-hour", "24")
    assert main([*arguments, "--plan", "plan.md"]) == 0
    assert re.search(r"Planned: run[.]tokens=[0-9]+\n", capsys.readouterr().err)


def test_a_plan_for_a_thousand_dollars(capsys):
    def plan(*arguments):
        assert main([*arguments, "--per-hour", "24", "--plan", "plans/plan.md"]) == 0
        printed = capsys.readouterr()
        assert printed.out == "plans/plan.md\n"
        return Path("plans/plan.md").read_text(), printed.err

    llama = ("--config", "llama_1b_8xh100", "--budget", "1000")
    likely = estimated(capsys, *llama, "--per-hour", "24")["scenarios"][1]
    page, warnings = plan(*llama)
    assert not warnings
    assert f"| cost | {likely['hours']:.1f} h and ${likely['cost_usd']:,.2f} at $24.00" in page
    assert "1,048,576 tokens = 20.45 B tokens, 20.1 a parameter |" in page
    dollars, hours = likely["cost_usd"], likely["hours"]
    end = f"| 10 | {hours:.1f} | 20.45 B | {dollars:,.2f} | 2.53 (2.23 to 2.83) | 0.810 |"
    assert end in page and page.count(" B | ") == 10  # 2.53 / ln 2 / 4.5 bits a byte
    assert "2.53 by Besiroglu" in page and "2.57 by Hoffmann" in page
    assert "of this plan suit" not in page and "above its band" in page
    # The formula as printed gives the table: at a tenth the learning rate has hardly decayed.
    formula = page.partition("follows the first: ")[2].partition(" parameters")[0]
    numbers = [float(found.replace(",", "")) for found in re.findall(r"[\d.,]*\d", formula)]
    e, a, alpha, b, beta, n = numbers
    for tenths, share, loss in ((1, 1.0, 3.05), (10, 0.1, 2.53)):
        fitted = e + a / n**alpha + b / (tenths * 20.447e8) ** beta + 0.06 * (share - 0.1)
        assert fitted == pytest.approx(loss, abs=0.006)
    assert "plus 0.06 times the learning rate's share of its peak above 0.1" in page
    assert "| assumed | a start-up of 180 s, saves at 2.0 GB/s; only the machine is counted" in page
    # The rest of the money: all of it would pay for so many steps, and not for one more.
    steps = int(re.search("pays for ([0-9,]+) steps", page)[1].replace(",", ""))
    for number, is_paid in ((steps, True), (steps + 1, False)):
        (cost,) = estimated(capsys, *llama[:2], "--per-hour", "24", f"run.steps={number}")[
            "scenarios"
        ][1:2]
        assert (cost["cost_usd"] <= 1000) is is_paid
    # The guide shows the page as it is.
    mirrored, _ = plan(*llama, "checkpoint.mirror=data/mirror")
    assert f"```text\n{mirrored}```" in (ROOT / "docs/guides/eight_gpus.md").read_text()
    # A run that costs more is shortened, and its tokens suit a larger model.
    page, warnings = plan("--config", "gpt2_1b_8xh100_fast", "--budget", "500")
    assert re.search("budget ends before step 100,000. Planned: run.steps=[0-9]{5}", warnings)
    assert "of this plan suit a larger model" in page
    cost = re.search("[|] cost [|] [0-9.]+ h and [$]([0-9.]+) at", page)
    assert 499 < float(cost[1]) <= 500
    # So is one whose length is given in tokens, which stay the name of its length.
    _, warnings = plan(*llama[:2], "--budget", "100", "run.tokens=20000000000")
    assert re.search(r"Planned: run[.]tokens=8[0-9]{9}\n", warnings)
    # Bytes are no tokens of a fit: hours and dollars without a loss.
    page, _ = plan("--config", "demo", "--budget", "1000")
    assert "No loss is given: the fits hold for attention, 50 M" in page and "The fit" not in page
    assert "The table follows" not in page and "band" not in page.partition("When to abort")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--per-hour 24", "--plan needs a budget and a price"),
        ("--budget 1000", "--plan needs a budget and a price"),
        ("--budget 1 --per-hour 24", "does not pay for the start, one step and its checkpoint"),
        ("--budget 1000 --per-hour 24 run.device=cpu", "--plan needs GPUs"),
        ("--budget 1000 --per-hour 24 --gpu Voodoo", "'Voodoo' is not a known GPU"),
        ("--budget 1000 --per-hour 24 --json", "--json has no effect with --plan"),
        ("--budget 1000 --per-hour 24 --plan .", ".: Is a directory"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_sentence(capsys, arguments, message):
    assert main(["--config", "demo", "--plan", "plan.md", *arguments.split()]) != 0
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("error:") == 1
    assert not Path("plan.md").exists()
