"""Whole runs of a certificate: data wait, saves, and a resume compared with a run without one."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import ROOT, Record

from refocused.metrics.history import METRICS_FILE
from refocused.metrics.run_time import PERFORMANCE_FILE

SHARDS, MICRO = 4, 4
RUN_SECONDS = 1200
RUN_STEPS, SAVED_AT = 20, 10  # the second run is interrupted there


def resumed_and_uninterrupted(
    folder: Path, *, model: str, length: int, gpus: int, deterministic: bool, tiny: bool
) -> Record:
    """Train once in one session and once in two; return what both tell.

    Without `gpus`, two ranks train on the CPU; a `tiny` run takes small passes and float32.
    """
    steps, saved_at = RUN_STEPS, SAVED_AT
    windows = (1 if tiny else MICRO) * max(2, gpus) * 2
    _write_tokens(folder / "tokens", windows=steps * windows, length=length)
    common = {
        "run": {
            "directory": str(folder / "runs"),
            "device": "cuda" if gpus else "cpu",
            "deterministic": deterministic,
        },
        "model": {"preset": model, "sequence_length": length},
        "batch": {"micro": 1 if tiny else MICRO, "windows": windows},
        "data": {"source": str(folder / "tokens"), "cache": str(folder / "cache")},
        "optimizer": {"lr": 3e-4},
        "schedule": {"kind": "constant"},
        "precision": {"dtype": "fp32" if tiny else "bf16"},
        "zero": {"stage": 3},
        "checkpoint": {"interval": saved_at, "async": True, "export_final": False},
        "evaluation": {"interval": 0, "sample_prompt": None},
        "log": {"interval": 1},
    }
    began = time.monotonic()
    whole = _train(folder, common, name="whole", steps=steps, gpus=gpus)
    seconds = time.monotonic() - began
    _train(folder, common, name="resumed", steps=saved_at, gpus=gpus)
    resumed = _train(folder, common, name="resumed", steps=steps, gpus=gpus)
    losses = [
        {row["step"]: row["loss"] for row in _rows(run / METRICS_FILE) if row.get("loss")}
        for run in (whole, resumed)
    ]
    spent = _rows(whole / PERFORMANCE_FILE)
    saves = [row for row in spent if row.get("save_write_seconds") is not None]
    last = _rows(whole / METRICS_FILE)[-1]
    return {
        "step_ms": 1000 * last["step_seconds"],
        "mfu": last.get("mfu_fraction"),
        "data_wait": last.get("data_wait_fraction"),
        "save_seconds": saves[-1]["save_write_seconds"] if saves else None,
        "stall_seconds": saves[-1]["save_stall_seconds"] if saves else None,
        "run_seconds": seconds,
        "same_losses": losses[0] == losses[1] and len(losses[0]) == steps,
        "same_files": _digests(whole, steps) == _digests(resumed, steps),
    }


def _train(folder: Path, common: Record, *, name: str, steps: int, gpus: int) -> Path:
    """Run the train command on all ranks; return the run's folder."""
    from ranks import TRAIN, Ranks

    file = folder / f"{name}.yaml"
    settings = common | {"run": common["run"] | {"name": name, "steps": steps}}
    file.write_text(json.dumps(settings))  # JSON is YAML
    ended = Ranks(
        gpus or 2,
        [str(TRAIN), "--config", str(file)],
        folder=folder,
        environment={"PYTHONPATH": str(ROOT), **({} if gpus else {"DS_ACCELERATOR": "cpu"})},
    ).wait(RUN_SECONDS)
    if any(ended.codes):
        raise RuntimeError(f"{name} ended with {ended.codes}: {ended.everything[-600:]}")
    return folder / "runs" / name


def _digests(run: Path, step: int) -> dict[str, Any]:
    """Return the checksums of a checkpoint's files without times and names."""
    (manifest,) = run.glob(f"checkpoints/checkpoint_step_*{step}/manifest.json")
    files = json.loads(manifest.read_text())["files"]
    return {name: file["crc32c"] for name, file in files.items() if name.endswith(".pt")}


def _rows(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _write_tokens(folder: Path, *, windows: int, length: int) -> None:
    folder.mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, 255, windows * (length + 1), dtype=np.uint16)
    for number, part in enumerate(np.array_split(ids, SHARDS)):
        np.save(folder / f"shard_{number}.npy", part)
    os.sync()
