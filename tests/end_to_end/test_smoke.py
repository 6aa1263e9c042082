"""A real run among the fast tests: started by the launcher, killed, resumed, exported."""

import signal
import sys
from pathlib import Path

import torch
import transformers
from ranks import carrying, launched, train, until
from tiny import log_lines, losses, tiny_run

from refocused.checkpoints.step.checkpoint_directory import saved_steps

STEPS = 60


def test_a_killed_run_goes_on_by_its_command_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    settings = ["--config", "tiny.yaml", f"run.steps={STEPS}", "checkpoint.export_final=true"]
    whole, killed = tmp_path / "whole/tiny", tmp_path / "runs/tiny"
    train(tmp_path, *settings, "run.directory=whole", "checkpoint.mirror=null", ranks=2)
    launch = [sys.executable, "-P", "-m", "refocused", "launch", *settings]
    with launched(tmp_path, *launch, RANKS="2") as (process, log):
        until(
            lambda: 10 in saved_steps(killed / "checkpoints") or process.poll() is not None,
            seconds=180,
        )
        for started in carrying("TMPDIR", str(tmp_path)):
            started.kill()
        assert process.wait(120) == -signal.SIGKILL, log.read_text()
    saved = max(saved_steps(killed / "checkpoints"))
    with launched(tmp_path, *launch, RANKS="2") as (process, log):
        assert process.wait(180) == 0, log.read_text()
    assert saved < STEPS and f"resume   step {saved} " in log.read_text()
    assert losses(killed) == losses(whole)
    setups = [event for event in log_lines(killed, "events") if event["kind"] == "setup"]
    assert [setup["data_fingerprint"] for setup in setups] == [setups[0]["data_fingerprint"]] * 2
    assert {"python", "torch", "deepspeed"} < set(setups[1]["versions"])
    assert setups[1]["hardware"].startswith("2 ranks on ") and len(setups[1]["hosts"]) == 1
    assert "--config tiny.yaml" in setups[1]["command"] and setups[1]["tokenizer"] == "unknown"
    for name in ("model", "batch", "memory", "data"):
        assert len(setups[1][name]) == 1 and setups[1][name][0] in log.read_text()
    exported = [
        transformers.AutoModelForCausalLM.from_pretrained(run / "final_model")
        for run in (killed, whole)
    ]
    for weight, other in zip(*(model.parameters() for model in exported), strict=True):
        assert torch.equal(weight, other)
