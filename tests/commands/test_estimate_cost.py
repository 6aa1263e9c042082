"""What a run will take, from its settings, and how the command refuses wrong use."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands.cost_estimates import RUN, TOKENIZER, estimated, main

from refocused.config.prices import read_prices
from refocused.estimate.run_cost import DISK_BYTES_PER_SECOND, START_UP_SECONDS


def test_a_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["checkpoint.mirror=gs://bucket/runs", "run.steps=20000"]
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", *settings)
    # 24 blocks of width 1536 and GPT-2's 50,257 ids: 6 N and 12 L D T FLOPs a token
    flops = 6 * (24 * 12 * 1536**2 + 50_257 * 1536) + 12 * 24 * 1536 * 2048
    likely, seconds = found["scenarios"][1], sum(found["step_seconds"].values())
    speeds = [pace * 2**20 / seconds for pace in (0.75, 1, 1.25)]
    assert [one["tokens_per_second"] for one in found["scenarios"]] == pytest.approx(speeds)
    assert likely["mfu_fraction"] == pytest.approx(speeds[1] * flops / (8 * 989.4e12))
    save = 12 * (760_300_032 + 47 * 1536)  # a parameter, with the padding to 50,304 rows
    assert (found["parameters"]["total"], found["storage_bytes"]["checkpoint"]) == (
        760_300_032,
        save,
    )
    seconds = 20_000 * 2**20 / speeds[1] + likely["validation_seconds"]
    seconds += 20 * save / DISK_BYTES_PER_SECOND + START_UP_SECONDS
    assert likely["hours"] == pytest.approx(seconds / 3600)
    assert likely["cost_usd"] == pytest.approx(seconds / 3600 * 24)
    assert found["storage_bytes"]["mirror"] == 20 * save
    assert found["total_flops"] == 20_000 * 2**20 * flops
    assert found["fits"] is True


def test_the_vocabulary_decides_parameters_and_the_bytes_of_a_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimated(capsys, "--config", RUN, "model.vocabulary=100000", "data.tokenizer=unknown")
    assert found["parameters"]["total"] == 760_300_032 + (100_000 - 50_257) * 1536
    tokens = found["tokens"]
    assert found["storage_bytes"]["data"] == 4 * tokens  # ids above 65,535 take four bytes
    preset = estimated(capsys, "--config", RUN, "data.tokenizer=unknown")
    assert preset["parameters"]["total"] == 759_905_280
    missing = ["data.bpe_folder=nowhere", "data.tokenizer=gpt2"]
    assert main(["--config", RUN, *missing]) == 0
    assert "Estimating with the 50,000 token ids of gpt2_1b." in capsys.readouterr().err


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
    work = estimated(capsys, "--config", RUN, *settings)["work"]
    # 32 and 52 bytes, four to a token
    assert work["task_tokens"] == 5 * (8 + 13)
    assert (work["task_rounds"], work["samples"]) == (4, 6)
    # 24 layers under ZeRO-3: the host needs 1.7 ms for each
    assert work["host_seconds"] == pytest.approx(24 * 1.7e-3)
    assert main(["--config", RUN, *settings]) == 0
    text = capsys.readouterr().out
    assert "4 x tasks (mine 5 items; about 105 tokens); 6 x a sample of 100 tokens" in text
    bytewise = estimated(capsys, "--config", RUN, *settings[:-1], "data.tokenizer=bytes")
    assert bytewise["work"]["task_tokens"] == 5 * (32 + 52)


def test_tasks_whose_files_are_elsewhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tasks(tmp_path / "mine.jsonl", items=1)
    tasks = f"evaluation.tasks=['{file}','piqa=elsewhere/piqa.jsonl']"
    found = estimated(capsys, "--config", RUN, tasks, TOKENIZER)
    assert found["tasks"]["missing"] == ["piqa=elsewhere/piqa.jsonl"]
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert main(["--config", RUN, tasks, TOKENIZER]) == 1
    assert "mine.jsonl:1: it has no list of texts `endings`" in capsys.readouterr().err


def test_prices_have_their_days_and_say_that_nobody_checked_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prices = read_prices()
    days = sorted(one.looked_up for one in prices.machines if one.gpu == "H100 SXM")
    assert main(["--config", RUN]) == 0
    text = capsys.readouterr().out
    bucket = f"{prices.bucket.provider} looked up {prices.bucket.looked_up}"
    assert f"TO BE CHECKED, from config/prices.yaml: {bucket}" in text
    assert f"machines below looked up {days[0]} to {days[-1]}" in text
    assert "TO BE CHECKED on these pages" in text and "no price: give --per-hour" in text
    assert main(["--config", RUN, "--gpu", "L4"]) == 0
    assert "no machine with L4" in capsys.readouterr().out


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


def test_a_sweep_keeps_the_price_of_a_gpu_and_names_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = estimated(capsys, "--config", RUN, "--per-hour", "24", "--sweep", "gpus=1,3,16")
    one, three, sixteen = found["sweep"]
    assert (one["per_hour_usd"], sixteen["per_hour_usd"]) == (3.0, 48.0)
    times = [1 * one["scenarios"][1]["hours"], 16 * sixteen["scenarios"][1]["hours"]]
    assert times[0] < times[1] < 1.3 * times[0]  # two machines pass weights over a network
    assert "not a multiple" in three["refused"]


def test_a_sweep_compares_stages_and_says_where_hpz_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ["--per-hour", "24", "--sweep", "gpus=8,64"]
    arguments = ["--config", "gpt2_1b_8xh100", *sweep]

    def at_64() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
        here, there = estimated(capsys, *arguments)["sweep"]
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
    assert main(arguments) == 0
    table = capsys.readouterr().out.partition("inside a node")[2]
    assert f"pays below {8 * even / 1e9:.3g} Gbit/s a GPU" in table
    assert table.count("* 3 offload") == 2  # as the run has it
    assert (
        main(["--config", RUN, *sweep, "batch.micro_batch_size=auto"]) == 0
    )  # it gathers once a step
    assert "does not pay" in capsys.readouterr().out


def test_a_budget_says_how_far_it_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", RUN, "--per-hour", "24", "--budget", "400"]
    found = estimated(capsys, *arguments)
    reach = found["scenarios"][1]["affordable_steps"]
    within = estimated(capsys, *arguments, f"run.steps={reach}")["scenarios"][1]
    beyond = estimated(capsys, *arguments, f"run.steps={reach + 1}")["scenarios"][1]
    assert within["cost_usd"] <= 400 < beyond["cost_usd"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    share = found["scenarios"][1]["mfu_fraction"]
    assert f"budget $400.00 at {share:.1%} MFU: step {reach:,} of 100,000" in text
    assert main([*arguments, "run.steps=3000"]) == 0
    assert f"at {share:.1%} MFU: all steps, $36" in capsys.readouterr().out


def test_a_step_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    crowded = ["--config", RUN, "batch.micro_batch_size=64", "--gpu", "L4"]
    assert main(crowded) == 3
    told = capsys.readouterr().out
    assert "does NOT fit" in told
    (settings,) = re.findall(r"^A step does not fit .* It fits with: (.*)$", told, re.MULTILINE)
    assert main([*crowded, *settings.split()]) == 0
    capsys.readouterr()
    assert main([*crowded, "--json"]) == 3
    assert settings in json.loads(capsys.readouterr().out)["fix"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "either --config FILE or --measured RUN"),
        (["--config", RUN, "--measured", "x"], "either --config FILE or --measured RUN"),
        (["--config", RUN, "--gpu", "H900"], "Choose one of: A100 40GB"),
        (["--config", RUN, "--sweep", "gpus=1,two"], "expected numbers of GPUs"),
        (["--config", RUN, "--gpus", "3"], "not a multiple"),
        (["--measured", "nowhere"], "no such folder, and no runs/nowhere. "),
        (["--measured", "one", "--gpus", "4"], "Leave out settings, --gpus, --gpu and --sweep"),
        (["--measured", "one", "--gpu", "H200"], "Leave out settings, --gpus, --gpu and --sweep"),
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
        "from refocused.commands.main import run_command\n"
        f"assert run_command('estimate_cost', ['--config', {RUN!r}, '--sweep', 'gpus=1,2']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
