"""From a trained run to an exported model that transformers load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from data.text_samples import random_texts, write_jsonl
from ranks import train
from tiny import log_lines, tiny_run

from refocused.commands.main import run_command
from refocused.config.yaml_source import parse_yaml
from refocused.evaluate.generation import Sampling, generate
from refocused.evaluate.load_model import load_model
from refocused.tokenizers.encoders import TokenizerChoice, open_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on bytes and its mirror."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_run(folder)
    settings = ["data.tokenizer=bytes", "precision.dtype=bf16", "zero.stage=3"]
    settings += ["checkpoint.export_final=true"]
    train(folder, "--config", "tiny.yaml", *settings, ranks=2)
    return folder


def command(capture: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run_command("checkpoints", arguments) == code
    out, err = capture.readouterr()
    return out if code == 0 else err


def test_a_run_is_exported_with_its_tokenizer(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(trained)
    out = tmp_path / "model"
    told = json.loads(command(capsys, "export", "latest", str(out), "--json"))
    assert (told["step"], told["folder"]) == (20, str(out))
    assert told["logit_difference"] < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    network = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert told["parameters"] == network.num_parameters()
    ids = tokenizer("def \u6f22", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == list("def \u6f22".encode())
    written = network.generate(ids, max_new_tokens=5, do_sample=False)
    loaded = load_model(out, dtype="bf16")
    assert loaded.network.generate(ids, max_new_tokens=5, do_sample=False).equal(written)
    refused = command(capsys, "export", "latest", str(out), code=2)
    assert f"{out} exists. Remove it" in refused


def test_a_finished_run_has_a_final_model(trained: Path) -> None:
    run, copied = trained / "runs/tiny", trained / "mirror/tiny/final_model"
    (said,) = (one["text"] for one in log_lines(run, "events") if one["kind"] == "export")
    assert said.startswith("final model runs/tiny/final_model: step 20, ")
    assert said.endswith(f", also in {copied}")
    names = {path.name for path in (run / "final_model").iterdir()}
    assert {"origin.json", "tokenizer.json", "README.md", "model.safetensors"} < names
    assert {path.name for path in copied.iterdir()} == {*names, "COMMITTED"}
    loaded = load_model(copied)
    assert loaded.tokenizer("a").input_ids == [97]
    step = load_model(run / "checkpoints/checkpoint_step_20")
    for name, weight in step.network.named_parameters():
        assert weight.equal(loaded.network.get_parameter(name)), name


def test_a_tokenizer_of_ones_own_and_packed_documents_travel_with_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "texts.jsonl", random_texts(300))
    steps = "train-tokenizer texts.jsonl --vocabulary 400 --out own.json"
    assert run_command("prepare_data", steps.split()) == 0
    steps = "tokenize texts.jsonl --out packed --tokenizer own.json --best-fit 32 --workers 1"
    assert run_command("prepare_data", steps.split()) == 0
    said = capsys.readouterr().out
    section = parse_yaml(said[said.index("data:") :])["data"]
    settings = [f"data.{name}={value}" for name, value in section.items()]
    settings += ["model.vocabulary=auto", "evaluation.sample_prompt=the cat", "run.steps=6"]
    train(tmp_path, "--config", "tiny.yaml", *settings, "zero.stage=3", ranks=2)
    told = json.loads(command(capsys, "export", "latest", "model", "--json"))
    assert told["logit_difference"] < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    own = open_tokenizer(TokenizerChoice("own.json"))
    assert tokenizer("the cat sat").input_ids == own.encode("the cat sat").tolist()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    samples = [
        one for one in log_lines(tmp_path / "runs/tiny", "events") if one["kind"] == "sample"
    ]
    assert [one["step"] for one in samples] == [0, 6]
    asked = ["tiny", "the cat", "--tokens", "8", "--device", "cpu", "--json"]
    assert run_command("generate", asked) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["tokens"] <= 8


OWN_FAMILIES: dict[str, dict[str, Any]] = {
    "resonance": {"num_resonators": 8, "convolution_width": 4, "memory_heads": 4},
    "ten": {"num_eigenstates": 8, "memory_heads": 4, "attention_every": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("family", OWN_FAMILIES)
def test_our_own_family_is_trained_exported_scored_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, family: str
) -> None:
    tiny_run(tmp_path)
    shape = {
        "model_type": family,
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        **OWN_FAMILIES[family],
    }
    (tmp_path / "small.json").write_text(json.dumps(shape))
    settings = ["model.preset=small.json", "data.tokenizer=bytes", "run.steps=6"]
    settings += ["precision.dtype=bf16", "zero.stage=3", "model.activation_checkpointing=true"]
    train(tmp_path, "--config", "tiny.yaml", *settings, ranks=2)
    monkeypatch.chdir(tmp_path)
    told = json.loads(command(capsys, "export", "latest", "model", "--dtype", "fp32", "--json"))
    assert told["logit_difference"] < 1e-5
    assert '(".", trust_remote_code=True)' in (tmp_path / "model" / "README.md").read_text()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"].startswith(f"modeling_{family}.")
    assert (tmp_path / "model" / f"modeling_{family}.py").is_file()
    assert config["spectrum_length"] == 64
    loaded = load_model(tmp_path / "model", dtype="fp32")
    ids = loaded.tokenizer("def", return_tensors="pt").input_ids
    greedy = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": list(range(257, 512))}
    written = loaded.network.generate(ids, **greedy)
    assert written.equal(loaded.network.generate(ids, **greedy, use_cache=False))

    options = ("--device", "cpu", "--dtype", "fp32", "--json")
    asked = ["tiny", "def", "--temperature", "0", "--tokens", "8", *options]
    assert run_command("generate", asked) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    tokens = written[0, ids.shape[1] :][: answer["tokens"]]
    assert answer["text"] == loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    (tmp_path / "story.txt").write_text("def f(x)")
    assert run_command("evaluate", ["tiny", "--tasks", "story.txt", *options]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["story"]["perplexity"]["value"]
    text = torch.tensor([[256, *b"def f(x)"]])  # as a document begins
    with torch.no_grad():
        assert found == pytest.approx(float(loaded.network(text, labels=text).loss.exp()), rel=1e-4)


def test_a_checkpoint_only_in_the_bucket_is_exported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = str(trained / "mirror")
    arguments = ("--run", "tiny", "--bucket", bucket, "--dtype", "fp32")
    printed = command(capsys, "export", "10", "model", *arguments)
    assert printed.startswith("model: step 10, ")
    assert "loaded by transformers: its logits and the checkpoint's " in printed
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "checkpoint_step_10").is_dir()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_a_checkpoint_generates_without_deepspeed(trained: Path) -> None:
    script = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from refocused.commands.main import run_command\n"
        "sys.exit(run_command('generate', sys.argv[1:]))"
    )
    asked = ["tiny", "def ", "--tokens", "12", "--seed", "3", "--dtype", "bf16", "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", script, *asked], cwd=trained, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["facts"]["step"], told["answers"][0]["prompt"]) == (20, "def ")
    loaded = load_model(trained / "runs/tiny/checkpoints/checkpoint_step_20", dtype="bf16")
    found = generate(loaded, ["def "], Sampling(tokens=12, seed=3))
    assert found.answers[0].text == told["answers"][0]["text"]
