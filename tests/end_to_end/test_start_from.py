"""A run that starts from the weights of another one, through an export and by its name."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_memory import LiveMemory
from ranks import train
from tiny import log_lines, tiny_run

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.commands.main import run_command

pytestmark = pytest.mark.slow
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
}


def train_watched(arguments: list[str]) -> int:
    """Train; write the most of the model's bytes that this rank holds until it is partitioned."""
    import deepspeed

    from refocused.commands.train import main
    from refocused.train.lifecycle import trainer

    watching, memory = contextlib.ExitStack(), LiveMemory()
    assemble, initialize = trainer.assemble_model, deepspeed.initialize

    def assembled(*given: Any, **named: Any) -> Any:
        watching.enter_context(memory)
        return assemble(*given, **named)

    def initialized(*, model: torch.nn.Module, **named: Any) -> Any:
        watching.close()
        whole = sum(4 * part.ds_numel for part in model.parameters())  # float32
        Path(f"held-{os.environ['RANK']}").write_text(str(memory.peak / whole))
        return initialize(model=model, **named)

    trainer.assemble_model, deepspeed.initialize = assembled, initialized
    return main(arguments)


def first_loss(folder: Path, run: str) -> float:
    """Return the loss of a run's start."""
    lines = log_lines(folder / "runs" / run, "events")
    (said,) = (one["text"] for one in lines if one["kind"] == "start")
    return float(said.split("loss ")[1].split()[0])


def transformers_loss(model: Path) -> float:
    """Return the loss on the random tokens of two ranks that a start reports."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    losses = []
    for rank in range(2):
        ids = torch.randint(512, (1, 33), generator=torch.Generator().manual_seed(rank))
        with torch.no_grad():
            logits = network(ids[:, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    return sum(losses) / 2


def test_a_run_goes_on_from_an_export_and_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tiny_run(tmp_path)
    (tmp_path / "neox.json").write_text(json.dumps(NEOX))
    common = ["--config", "tiny.yaml", "model.preset=neox.json", "checkpoint.mirror=null"]
    common += ["evaluation.interval=100", "model.vocabulary_multiple=100"]
    bytes_like = ["data.tokenizer=bytes", "--run", "first", "--max-steps", "4"]
    train(tmp_path, *common, *bytes_like, "model.vocabulary=512", ranks=1)
    monkeypatch.chdir(tmp_path)
    assert not run_command(
        "checkpoints", ["export", "latest", "out", "--run", "first", "--dtype", "fp32"]
    )
    common += ["model.dropout=0", "optimizer.lr=1e-4"]
    second = [*common, "model.start_from=out", "evaluation.at_start=true"]
    second += ["--run", "second", "--max-steps"]
    started = train(tmp_path, *second, "2", ranks=2, command=train_watched).out[0]
    held = [float((tmp_path / f"held-{rank}").read_text()) for rank in range(2)]
    assert max(held) < 0.8  # of the model: its embeddings, one block and this rank's half
    assert re.search(
        r"start    from step 0, weights of out \(folder, [0-9a-f]{16}\), loss", started
    )
    assert first_loss(tmp_path, "second") == pytest.approx(transformers_loss(Path("out")), abs=1e-4)
    tokenizers = list(tmp_path.glob("runs/*/checkpoints/*/tokenizer.json"))
    one, other = (json.loads(file.read_text())["model"]["vocab"] for file in tokenizers)
    assert one == other  # it travelled
    (tmp_path / "out" / "model.safetensors").unlink()
    resumed = train(tmp_path, *second, "3", ranks=2).out[0]
    assert "origin   not read: the run resumes checkpoint_step_2" in resumed
    measured = log_lines(tmp_path / "runs" / "second", "training_metrics")
    validated = [record["step"] for record in measured if record["kind"] == "validation"]
    assert validated == [0, 2, 3], "the baseline is not repeated"
    last = read_checkpoint(tmp_path / "runs/second/checkpoints/checkpoint_step_3")
    assert (last.path / "tokenizer.json").is_file()
    assert last.manifest.origin is not None and last.manifest.origin.address == "out"
    capsys.readouterr()
    assert not run_command("checkpoints", ["info", "3", "--run", "second"])
    assert re.search(r"origin +out \(folder, ", capsys.readouterr().out)
    assert not run_command("checkpoints", ["export", "3", "again", "--run", "second"])
    card = (tmp_path / "again" / "README.md").read_text()
    assert "pre-trained from the weights of out (folder" in card
    refused = train(tmp_path, *common, "model.start_from=out", "--run", "x", ranks=2, code=1)
    assert refused.everything.count("has no model.safetensors") == 1

    third = ["model.start_from=first:4", "--run", "third", "--max-steps", "1", "zero.stage=0"]
    train(tmp_path, *common, *third, "precision.dtype=bf16")
    origin = read_checkpoint(tmp_path / "runs/third/checkpoints/checkpoint_step_1").manifest.origin
    assert origin is not None and origin.revision == "first step 4"
    one, other = (first_loss(tmp_path, name) for name in ("second", "third"))
    assert one == pytest.approx(other, abs=0.05)
