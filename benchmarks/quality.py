"""Measure what recipes reach: beside nanoGPT, optimizers, schedules, families.

    .venv/bin/python benchmarks/quality.py nanogpt --text input.txt --nanogpt FOLDER
    .venv/bin/python benchmarks/quality.py optimizers normuon schedules --text FILE [--jobs 2]

Every finished training is a line of `--lines`; the same command again continues with the others.
Ours trains by the product's command. All losses but the families' are those of one function, in
float32, over the whole validation text: the last tenth of the characters, as nanoGPT divides it.

`nanogpt` times whole processes in turns, on all cores: nanoGPT's published CPU setting, a recipe
that reaches its loss sooner, and one that takes as many tokens. The others train on one thread
each. `optimizers`, `normuon` and `schedules` try the same number of rates for each contender with
the first seed, and train the best rate with the other seeds; `families` does so at equal parameters
and tokens on the bytes of the text. Every table has minimum, median and maximum over the seeds.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import pickle
import shutil
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from families import VOCABULARY, parameters, shape_of
from measuring import (
    ROOT,
    WORK,
    Record,
    finished,
    launched,
    parser_of,
    say,
    spread,
    spread_table,
    write_report,
)
from torch import Tensor

import refocused

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
SEQUENCES_AT_ONCE = 256
GPT2 = {"model_type": "gpt2", "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": LENGTH,
    "hidden_size": 128,
    "intermediate_size": 341,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
BASE = {
    "data": {"source": "tokens", "cache": "cache", "dtype": "uint16", "validation_files": ["val*"]},
    "model": {"preset": "shape.json", "sequence_length": LENGTH, "vocabulary_multiple": 1},
    "batch": {"micro_batch_size": NANOGPT_BATCH, "gradient_accumulation_steps": 1},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
    "schedule": {"warmup_steps": 20, "min_lr_ratio": 0.0},
    "precision": {"dtype": "fp32"},
    "zero": {"stage": 0},
    "checkpoint": {"interval": 0, "export_final": False},
    "evaluation": {"interval": 0, "sequences": 20 * NANOGPT_BATCH},
    "log": {"interval": 100, "sample_seconds": 0},
}
SOONER = {"optimizer.kind": "muon", "optimizer.lr": 1e-2, "schedule.kind": "linear"}
STEPS = 400  # of AdamW in `optimizers`, and of both in `schedules`
MUON_STEPS = (268, 200, 134)
ADAMW_RATES = (3e-3, 6e-3, 1.2e-2)
MUON_RATES = (6e-3, 1.2e-2, 2.4e-2)
FAMILY_RATES = (3e-3, 6e-3)
FAMILIES = ("gpt2", "gpt_neox", "llama", "qwen3", "nanochat", "resonance", "ten")
FAMILY_STEPS, FAMILY_LENGTH, FAMILY_WINDOWS = 300, 128, 16


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of a contender; two with the same settings and seed are the same."""

    case: str
    contender: str
    seed: int
    shape: Mapping[str, Any]  # empty: nanoGPT's own
    steps: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by dotted name

    @property
    def key(self) -> str:
        """What identifies it among the lines."""
        known = dataclasses.asdict(self)
        return json.dumps({name: known[name] for name in known if name != "case"}, sort_keys=True)


class Laboratory:
    """Trains what is not among the finished lines yet, each in a folder of its own."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen

    @functools.cached_property
    def text(self) -> str:
        """The text that is trained on."""
        if self._chosen.text is None:
            raise SystemExit("--text FILE is missing: the text to train on")
        return str(self._chosen.text.read_text())

    def characters(self) -> list[str]:
        """Return the characters of the text, in the order of their ids."""
        return sorted(set(self.text))

    def all(self, trainings: Sequence[Training], *, timed: bool = False) -> list[Record]:
        """Return the records of trainings, in order; timed ones run alone."""
        with concurrent.futures.ThreadPoolExecutor(1 if timed else self._chosen.jobs) as pool:
            return list(pool.map(functools.partial(self._one, timed=timed), trainings))

    def tuned(self, training: Training, rates: Sequence[float]) -> list[Record]:
        """Try rates with the first seed; return the best one's records of all seeds."""
        tried = [
            dataclasses.replace(training, settings={**training.settings, "optimizer.lr": rate})
            for rate in rates
        ]
        losses = [record["loss"] for record in self.all(tried)]
        best = losses.index(min(losses))
        if best in (0, len(rates) - 1):
            say(f"{training.contender}: the best of its rates, {rates[best]}, is an outer one")
        return self.all(of_seeds(tried[best]))

    def _one(self, training: Training, *, timed: bool) -> Record:
        def measure() -> Record:
            folder = WORK / "quality" / f"{training.case}-{threading.get_ident()}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            run = self._nanogpt if not training.shape else self._ours
            record = run(training, folder, timed=timed)
            say(f"{training.contender}, seed {training.seed}: loss {record['loss']:.4f}")
            return {"case": training.case, **record}

        return finished(self._chosen.lines, {"key": training.key}, measure)

    def _nanogpt(self, training: Training, folder: Path, *, timed: bool) -> Record:
        copy, out = folder / "nanoGPT", folder / "out"
        shutil.copytree(self._chosen.nanogpt, copy)
        data = copy / "data" / "shakespeare_char"
        ids = self._write_tokens(data, by_bytes=False)
        names = dict(enumerate(self.characters()))
        meta = {"vocab_size": len(names), "itos": names, "stoi": {n: i for i, n in names.items()}}
        (data / "meta.pkl").write_bytes(pickle.dumps(meta))
        words = [SEEDED, str(training.seed), *NANOGPT_SETTING.split(), f"--out_dir={out}"]
        seconds = launched(["-c", *words], folder=copy, timed=timed)
        loss, size = loss_of_nanogpt(copy / "model.py", out / "ckpt.pt", ids)
        return {"loss": loss, "seconds": seconds, "steps": training.steps, "parameters": size}

    def _ours(self, training: Training, folder: Path, *, timed: bool) -> Record:
        by_bytes = training.case == "families"
        ids = self._write_tokens(folder / "tokens", by_bytes=by_bytes)
        vocabulary = VOCABULARY if by_bytes else len(self.characters())
        (folder / "shape.json").write_text(json.dumps({**training.shape, "vocab_size": vocabulary}))
        run = {"name": "run", "steps": training.steps, "seed": training.seed, "directory": "runs"}
        (folder / "run.yaml").write_text(json.dumps({**BASE, "run": run}))  # JSON is YAML
        words = [f"{name}={json.dumps(value)}" for name, value in training.settings.items()]
        script = str(ROOT / "launch" / "train.py")
        seconds = launched([script, "--config", "run.yaml", *words], folder=folder, timed=timed)
        length = training.settings.get("model.sequence_length", LENGTH)
        loss, size = loss_of_ours(folder / "runs" / "run", ids, length=length)
        rate = training.settings.get("optimizer.lr")
        figures = {"steps": training.steps, "parameters": size, "rate": rate}
        return {"loss": loss, "seconds": seconds, **figures}

    def _write_tokens(self, folder: Path, *, by_bytes: bool) -> np.ndarray:
        """Write the two parts of the text as nanoGPT does; return the ids to validate on."""
        folder.mkdir(parents=True, exist_ok=True)
        if by_bytes:
            ids = np.frombuffer(self.text.encode(), np.uint8).astype(np.uint16)
        else:
            number = {name: place for place, name in enumerate(self.characters())}
            ids = np.array([number[name] for name in self.text], np.uint16)
        training = int(len(ids) * 0.9)
        ids[:training].tofile(folder / "train.bin")
        ids[training:].tofile(folder / "val.bin")
        return ids[training:]


def main() -> None:
    """Train what is missing, print the tables and claims, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("cases", nargs="+", choices=list(CASES), help="what to measure")
    parser.add_argument("--text", type=Path, help="text to train on, as Shakespeare's plays")
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's folder")
    parser.add_argument("--lines", type=Path, default=WORK / "quality.jsonl", help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="untimed trainings at once")
    chosen = parser.parse_args()
    results: Record = {}
    for case in chosen.cases:
        rows, claims = CASES[case](Laboratory(chosen), chosen)
        if rows:
            print(spread_table(rows, title=f"{case}: over the seeds"))
        print("\n".join(claims))
        results[case] = {"rows": rows, "claims": claims}
    write_report(chosen, results)


def against_nanogpt(
    lab: Laboratory, chosen: argparse.Namespace
) -> tuple[dict[str, Record], list[str]]:
    """Measure nanoGPT and two recipes of ours, in turns."""
    contenders = (
        Training("nanogpt", "nanoGPT", 1, {}, NANOGPT_STEPS),
        Training("nanogpt", "ours, sooner", 1, LLAMA, 360, SOONER),
        Training("nanogpt", "ours, as many tokens", 1, LLAMA, NANOGPT_STEPS, SOONER),
    )
    turns = [one for turn in zip(*map(of_seeds, contenders), strict=True) for one in turn]
    records = lab.all(turns, timed=True)
    rows = {one.contender: spread(records[i :: len(contenders)]) for i, one in enumerate(turns[:3])}
    theirs, sooner, equal = rows.values()
    shares = [
        ours["seconds"] / other["seconds"]
        for other, ours in zip(records[::3], records[1::3], strict=True)
    ]
    claims = [
        f"Loss {sooner['loss']:.4f} in {statistics.median(shares):.2f} ({min(shares):.2f} to "
        f"{max(shares):.2f}) of nanoGPT's time, which reaches {theirs['loss']:.4f}",
        f"From as many tokens: {equal['loss']:.4f}",
    ]
    return rows, claims


def optimizers(lab: Laboratory, chosen: argparse.Namespace) -> tuple[dict[str, Record], list[str]]:
    """Find the steps in which Muon reaches AdamW's loss; each schedule ends at the last step."""
    adamw = lab.tuned(_cosine_adamw(), ADAMW_RATES)
    muon = _muon()
    longest = lab.tuned(muon, MUON_RATES)
    settings = {**muon.settings, "optimizer.lr": longest[0]["rate"]}
    rows = {"AdamW": spread(adamw), f"Muon, {MUON_STEPS[0]}": spread(longest)}
    for steps in MUON_STEPS[1:]:
        shorter = dataclasses.replace(muon, steps=steps, settings=settings)
        rows[f"Muon, {steps}"] = spread(lab.all(of_seeds(shorter)))
    wanted = rows["AdamW"]["loss"]
    reached = [
        row["steps"] for name, row in rows.items() if name[0] == "M" and row["loss"] <= wanted
    ]
    claim = f"Muon reaches AdamW's median loss in {min(reached) / STEPS:.2f} of its steps"
    return rows, [claim]


def normuon(lab: Laboratory, chosen: argparse.Namespace) -> tuple[dict[str, Record], list[str]]:
    """Compare NorMuon with Muon at the same length, both of them tuned."""
    settings = {**_muon().settings, "optimizer.normuon": True}
    other = dataclasses.replace(_muon(), contender="NorMuon", settings=settings)
    records = {one.contender: lab.tuned(one, MUON_RATES) for one in (_muon(), other)}
    pairs = zip(*records.values(), strict=True)
    wins = sum(new["loss"] < old["loss"] for old, new in pairs)
    rows = {name: spread(found) for name, found in records.items()}
    gap = rows["NorMuon"]["loss"] - rows["Muon"]["loss"]
    return rows, [f"NorMuon minus Muon: {gap:+.4f} nats, lower with {wins} of 3 seeds"]


def schedules(lab: Laboratory, chosen: argparse.Namespace) -> tuple[dict[str, Record], list[str]]:
    """Compare wsd with cosine at the same length, both with AdamW."""
    wsd = dataclasses.replace(
        _cosine_adamw(),
        contender="wsd",
        settings={"schedule.kind": "wsd", "schedule.decay_fraction": 0.4},
    )
    rows = {
        "cosine": spread(lab.tuned(_cosine_adamw(), ADAMW_RATES)),
        "wsd": spread(lab.tuned(wsd, ADAMW_RATES)),
    }
    return rows, [f"wsd minus cosine: {rows['wsd']['loss'] - rows['cosine']['loss']:+.4f} nats"]


def families(lab: Laboratory, chosen: argparse.Namespace) -> tuple[dict[str, Record], list[str]]:
    """Compare the families at about equal parameters, with AdamW."""
    settings = {"model.sequence_length": FAMILY_LENGTH, "batch.micro_batch_size": FAMILY_WINDOWS}
    rows = {}
    for name in FAMILIES:
        shape = shape_of(name, FAMILY_LENGTH, layers=4, width=96)
        training = Training("families", name, 1, shape, FAMILY_STEPS, settings)
        rows[name] = spread(lab.tuned(training, FAMILY_RATES))
        rows[name]["parameters"] = parameters(shape)
    return rows, []


def _cosine_adamw() -> Training:
    return Training("optimizers", "AdamW", 1, GPT2, STEPS)


def _muon() -> Training:
    return Training("optimizers", "Muon", 1, GPT2, MUON_STEPS[0], {"optimizer.kind": "muon"})


def of_seeds(training: Training) -> list[Training]:
    """Return a training with each of three seeds."""
    return [dataclasses.replace(training, seed=seed) for seed in (1, 2, 3)]


def mean_loss(logits_of: Callable[[Tensor], Tensor], ids: np.ndarray, *, length: int) -> float:
    """Return the mean loss in nats of every id but the first, in sequences one behind the other.

    Args:
        logits_of: Ids `[B, T]` to logits `[B, T, V]`.
        ids: The whole text `[n]`.
        length: Of a sequence; the last one is shorter.
    """
    tokens, total = torch.from_numpy(ids.astype(np.int64)), 0.0
    whole = (len(tokens) - 1) // length * length
    parts = [torch.split(tokens[i : whole + i].view(-1, length), SEQUENCES_AT_ONCE) for i in (0, 1)]
    pairs = [*zip(*parts, strict=True), (tokens[None, whole:-1], tokens[None, whole + 1 :])]
    with torch.no_grad():
        for inputs, labels in pairs:
            if labels.numel():
                logits = logits_of(inputs).float().flatten(0, 1)
                losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
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


Case = Callable[[Laboratory, argparse.Namespace], tuple[dict[str, Record], list[str]]]
CASES: Mapping[str, Case] = {
    "nanogpt": against_nanogpt,
    "optimizers": optimizers,
    "normuon": normuon,
    "schedules": schedules,
    "families": families,
}

if __name__ == "__main__":
    main()
