"""Weights read from a step's files equal those of the engine that saved it, bit for bit."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.step_samples import flip_byte, make_step
from data.text_samples import word_file
from evaluate.step_saves import PLAIN, SAVES, SPECIAL, Save, step_of, weights_of

from refocused.checkpoints.step.retention import thin_out
from refocused.checkpoints.step.step_directory import StepDirectory, read_step
from refocused.commands.main import main
from refocused.evaluate import zero_files
from refocused.evaluate.model_weights import ModelWeights
from refocused.evaluate.zero_files import ZeroFiles
from refocused.system.errors import CheckpointError
from refocused.system.world import World

pytestmark = pytest.mark.slow
CASES = [(ranks, save) for ranks, saves in SAVES.items() for save in saves]


@pytest.mark.parametrize(
    ("ranks", "save"), CASES, ids=[f"{ranks}-{save.name}" for ranks, save in CASES]
)
def test_weights_equal_the_engines(saved: dict[int, Path], ranks: int, save: Save) -> None:
    found = ModelWeights(read_step(step_of(saved[ranks], save)))
    wanted = weights_of(saved[ranks], save)
    assert list(found.shapes) == list(wanted)
    assert found.ties == (
        {"lm_head.weight": "transformer.wte.weight"} if save.family == "gpt2" else {}
    )
    for name, weight in wanted.items():
        whole = found.tensor(name, padded=True)
        assert whole.shape == weight.shape
        assert torch.equal(whole, weight), name
        assert torch.equal(found.tensor(name), weight[: found.shapes[name][0]]), name


@pytest.mark.parametrize(
    ("command", "reads"),
    [
        (["checkpoints", "export"], "safetensors.torch.save_file"),
        (["evaluate"], "refocused.evaluate.load_model.tokenizer_of"),
        (["generate"], "refocused.evaluate.load_model.tokenizer_of"),
    ],
    ids=["export", "evaluate", "generate"],
)
def test_retention_leaves_a_step_that_a_command_reads(
    saved: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    reads: str,
) -> None:
    step = tmp_path / "run/checkpoints/checkpoint_step_2"
    shutil.copytree(step_of(saved[1], PLAIN[1][0]), step)
    make_step(step.parent, 3, validation_loss=1.0)
    make_step(step.parent, 4)

    def retain() -> list[str]:
        return thin_out(step.parent, World(), keep=2, mirrored=False, status=None)

    module, _, name = reads.rpartition(".")
    original = getattr(importlib.import_module(module), name)
    removed = []

    def read(*arguments: Any, **options: Any) -> Any:
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


def test_files_that_are_mapped_anew_give_the_same_tensors(
    saved: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_files, "TOUCHED_BYTES", 20_000)
    save = PLAIN[4][-1]
    found = ModelWeights(read_step(step_of(saved[4], save)))
    for name, weight in weights_of(saved[4], save).items():
        assert torch.equal(found.tensor(name, padded=True), weight)
        rounded = found.tensor(name, dtype=torch.bfloat16, padded=True)
        assert torch.equal(rounded, weight.bfloat16())


def test_a_flipped_byte_is_found_before_anything_is_loaded(
    saved: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "checkpoint_step_2"
    shutil.copytree(step_of(saved[2], SPECIAL[0]), copy)
    flip_byte(next(copy.glob("zero/*_rank_1_*")))
    monkeypatch.setattr(zero_files, "read_state", lambda path, **_: pytest.fail(str(path)))
    with pytest.raises(CheckpointError, match=r"_rank_1_mp_rank_00_optim_states.pt has CRC-32C"):
        ModelWeights(read_step(copy))


def test_a_rank_that_is_not_in_the_manifest_is_missed(saved: dict[int, Path]) -> None:
    step = read_step(step_of(saved[2], SPECIAL[0]))
    files = {name: record for name, record in step.manifest.files.items() if "rank_1" not in name}
    manifest = step.manifest.model_copy(update={"files": files})
    with pytest.raises(CheckpointError, match=r"1 optimizer files .* on 2 ranks writes 2"):
        ZeroFiles(StepDirectory(step.path, manifest))


def test_weights_are_read_without_deepspeed(saved: dict[int, Path]) -> None:
    program = """
import sys
sys.modules["deepspeed"] = None  # importing it fails
from pathlib import Path
from refocused.checkpoints.step.step_directory import read_step
from refocused.evaluate.model_weights import ModelWeights
weights = ModelWeights(read_step(Path(sys.argv[1])))
print(weights.tensor("transformer.ln_f.bias").norm().item())
"""
    path = step_of(saved[2], SPECIAL[1])
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    wanted = weights_of(saved[2], SPECIAL[1])["transformer.ln_f.bias"]
    assert float(ended.stdout) == wanted.norm().item()
