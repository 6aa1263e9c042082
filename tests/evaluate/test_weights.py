"""Weights read from a checkpoint's files equal its engine's, bit for bit."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoints.step_samples import make_step
from data.text_samples import word_file
from evaluate.step_saves import PLAIN, ROWS, SAVES, SPECIAL, VOCABULARY, step_of, weights_of

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.retention import prune
from refocused.commands.main import main
from refocused.config.model_shape import shape_from
from refocused.engine.zero_files import ZeroFiles
from refocused.evaluate.load_model import load_model
from refocused.evaluate.model_weights import ModelWeights
from refocused.evaluate.origin import match, open_model
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.world import World

CASES = [(ranks, save) for ranks, saves in SAVES.items() for save in saves]


@pytest.mark.parametrize(
    ("ranks", "save"), CASES, ids=[f"{ranks}-{save.name}" for ranks, save in CASES]
)
def test_weights_equal_the_engines_and_start_a_run(saved, ranks, save):
    step = step_of(saved[ranks], save)
    weights, expected = ModelWeights(read_checkpoint(step)), weights_of(saved[ranks], save)
    assert list(weights.shapes) == list(expected)
    tied = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
    assert weights.ties == ({"lm_head.weight": tied[save.family]} if save.family in tied else {})
    for name, weight in expected.items():
        whole = weights.tensor(name, padded=True)
        assert torch.equal(whole, weight), name
        assert torch.equal(weights.tensor(name), weight[: weights.shapes[name][0]]), name
    if save.stage == 0:
        with pytest.raises(CheckpointError, match=r"zero.stage=0.*checkpoints.* export"):
            open_model(step, trusts_pickles=False)
        return
    stored, shape = open_model(step, trusts_pickles=False), shape_from(save.shape, where="")
    if save.frozen:
        with pytest.raises(ConfigError, match=r"files lack transformer.wpe.weight"):
            match(stored, shape, where="x", preset="y", resizes=False)
        return
    fill = match(stored, shape, where="x", preset="y", resizes=False)
    for name, weight in expected.items():
        filled = torch.full(weight.shape, -7.0)
        for start in (5, 0):
            fill(filled.view(-1)[start:], f"network.{name}", start)
        assert torch.equal(filled[:VOCABULARY], weight[:VOCABULARY]), name
        assert len(weight) != ROWS or (filled[VOCABULARY:] == -7.0).all()


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        (["checkpoints", "export"], "safetensors.torch.save_file"),
        (["evaluate"], "refocused.evaluate.load_model.tokenizer_of"),
        (["generate"], "refocused.evaluate.load_model.tokenizer_of"),
    ],
    ids=["export", "evaluate", "generate"],
)
def test_retention_keeps_a_checkpoint_that_a_command_reads(
    saved, tmp_path, monkeypatch, command, reads
):
    step = tmp_path / "run/checkpoints/checkpoint_step_2"
    shutil.copytree(step_of(saved[1], PLAIN[1][0]), step)
    make_step(step.parent, 3, validation_loss=1.0)
    make_step(step.parent, 4)

    def retain():
        return prune(step.parent, World(), keep=2)

    module, _, name = reads.rpartition(".")
    original = getattr(importlib.import_module(module), name)
    removed = []

    def read(*arguments, **options):
        removed.append(retain())
        return original(*arguments, **options)

    monkeypatch.setattr(reads, read)
    (tmp_path / "text.txt").write_text("the cat the cat")
    options = {
        "export": [str(tmp_path / "out"), "--no-compare"],
        "evaluate": ["--tasks", str(tmp_path / "text.txt"), "--device", "cpu"],
        "generate": ["the cat", "--tokens", "2"],
    }[command[-1]]
    named = ["--tokenizer", str(word_file(tmp_path / "words.json"))]
    monkeypatch.setattr(sys, "argv", ["refocused", *command, str(step), *options, *named])
    assert main() == 0
    assert removed == [[]]
    assert retain() == ["checkpoint_step_2"]


def test_a_missing_rank_is_detected(saved, tmp_path):
    shutil.copytree(step_of(saved[2], SPECIAL[0]) / "zero", tmp_path / "zero")
    (lost,) = (tmp_path / "zero").glob("*_rank_1_*optim*")
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"1 optimizer files, and 2 ranks have saved it"):
        ZeroFiles(tmp_path / "zero", ranks=2)


def test_weights_are_read_without_deepspeed(saved):
    program = """
import sys
sys.modules["deepspeed"] = None  # importing it fails
from pathlib import Path
from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.evaluate.model_weights import ModelWeights
from refocused.evaluate.origin import match, open_model
weights = ModelWeights(read_checkpoint(Path(sys.argv[1])))
print(weights.tensor("transformer.ln_f.bias").norm().item())
"""
    path = step_of(saved[2], SPECIAL[1])
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    wanted = weights_of(saved[2], SPECIAL[1])["transformer.ln_f.bias"]
    assert float(ended.stdout) == wanted.norm().item()


SMALL = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8,
         "vocab_size": 9}  # fmt: skip
COUNTERS = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0)
MODULE = {"module": {"a": torch.zeros(3)}, "shared_params": None, "param_shapes": [{"a": (3,)}],
          "buffer_names": [], "frozen_param_shapes": None, **COUNTERS}  # fmt: skip
MASTERS = {"single_partition_of_fp32_groups": [torch.zeros(3)]}
ADAM = {"optimizer_state_dict": {"state": {}}}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ({}, {}),
        ({"module": 5}, {}),
        (MODULE | {"module": {"a": 5}}, {}),
        (MODULE | {"shared_params": 5}, {}),
        (MODULE, {}),
        (MODULE | {"param_shapes": 5}, ADAM | {"fp32_flat_groups": []}),
        (MODULE | {"param_shapes": [{"a": "x"}]}, ADAM | {"fp32_flat_groups": []}),
        (MODULE, ADAM | {"fp32_flat_groups": 5}),
        (MODULE, ADAM | {"fp32_flat_groups": [None]}),
        (MODULE, ADAM | {"fp32_flat_groups": [torch.zeros(2)]}),
        (MODULE, ADAM | MASTERS | {"param_slice_mappings": [{"a": {"numel": 2, "start": 0}}]}),
        (MODULE, ADAM | MASTERS | {"param_slice_mappings": [{"a": {"numel": 3, "start": 1}}]}),
    ],
)
def test_unexpected_contents_of_a_checkpoint_are_reported(model, optimizer, tmp_path):
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is not as DeepSpeed 0\.19 writes|elements"):
        ZeroFiles(tmp_path, ranks=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMALL | {"n_layer": 10**6}, "1,000,000 layers, and at most 1,000"),
        (SMALL | {"vocab_size": 10**9}, r"describes 8,0\d\d,\d{3},\d{3} parameters, and its"),
        (SMALL | {"n_head": "x"}, "cannot be loaded by transformers"),
        (SMALL | {"n_head": 0}, "cannot be loaded by transformers"),
        ("[" * 200_000, "it nests over 100 levels"),
        ({}, "cannot be loaded by transformers"),
        (None, "is no model: it has neither manifest.json"),
    ],
)
def test_a_config_larger_than_its_files_is_rejected(tmp_path, config, message):
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, without_tokenizer=True)
