"""A checkpoint exported as a transformers folder is the same model."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from checkpoints.step_samples import flip_byte, reseal
from data.text_samples import tiny_bpe, word_file
from evaluate.small_models import CONTEXT, FAMILIES, small_model
from evaluate.step_saves import LATER, LENGTH, PLAIN, SPECIAL, VOCABULARY, step_of, weights_of
from safetensors import SafetensorError
from safetensors.torch import load_file

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.evaluate.export import (
    add_modeling_file,
    answer_to,
    export_step,
    largest_difference,
    modeling_source,
)
from refocused.evaluate.final_model import FinalModelRequest, read_answer
from refocused.evaluate.load_model import load_model
from refocused.evaluate.model_weights import ModelWeights, network_class, tokenizer_of
from refocused.models.families import transformers_config
from refocused.system.errors import CheckpointError, ShardError
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

ROUND_TRIPS = [
    *((1, save) for save in PLAIN[1] if save.stage in (0, 3)),
    *((2, save) for save in PLAIN[2] if save.stage in (1, 2)),
    *((4, save) for save in PLAIN[4] if save.stage in (2, 3)),
    *((2, save) for save in SPECIAL if save.family in LATER),
]
# What transformers 4 and llama.cpp's converter read, and transformers 5 do not write.
OLDER_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 33},
    "gpt_neox": {
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "rotary_emb_base": 50000.0,
        "rotary_pct": 0.4,
    },
    "llama": {"rope_theta": 20000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None},
    "nanochat": {"rope_theta": 10000.0, "rope_scaling": None},
}
SAVE = PLAIN[2][3]  # GPT-2 at stage 3


def opened(saved, ranks, save):
    return ModelWeights(read_checkpoint(step_of(saved[ranks], save)))


@pytest.mark.parametrize(
    ("ranks", "save"), ROUND_TRIPS, ids=[f"{ranks}-{save.name}" for ranks, save in ROUND_TRIPS]
)
def test_round_trip(saved, tmp_path, ranks, save, caplog):
    weights = opened(saved, ranks, save)
    found = export_step(weights, tmp_path / "out", tokenizer=None, dtype="fp32")
    assert found.logit_difference is not None and found.logit_difference < 1e-6
    stored = load_file(tmp_path / "out" / "model.safetensors")
    # Tied, or under the name that files have.
    is_tied_or_renamed = save.family in ("gpt2", "gpt_neox", "llama")
    assert ("lm_head.weight" in stored) is not is_tied_or_renamed
    assert ("embed_out.weight" in stored) is (save.family == "gpt_neox")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (VOCABULARY, "float32")
    assert config.items() >= OLDER_NAMES[save.family].items()
    other = "llama.cpp gives other logits for this gpt_neox, without an error: its converter leaves"
    other += " out rope_theta 50000.0. Do not convert"
    for text in (caplog.text, (tmp_path / "out" / "README.md").read_text()):
        assert (other in text) is (save.family == "gpt_neox")
        assert ("llama.cpp" in text) is (save.family == "gpt_neox")
    assert "auto_map" not in config and not list((tmp_path / "out").glob("*.py"))
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = weights_of(saved[ranks], save)
    assert getattr(network.config, "rope_parameters", None) == config.get("rope_parameters")
    parameters = dict(network.named_parameters())
    assert parameters.keys() == wanted.keys()
    for name, weight in wanted.items():
        rows = VOCABULARY if weight.shape[0] == 128 and weight.dim() == 2 else None
        assert torch.equal(parameters[name], weight[:rows]), name
    assert found.parameters == sum(p.numel() for p in parameters.values())
    assert found.bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [("bytes", "refuses the tokenizer bytes"), ("gpt2", "knows the BPE of published models by a")],
)
def test_an_export_names_what_llama_cpp_would_take_otherwise(
    saved, tmp_path, tokenizer, said, caplog
):
    weights = opened(saved, 2, SAVE)
    weights.config.activation_function = "relu"
    content = tokenizer_file(
        TokenizerChoice(tokenizer, bpe_folder=tiny_bpe(tmp_path)), vocabulary=300
    )
    own = as_transformers(content, end_of_text_id=None, max_length=9)
    export_step(weights, tmp_path / "out", tokenizer=own, compare=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "its converter leaves out activation_function relu. Do not convert the model" in card
    for text in (card, caplog.text):
        assert f"llama.cpp's converter {said}" in text and "there will be no GGUF file." in text


def test_an_export_has_its_tokenizer_its_card_and_the_length_of_training(saved, tmp_path):
    weights, out = opened(saved, 2, SAVE), tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*--no-tokenizer"):
        tokenizer_of(weights)
    with pytest.raises(ShardError, match="ids up to 256, but the model has only 101"):
        tokenizer_of(weights, TokenizerChoice("bytes"))
    words = TokenizerChoice(str(word_file(tmp_path / "words.json")))
    export_step(weights, out, tokenizer=tokenizer_of(weights, words), compare=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("the cat the")["input_ids"] == [0, 1, 0]  # not cut: the file said 2
    config = json.loads((out / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == 3
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # in transformers 4 and 5
    assert settings["add_bos_token"] is False  # llama.cpp adds it to most kinds of BPE
    inner = json.loads((out / "tokenizer.json").read_text())
    merged = {"the": 0, "cat": 1, "t": 2, "h": 3, "e": 4, "th": 5, "?": 6}
    inner["model"] = {"type": "BPE", "vocab": merged, "dropout": 0.9, "unk_token": "?"}
    inner["model"] |= {"merges": [["t", "h"], ["th", "e"]]}
    inner["added_tokens"] = []
    beside = shutil.copytree(out, tmp_path / "dropout")
    (beside / "tokenizer.json").write_text(json.dumps(inner))
    tokens = load_model(beside, dtype="fp32").tokenizer("the " * 30)["input_ids"]
    assert tokens == [0] * 30  # equal texts get equal ids
    assert (config["n_positions"], config["trained_sequence_length"]) == (33, LENGTH)
    generated = transformers.GenerationConfig.from_pretrained(out)
    assert generated.eos_token_id == generated.pad_token_id == 3
    card = (out / "README.md").read_text()
    assert "llama.cpp's converter refuses the tokenizer WordLevel" in card
    for fact in (
        *("sample, step 2", "2,048 trained on", "f00d"),
        "4.2500 (perplexity 70.11, 1.5000 bits per byte)",
        "| context | trained on 16 tokens at once, of 33 that it takes |",
        "| time | 1.00 h until this step was saved |\n| cost | $2.50 until this step was saved |",
    ):
        assert fact in card
    for source, choice in ((out, None), (step_of(saved[2], SAVE), words)):
        assert load_model(source, dtype="fp32", tokenizer=choice).trained_length == LENGTH


def test_several_smaller_files_load_alike(saved, tmp_path):
    weights = opened(saved, 2, SAVE)
    export_step(weights, tmp_path / "out", tokenizer=None, file_bytes=10_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert files[0].stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode
    for tensors in map(load_file, files):
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 10_000
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert network.dtype == torch.bfloat16
    for name in weights.shapes:
        assert torch.equal(network.state_dict()[name], weights.tensor(name, dtype=torch.bfloat16))


def test_a_checkpoint_is_loaded_with_its_tokenizer(saved, tmp_path):
    words = word_file(tmp_path / "words.json").read_bytes()
    step = with_file(saved, tmp_path, "tokenizer.json", words)
    loaded = load_model(step.path, dtype="fp32")
    assert loaded.tokenizer("cat the")["input_ids"] == [1, 0]
    assert loaded.facts["step"] == 2
    for name, weight in weights_of(saved[2], SAVE).items():
        found = loaded.network.state_dict()[name]
        assert torch.equal(found, weight[: len(found)]), name


def test_a_failed_export_leaves_nothing(saved, tmp_path, monkeypatch):
    weights = opened(saved, 2, SAVE)

    def fails(error):
        def save(*_arguments, **_options):
            raise error

        return save

    full = "No space left on device"
    for name, error in (
        ("safetensors.torch.save_file", SafetensorError(f"I/O error: {full} (os error 28)")),
        ("refocused.evaluate.export.fsync_directories", OSError(28, full)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, fails(error))
            with pytest.raises(CheckpointError, match=full):
                export_step(weights, tmp_path / "out", tokenizer=None)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        export_step(weights, tmp_path / "out", tokenizer=None)


def test_a_wrong_export_is_detected(saved, tmp_path):
    weights = opened(saved, 2, SAVE)
    export_step(weights, tmp_path / "out", tokenizer=None, dtype="fp32")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its transformer.wte.weight is another"):
        largest_difference(weights, tmp_path / "out", dtype="fp32")
    config = tmp_path / "out" / "config.json"
    content[-2] ^= 64
    file.write_bytes(content)
    config.write_text(config.read_text().replace('"gelu_new"', '"relu"'))
    with pytest.raises(CheckpointError, match=r"its logits are .* of the largest one away"):
        largest_difference(weights, tmp_path / "out", dtype="fp32")


def test_a_model_that_differs_from_its_description_is_rejected(saved, tmp_path):
    other = SAVE.shape | {"n_inner": 70}
    step = with_file(saved, tmp_path, "model.json", json.dumps(other).encode())
    with pytest.raises(CheckpointError, match=r"mlp.c_fc.bias is \(75,\), not \(70,\)"):
        ModelWeights(step)


def test_the_final_model_is_made_once_per_save_and_errors_are_returned(
    saved, tmp_path, monkeypatch
):
    step, bucket = tmp_path / "checkpoints" / "checkpoint_step_2", tmp_path / "bucket"
    shutil.copytree(step_of(saved[2], SAVE), step)
    bucket.mkdir()
    places = {"bucket": str(bucket), "prefix": "sample/final_model"}
    request = FinalModelRequest(run=tmp_path, step=step, token="mine", **places)
    request.folder.mkdir()  # of an earlier end of the run
    (request.folder / "origin.json").write_text('{"step": 1}')
    answer = answer_to(request)
    assert (answer, answer.status) == (read_answer(request), "uploaded")
    assert answer.text.startswith("step 2, ")
    transformers.AutoModelForCausalLM.from_pretrained(request.folder)
    names = {path.name for path in request.folder.iterdir()}
    copied = {path.name for path in (bucket / "sample/final_model").iterdir()}
    assert copied == {*names, "COMMITTED"}
    with monkeypatch.context() as patch:
        patch.setattr(
            "refocused.evaluate.export.export_step", lambda *_, **__: pytest.fail("again")
        )
        assert answer_to(request) == answer
    assert read_answer(request.model_copy(update={"token": "another"})) is None
    assert not list(tmp_path.glob(".final_model.[no]*"))
    failed = answer_to(request.model_copy(update={"bucket": "az://other"}))
    assert failed.status == "made" and "'az://other' is not a bucket" in failed.text
    alone = request.model_copy(update={"bucket": None})
    assert answer_to(alone).status == "made"
    shutil.rmtree(request.folder)
    flip_byte(next(step.glob("zero/*_rank_1_*")))
    failed = answer_to(alone)
    assert failed.status == "failed" and "is corrupt" in failed.text
    assert not request.folder.exists()


def with_file(saved, folder, name, content):
    """Copy a checkpoint, and replace one file and its record in the manifest."""
    copy = shutil.copytree(step_of(saved[2], SAVE), folder / "checkpoint_step_2")
    reseal(copy, name, content)
    return read_checkpoint(copy)


SHAPES = {"resonance": FAMILIES["resonance"], "ten": FAMILIES["ten"] | {"learned_positions": False}}
# A process in which only torch and transformers can be imported.
CLEAN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("refocused", "deepspeed", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("def main(argv):", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = network(ids).logits
    written = network.generate(ids, max_new_tokens=20, do_sample=False)
    torch.save((ids, logits, written), folder + "/answers.pt")
assert not any(name.partition(".")[0] == "refocused" for name in sys.modules)
"""


def write_family(folder, family):
    """Write a small model as an export does."""
    model = small_model(**SHAPES[family] | {"family": family})
    model.network.save_pretrained(folder / family)
    model.tokenizer.save_pretrained(folder / family)
    config = model.network.config
    add_modeling_file(config, folder / family)
    config.save_pretrained(folder / family)
    return folder / family


@pytest.mark.slow  # another process imports torch and transformers
def test_an_export_works_without_this_package(tmp_path):
    folders = {family: write_family(tmp_path, family) for family in SHAPES}
    clean = [sys.executable, "-I", "-c", CLEAN, *map(str, folders.values())]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(clean, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for family, folder in folders.items():
        ids, logits, written = torch.load(folder / "answers.pt", weights_only=True)
        config = transformers_config(SHAPES[family], vocabulary=300, dropout=0.0)
        network = network_class(config).from_pretrained(folder)
        assert len(ids[0]) < CONTEXT
        with torch.no_grad():
            assert torch.equal(network(ids).logits, logits)
        assert torch.equal(network.generate(ids, max_new_tokens=20, do_sample=False), written)


@pytest.mark.parametrize("family", SHAPES)
def test_its_modules_share_one_namespace_without_clashes(family):
    tree = ast.parse(modeling_source(f"refocused.models.{family}"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in map(ast.unparse, imports) if " refocused" in line]
    defined: Counter[str] = Counter()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] += 1
        elif isinstance(node, ast.Assign):
            defined.update(ast.unparse(target) for target in node.targets)
    assert len(defined) > 20 and set(defined.values()) == {1}
