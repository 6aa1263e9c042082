"""Run what `quality.py` trains, and score it: losses by one function, and words of samples."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from measuring import ROOT
from torch import Tensor

import refocused

WINDOWS_AT_ONCE = 256
PROMPT, SAMPLES, SAMPLE_BYTES = "def ", 20, 400
WORD = re.compile(r"[A-Za-z]{3,}")


def mean_loss(logits_of: Callable[[Tensor], Tensor], ids: np.ndarray, *, length: int) -> float:
    """Return the mean loss in nats of every id but the first, in windows one behind the other.

    Args:
        logits_of: Ids `[B, T]` to logits `[B, T, V]`.
        ids: The whole text `[n]`.
        length: Of a window; the last one is shorter.
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
        for window, wanted in zip(inputs, labels, strict=True):
            if wanted.numel():
                logits = logits_of(window).float().flatten(0, 1)
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


def share_of_known_words(run: str, source: Path, *, temperature: float) -> tuple[float, int]:
    """Return the share of the samples' words that the validation text has, and their number.

    The samples are those of the product's command. A word has three letters or more; the last of a
    sample may be cut off and is left out.
    """
    known = set(WORD.findall(_text(source, "val")))
    script = str(ROOT / "launch" / "generate.py")
    options = ["--run", run, "--tokens", str(SAMPLE_BYTES), "--samples", str(SAMPLES), "--json"]
    done = subprocess.run(
        [sys.executable, script, "final", PROMPT, *options, "--temperature", str(temperature)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers = json.loads(done.stdout)["answers"]
    written = [re.sub(r"[A-Za-z]+\Z", "", one["text"]) for one in answers]
    words = [word for text in written for word in WORD.findall(text)]
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
