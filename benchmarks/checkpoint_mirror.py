"""The price of the mirror for a training: the time of a step with it on and off, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from measuring import ROOT, Record, say

STEPS, SKIPPED, INTERVAL = 100, 20, 20  # what is left out at the start: caches and first batches
TIMEOUT_S = 600
RUN = f"""
run: {{name: NAME, steps: {STEPS}, directory: runs}}
model: {{preset: demo_gpt2, vocabulary_multiple: 64, sequence_length: 128}}
batch: {{micro: 4, accumulation: 1}}
data: {{source: tokens, cache: cache}}
optimizer: {{lr: 1e-3}}
checkpoint: {{interval: {INTERVAL}, export_final: false}}
evaluation: {{interval: 0}}
log: {{interval: {SKIPPED}}}
"""


def measure_mirror(folder: Path, repeats: int) -> list[Record]:
    """Train with the mirror on and off, in turns; return the seconds of a step, saves included."""
    from ranks import write_tokens

    folder.mkdir()
    write_tokens(folder / "tokens", shards=2, tokens=200_000, vocabulary=257)
    records = []
    for number in range(repeats):
        record: Record = {}
        # The first of a pair meets another machine than the second: take turns at that, too.
        for way in (("off", "on"), ("on", "off"))[number % 2]:
            say(f"{number + 1}/{repeats}  mirror {way}")
            record[f"step, mirror {way}"] = _step_seconds(folder, f"{way}-{number}", way == "on")
        records.append(record)
    return records


def _step_seconds(folder: Path, name: str, mirrored: bool) -> float:
    """Train once; return the time from the first counted step to the last, a step."""
    from ranks import free_port

    (folder / f"{name}.yaml").write_text(RUN.replace("NAME", name))
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), "--log_level", "error"]
    command += [str(ROOT / "launch" / "train.py"), "--config", f"{name}.yaml"]
    command += [f"checkpoint.mirror={folder / 'mirror'}"] if mirrored else []
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    trained = _seconds_trained(folder / "runs" / name / "logs" / "training_metrics.jsonl")
    return (trained[STEPS] - trained[SKIPPED]) / (STEPS - SKIPPED)


def _seconds_trained(metrics: Path) -> dict[int, float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {r["step"]: r["seconds_trained"] for r in records if r["kind"] == "step"}
