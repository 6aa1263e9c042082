"""Exports of every family, read by transformers 5, by transformers 4 and by llama.cpp.

    .venv/bin/python benchmarks/export_readers.py [--bpe-folder FOLDER]

Every family trains for a step with large random weights, and is exported by the product's command.
The logits of 100 tokens are compared with those of this environment's transformers. FOLDER has
GPT-2's vocab.bpe and encoder.json; without it llama.cpp is left out, whose converter knows no
tokenizer of bytes. pip installs the readers below `--work`, at the first call; it compiles
llama-cpp-python for half an hour. Its source holds llama.cpp's converter.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from measuring import ROOT, WORK, parser_of, say, write_report

OLD = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub<1.0"]
LLAMA = ["llama-cpp-python==0.3.36", "diskcache", "sentencepiece"]
TOKENS = 100
ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 256}
GROUPED = ATTENTION | {"num_key_value_heads": 2, "head_dim": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(base: float, **settings: Any) -> dict[str, Any]:
    """Return the setting of rotary positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **settings}}


CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": ATTENTION | {"model_type": "gpt_neox"} | rope(5e4, partial_rotary_factor=0.5),
    "llama": GROUPED | rope(1e6),
    "llama, llama3": GROUPED | rope(5e5, **LLAMA3),
    "llama, linear": GROUPED | rope(1e4, rope_type="linear", factor=4.0),
    "llama, yarn": GROUPED | rope(1e6, **YARN),
    "qwen3": GROUPED | rope(1e6),
    "qwen3, yarn": GROUPED | rope(1e6, **YARN),
    "nanochat": GROUPED | rope(1e5),
    "resonance": {"num_resonators": 16},
    "ten": {"num_eigenstates": 16, "chunk_size": 16},
}
COMMON = {"max_position_embeddings": 128, "hidden_size": 128, "num_hidden_layers": 3}
RUN = """
run: {{name: "{name}", steps: 1, device: cpu, directory: runs}}
model: {{preset: "{name}.json", sequence_length: 128, vocabulary_multiple: 64}}
batch: {{micro_batch_size: 1, gradient_accumulation_steps: 1}}
data: {{source: text, cache: cache, {tokenizer}}}
optimizer: {{lr: 1.0e-3}}
precision: {{dtype: fp32}}
zero: {{stage: 1}}
checkpoint: {{interval: 1, mirror: null, export_final: false}}
evaluation: {{interval: 0}}
"""
# Run by each reader, with the model's folder or file, where to write, and the number of tokens.
READ = """
import sys, numpy, torch, transformers
ids = torch.arange(int(sys.argv[3]))[None] * 7919 % 50257
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    numpy.save(sys.argv[2], model.float().eval()(ids).logits[0].numpy())
"""
READ_GGUF = """
import sys, numpy, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, logits_all=True, verbose=False, type_k=0, type_v=0)
model.eval([n * 7919 % 50257 for n in range(int(sys.argv[3]))])
numpy.save(sys.argv[2], numpy.array(model.scores[: int(sys.argv[3])]))
"""


def main() -> None:
    """Export every family, read each export by all readers, and print the table."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--bpe-folder", type=Path)
    parser.add_argument("--work", type=Path, default=WORK / "export_readers")
    chosen = parser.parse_args()
    work = chosen.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    old, llama, source = work / "transformers4", work / "llama-cpp", work / "source"
    bpe = None if chosen.bpe_folder is None else chosen.bpe_folder.absolute()
    if not old.exists():
        pip("install", "--target", old, *OLD)
    if bpe is not None and not llama.exists():
        pip("download", "--no-binary", "llama-cpp-python", "-d", source, LLAMA[0])
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        pip("install", "--target", llama, *LLAMA)
    found: dict[str, dict[str, str]] = {}
    for case, shape in CASES.items():
        name = case.replace(", ", "_")
        folder = export(name, shape, work=work, bpe=bpe)
        row = found[case] = {"transformers 5": read(READ, folder, [], name, work)}
        row["transformers 4.57"] = read(READ, folder, [old], f"{name}.4", work)
        if bpe is not None:
            (convert,) = source.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
            words = ["-P", convert, folder, "--outfile", work / f"{name}.gguf", "--outtype", "f32"]
            said = python(*words, first=[convert.parent / "gguf-py", convert.parent, old, llama])
            gguf = f"{name}.gguf"
            row["llama.cpp"] = said or read(READ_GGUF, work / gguf, [llama], gguf, work)
        say(f"{case:14s} " + "  ".join(f"{reader}: {what}" for reader, what in row.items()))
    write_report(chosen, found)


def pip(*words: str | Path) -> None:
    """Let pip fetch packages without those that they need: this environment has them."""
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", words[0], "--no-deps", *words[1:]], check=True
    )


def export(name: str, shape: dict[str, Any], *, work: Path, bpe: Path | None) -> Path:
    """Train a model for a step and export it; return the folder."""
    folder = work / f"{name}-model"
    if folder.exists():
        return folder
    sizes = {} if name == "gpt2" else {"model_type": name.partition("_")[0], **COMMON}
    sizes |= {"vocab_size": 50257, "initializer_range": 0.08}
    tokenizer = "tokenizer: bytes" if bpe is None else f'tokenizer: gpt2, bpe_folder: "{bpe}"'
    (work / f"{name}.json").write_text(json.dumps(sizes | shape))
    (work / f"{name}.yaml").write_text(RUN.format(name=name, tokenizer=tokenizer))
    commands: list[list[str | Path]] = [
        ["train", "--config", f"{name}.yaml"],
        ["checkpoints", "export", "latest", folder, "--run", name, "--dtype", "fp32"],
    ]
    if not (work / "text").exists():
        (work / "readme.txt").write_bytes((ROOT / "README.md").read_bytes())
        options = ["bytes"] if bpe is None else ["gpt2", "--bpe-folder", bpe]
        text = ["prepare_data", "tokenize", "readme.txt", "--out", "text", "--tokenizer"]
        commands.insert(0, [*text, *options])
    for words in commands:
        if failed := python("-P", "-m", "refocused", *words, first=[], cwd=work):
            raise SystemExit(f"{name}: {failed}")
    return folder


def read(script: str, model: Path, first: list[Path], name: str, work: Path) -> str:
    """Let a reader write its logits; return how they differ from those of transformers 5."""
    import numpy as np

    file = work / f"{name}.npy"
    if failed := python("-P", "-c", script, model, file, str(TOKENS), first=first):
        return failed
    found, wanted = np.load(file), np.load(work / f"{name.partition('.')[0]}.npy")
    same = int((found.argmax(-1) == wanted.argmax(-1)).sum())
    return f"argmax {same} of {TOKENS}, {np.abs(found - wanted).max() / np.abs(wanted).max():.1e}"


def python(*words: str | Path, first: list[Path], cwd: Path | None = None) -> str:
    """Run Python with folders first on its path; return how it failed, or nothing."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, first))}
    variables |= {"DS_ACCELERATOR": "cpu", "HF_MODULES_CACHE": str(WORK / "modules")}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().strip()
    return f"FAILS: {said.splitlines()[-1]:.200}" if done.returncode else ""


if __name__ == "__main__":
    main()
