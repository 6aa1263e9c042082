"""The folders in which the transcripts run."""

import dataclasses
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints.step_samples import flip_byte, make_readable_step, make_step
from commands.run_samples import TINY_RUN, SampleRun, Terminal
from commands.trained_run import write_run
from data.text_samples import random_texts, tiny_bpe, write_jsonl
from end_to_end.tiny import tiny_run
from monitor.watched_run import GPU, NOW, WatchedRun, new_run
from ranks import write_tokens

from refocused.bucket.folder import DirectoryBucket
from refocused.commands import launch as launching
from refocused.config.data import DataConfig
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.doctor import early, examination, machine, run_fits
from refocused.metrics.jsonl import JsonLines
from refocused.monitor.sampler import gpu_reader
from refocused.system.hardware import FreeMemory
from refocused.system.processes import this_process


@dataclasses.dataclass
class Scene:
    """What the next command reads, and what statements of a transcript may use."""

    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    stdin: Any = None

    def type(self, text: str, *, at_terminal: bool = True) -> None:
        """Let the next command read a text."""
        stream = Terminal(text) if at_terminal else io.TextIOWrapper(io.BytesIO(text.encode()))
        self.stdin = stream


def checkpoints(patch: pytest.MonkeyPatch) -> Scene:
    """A run with checkpoints on the disk and in the mirror, and one that has not begun."""
    run = SampleRun(Path("runs/one"), Path("bucket"), capture=None)
    run.checkpoints.mkdir(parents=True)
    facts = {"best_loss": 1.9, "best_step": 9000, "seconds": 5400.0, "cost_usd": 12.5}
    losses = {"validation_loss": 2.0, "bits_per_byte": 0.75}
    run.mirror(run.save_readable(9500, **losses, **facts), keep=False)
    settings: dict[str, object] = {"optimizer": {"lr": 0.0006}}
    run.mirror(run.save_readable(10000, settings=settings, loss=2.8702))
    (run.save(10500).path / "trainer.json").unlink()
    part = run.checkpoints / ".tmp-checkpoint_step_11000-ab"
    part.mkdir()
    (part / "part").write_bytes(b"x" * 5000)
    metrics = JsonLines(run.folder / "logs" / "training_metrics.jsonl")
    for step, loss in ((1000, 3.0), (2000, 2.0), (3000, 1.0), (2000, 2.2)):  # it went back
        metrics.write({"kind": "step", "step": step, "loss": loss})
    metrics.write({"kind": "validation", "step": 2000, "validation_loss": 2.4})
    metrics.close()
    JsonLines(Path("other/new/logs/training_metrics.jsonl")).close()
    make_readable_step(Path("other/two/checkpoints"), 5)
    return Scene({"run": run, "flip_byte": flip_byte, "make_step": make_step, "Path": Path})


def prepare_data(patch: pytest.MonkeyPatch) -> Scene:
    """Texts, and a small byte-pair encoding."""
    write_jsonl(Path("texts.jsonl"), random_texts(50))
    tiny_bpe(Path("bpe"))
    return Scene()


def init(patch: pytest.MonkeyPatch) -> Scene:
    """A folder of tokens, one of texts, and a run file that must stay."""
    Path("tokens").mkdir()
    ids = np.random.default_rng(1).integers(0, 251, 200_000)
    np.save("tokens/web_train_000000.npy", ids.astype(np.uint16))
    Path("web").mkdir()
    Path("web/a.txt").write_text("text")
    Path("old.yaml").write_text("mine: true\n")
    return Scene()


def estimate_cost(patch: pytest.MonkeyPatch) -> Scene:
    """A task file, and a run that was stopped half way."""
    item = {"ctx": "c" * 20, "endings": ["e" * 11, "f" * 31], "label": 0}
    Path("mine.jsonl").write_text(f"{json.dumps(item)}\n" * 7)
    write_run(Path.cwd(), "stopped")
    return Scene()


def doctor(patch: pytest.MonkeyPatch) -> Scene:
    """A tiny run on a machine of 16 cores, without trackers, beside a folder without a model."""
    tiny_run(Path.cwd())
    versions = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    patch.setattr(machine, "probe_packages", lambda: machine.Packages(versions, (), {}))
    patch.setattr(machine, "COMPILERS", {"C": ("sh",), "ninja": ("sh",)})
    patch.setattr("platform.python_version", lambda: "3.12.1")
    patch.setattr("os.sched_getaffinity", lambda _process: range(16))
    patch.setattr("resource.getrlimit", lambda _limit: (20_000, 20_000))
    patch.setattr(machine, "probe_gpus", lambda *_, **__: machine.Gpus(note="no driver"))
    patch.setattr(run_fits, "free_bytes", lambda _folder: 10**12)
    patch.setattr(examination, "memory_now", lambda: FreeMemory(10**11, 10**11, 0))
    for package in ("wandb", "tensorboard"):
        patch.setitem(sys.modules, package, None)
    Path("other").mkdir()
    Path("other/config.json").write_text("{}")
    return Scene()


def models(patch: pytest.MonkeyPatch) -> Scene:
    """A model of bytes that says `a`, one trained on shorter texts, tasks, a broken checkpoint."""
    from evaluate.harness import bytes_model

    network, tokenizer = bytes_model()
    for tensor in network.state_dict().values():
        tensor.zero_()
    network.transformer.ln_f.bias.data[0] = 1.0
    network.transformer.wte.weight.data[ord("a"), 0] = 20.0
    network.save_pretrained("model")
    tokenizer.save_pretrained("model")
    shutil.copytree("model", "short")
    config = json.loads(Path("short/config.json").read_text())
    Path("short/config.json").write_text(json.dumps(config | {"trained_sequence_length": 40}))
    item = {"ctx": "the cat", "endings": ["sat on", "ran"], "label": 0}
    Path("quiz.jsonl").write_text(f"{json.dumps(item)}\n" * 3)
    Path("story.txt").write_text("once upon a time " * 20)
    Path("broken.jsonl").write_text("{")
    run = SampleRun(Path("runs/one"), Path("bucket"), capture=None)
    (run.save(5).path / "model.json").unlink()
    run.save_readable(10)
    Path("half").mkdir()
    Path("half/config.json").write_text('{"model_type": "gpt2"}')
    Path("latin.txt").write_bytes(b"d\xe9j\xe0")
    Path("blank.txt").write_text("\n\n")
    return Scene({"run": run})


def monitor(patch: pytest.MonkeyPatch) -> Scene:
    """The run `one`, which this process trains, and one that has ended."""
    run, older = new_run(Path("runs")), new_run(Path("runs"), "older")
    run.begin(pid=this_process().pid, pid_started=this_process().started)
    run.gpus(GPU)
    older.begin(run="older", status="finished", exit_code=0)
    os.utime(older.folder / "state.json", (1, 1))
    os.utime(older.folder, (1, 1))
    return Scene({"run": run, "dead": WatchedRun(Path("runs/dead"))})


def compare(patch: pytest.MonkeyPatch) -> Scene:
    """Runs of two rates, one of another tokenizer, one without a step, and a folder of none."""
    Path("runs/nothing").mkdir(parents=True)
    for name, rate, loss, tokenizer, seen in (
        ("one", 0.001, 3.0, "gpt2", "abc"),
        ("two", 0.002, 2.75, "gpt2", "abc"),
        ("bytes", 0.001, 1.0, "bytes", "def"),
    ):
        run = new_run(Path("runs"), name)
        run.state(step=1000, status="finished", run=name, bits_per_byte=loss / 4)
        settings = f"run: {{name: {name}}}\noptimizer: {{lr: {rate}}}\n"
        (run.folder / "run.yaml").write_text(f"{settings}data: {{tokenizer: {tokenizer}}}\n")
        setup = {"git": name, "data_fingerprint": seen, "hosts": ["node1"], "command": name}
        run.line("events", NOW, {"kind": "setup", **setup})
        for step in range(50, 1001 if name == "one" else 501, 50):
            at = {"step": step, "tokens": step * 1000}
            line = {"kind": "step", "loss": 0.5, "loss_mean": loss + 50 / step, **at}
            run.line("training_metrics", NOW, line)
            if step % 200 == 0:
                validation = {"validation_loss": loss + 10 / step, "validation_set": seen}
                run.line("training_metrics", NOW, {"kind": "validation", **validation, **at})
        accuracy = {"value": loss / 10, "standard_error": 0.02}
        tasks = {"piqa": {"acc": accuracy}, "mine": {"acc": {"value": rate * 100}}}
        run.line("training_metrics", NOW, {"kind": "tasks", "step": 400, "tasks": tasks})
    new_run(Path("runs"), "new").state(step=0, status="failed", run="new", tokens=0, loss=None)

    def tear(file: str) -> None:
        with Path(file).open("a") as lines:
            lines.write('{"kind": "step", "st\n')

    return Scene({"Path": Path, "tear": tear})


def train(patch: pytest.MonkeyPatch) -> Scene:
    """Run files and data of a launch that must not start: nothing can be started."""
    patch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    patch.setattr(launching, "Supervisor", None)
    patch.setattr(launching, "gpu_capabilities", lambda: [])
    patch.setattr(early, "memory_now", lambda: FreeMemory(10**10, 10**10, 0))
    Path("tiny.yaml").write_text(TINY_RUN)
    Path("empty").mkdir()
    for name, largest in (("tokens", 511), ("large", 600), ("prepared", 600)):
        write_tokens(Path(name), shards=1, tokens=1000, vocabulary=largest + 1)
        np.save(f"{name}/last.npy", np.full(1000, largest, np.uint16))
    Path("large/shard_000.npy").unlink()
    bucket = DirectoryBucket(Path("prepared"))  # its manifest knows the largest id of each file
    manifest = build_manifest(bucket, DataConfig(source="prepared"), cache_file=None)
    ids = [dataclasses.replace(shard, max_id=600 - n) for n, shard in enumerate(manifest.shards)]
    write_manifest(bucket, dataclasses.replace(manifest, shards=tuple(ids)))
    return Scene()


def speedrun(patch: pytest.MonkeyPatch) -> Scene:
    """Texts, on a machine without GPUs; `eight_gpus()` gives it some."""
    write_jsonl(Path("texts.jsonl"), random_texts(50))
    Path("empty").mkdir()
    patch.setattr(launching, "gpu_capabilities", lambda: [])

    def eight_gpus() -> None:
        patch.setattr(launching, "gpu_capabilities", lambda: [(9, 0)] * 8)
        patch.setattr(gpu_reader, "gpu_names", lambda: ["NVIDIA H100 80GB HBM3"] * 8)

    return Scene({"eight_gpus": eight_gpus})


SCENES: dict[str, Callable[[pytest.MonkeyPatch], Scene]] = {
    "checkpoints": checkpoints,
    "compare": compare,
    "prepare_data": prepare_data,
    "init": init,
    "estimate_cost": estimate_cost,
    "doctor": doctor,
    "evaluate": models,
    "generate": models,
    "monitor": monitor,
    "train": train,
    "speedrun": speedrun,
}
