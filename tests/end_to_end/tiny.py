"""A run small enough for a test: two blocks of width 64 and generated tokens."""

import json
from pathlib import Path
from typing import Any

import torch
from ranks import metrics, until, write_tokens

from refocused.system.locks import FileLock

RUN = """
run: {name: tiny, steps: 20, directory: runs}
model: {preset: gpt2_tiny, sequence_length: 32, dropout: 0.1}
batch: {micro_batch_size: 2, gradient_accumulation_steps: 2}
data: {source: tokens, cache: cache, validation_fraction: 0.1}
optimizer: {lr: 3e-3}
schedule: {warmup_steps: 5}
precision: {dtype: fp32}
checkpoint: {interval: 10, mirror: mirror, export_final: false}
evaluation: {interval: 10, sequences: 8}
log: {interval: 1, sample_seconds: 0}
"""


def tiny_run(folder: Path) -> Path:
    """Write the run file and its data; return the run file."""
    write_tokens(folder / "tokens", shards=3, tokens=4000, vocabulary=512)
    file = folder / "tiny.yaml"
    file.write_text(RUN)
    return file


def losses(run: Path) -> dict[int, str]:
    """Return a run's training losses by step, to the last bit."""
    return {step: float(str(record["loss"])).hex() for step, record in metrics(run).items()}


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) if isinstance(left, int | float | str | bool) else True


def log_lines(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of one of a run's logs."""
    file = run / "logs" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def damage(folder: Path, *steps: int) -> None:
    """Flip a byte of each of these checkpoints of the tiny run."""
    for step in steps:
        zero = folder / "runs" / "tiny" / "checkpoints" / f"checkpoint_step_{step}" / "zero"
        damaged = sorted(zero.glob("*rank_1*optim*.pt"))[0]
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)


def wait_for_the_mirror(run: Path) -> None:
    """Wait for the mirror of a run that ended, before files are copied, compared or removed.

    It outlives the run: it copies what a kill left, and the last lines of the logs.
    """
    lock = FileLock(run / "mirror.lock")  # held by the mirror until its end
    until(lock.acquire, said=(run / "logs" / "mirror.log").read_text)
    lock.release()


# A run of two ranks that is stopped in the middle.
STEPS = 40
RUN_FOLDER = Path("runs") / "tiny"
STOPPED = [
    *("--config", "tiny.yaml", f"run.steps={STEPS}", "checkpoint.mirror=null"),
    "checkpoint.interval=0",  # saved because of the stop only
    # A validation of a few seconds, so that a signal can come in the middle of it; not due in
    # most tests.
    *("data.validation_fraction=0.5", "evaluation.sequences=1500"),
]


def run_to_stop(folder: Path) -> Path:
    """Write the run to stop and its data, and return the folder."""
    tiny_run(folder)
    write_tokens(folder / "tokens", shards=3, tokens=40_000, vocabulary=512)
    return folder


def last_step(run: Path) -> int:
    return max(metrics(run), default=0)
