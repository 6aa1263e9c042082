"""Run what `quality.py` trains, and score it: losses by one function, and words of samples."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import ROOT
from torch import Tensor

import refocused
from refocused.config.yaml_source import parse_yaml
from refocused.train.step.evaluation import TextSampler

LENGTH = 64  # nanoGPT's `block_size`
NANOGPT_STEPS, NANOGPT_BATCH = 2000, 12
# The last command of the section "I only have a macbook" in nanoGPT's README.
NANOGPT_SETTING = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    f"--log_interval=1 --block_size={LENGTH} --batch_size={NANOGPT_BATCH} --n_layer=4 --n_head=4 "
    f"--n_embd=128 --max_iters={NANOGPT_STEPS} --lr_decay_iters={NANOGPT_STEPS} --dropout=0.0"
)
# Its script, whose seed is fixed, with another one.
SEEDED = (
    "import functools, runpy, sys, torch; sys.argv[0] = 'train.py'; "
    "torch.manual_seed = functools.partial(lambda seed, _: torch.default_generator.manual_seed("
    "seed), int(sys.argv.pop(1))); runpy.run_path('train.py', run_name='__main__')"
)
WINDOWS_AT_ONCE = 256
PROMPT, SAMPLES, SAMPLE_BYTES = "def ", 20, 400
WORD = re.compile(r"[A-Za-z]{3,}")


def mean_loss(logits_of: Callable[[Tensor], Tensor], ids: np.ndarray, *, length: int) -> float:
    """Return the mean loss in nats of every id but the first, in sequences one behind the other.

    Args:
        logits_of: Ids `[B, T]` to logits `[B, T, V]`.
        ids: The whole text `[n]`.
        length: Of a sequence; the last one is shorter.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))
    whole = (len(tokens) - 1) // length * length
    inputs, labels = (
        list(torch.split(tokens[i : whole + i].view(-1, length), WINDOWS_AT_ONCE)) for i in (0, 1)
    )
    inputs.append(tokens[None, whole:-1])
    labels.append(tokens[None, whole + 1 :])
    total = 0.0
    with torch.no_grad():
        for sequence, wanted in zip(inputs, labels, strict=True):
            if wanted.numel():
                logits = logits_of(sequence).float().flatten(0, 1)
                losses = torch.nn.functional.cross_entropy(
                    logits, wanted.flatten(), reduction="none"
                )
                total += float(losses.double().sum())
    return total / (len(tokens) - 1)


def loss_of_nanogpt(code: Path, checkpoint: Path, ids: np.ndarray) -> tuple[float, int]:
    """Return the loss and the parameters of a checkpoint of nanoGPT, whose `model.py` is `code`."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", code)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    # With targets it returns the logits of every token.
    loss = mean_loss(lambda x: model(x, x)[0], ids, length=saved["model_args"]["block_size"])
    return loss, sum(p.numel() for p in model.parameters())


def loss_of_ours(run: Path, ids: np.ndarray, *, length: int) -> tuple[float, int]:
    """Return the loss and the parameters of a run's last checkpoint."""
    model, _ = refocused.load(run, "final", dtype="fp32", tokenizer=None)
    loss = mean_loss(lambda x: model(x, use_cache=False).logits, ids, length=length)
    return loss, sum(p.numel() for p in model.parameters())


def claims_of_words(run: Path, source: Path) -> list[str]:
    """Return how many words of a run's samples, and of its training text, its validation has."""
    claims = [f"Of the training text's words {share_in_training_text(source):.1%} occur"]
    settings = parse_yaml((run / "run.yaml").read_text())
    own, length = settings["evaluation"]["sample_temperature"], settings["model"]["sequence_length"]
    for heat in dict.fromkeys((own, 0.8, 0.5)):
        share, count = share_of_known_words(run, source, length=length, temperature=heat)
        whose = ", its own" if heat == own else ""
        claims.append(f"Of {count:,} in 20 samples {share:.1%}, at a temperature of {heat}{whose}")
    return claims


def share_of_known_words(
    run: Path, source: Path, *, length: int, temperature: float
) -> tuple[float, int]:
    """Return the share of the samples' words that the validation text has, and their number.

    The samples are drawn as a run draws its own: from the likeliest bytes, after a context of at
    most the `length` that the model is trained on. A word has three letters or more; the last of
    a sample may be cut off and is left out.
    """
    known = set(WORD.findall(_text(source, "val")))
    model, tokenizer = refocused.load(run, "final", dtype="fp32")
    engine: Any = types.SimpleNamespace(
        weights_gathered=contextlib.nullcontext,
        next_token_logits=lambda ids: model(ids, use_cache=False).logits[:, -1],
    )
    words: list[str] = []
    for seed in range(SAMPLES):
        sampler = TextSampler(tokenizer, PROMPT, SAMPLE_BYTES, length, seed, temperature)
        with torch.no_grad():
            text = sampler.write(engine) or ""
        words += WORD.findall(re.sub(r"[A-Za-z]+\Z", "", text))
    return sum(word in known for word in words) / len(words), len(words)


def share_in_training_text(source: Path) -> float:
    """Return the share of the training text's words that the validation text has."""
    known = set(WORD.findall(_text(source, "val")))
    words = WORD.findall(_text(source, "train"))
    return sum(word in known for word in words) / len(words)


def _text(source: Path, part: str) -> str:
    files = sorted(source.glob(f"stdlib_{part}_*.npy"))
    return "".join(np.load(file).astype(np.uint8).tobytes().decode("latin-1") for file in files)


def launched(words: Sequence[str], *, folder: Path, timed: bool) -> float | None:
    """Run Python to its end; return the seconds of a timed process, on all cores, else None."""
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    variables.pop("OMP_NUM_THREADS", None)
    if not timed:
        variables["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"failed in {folder}:\n{done.stdout[-2000:]}")
    return seconds if timed else None
