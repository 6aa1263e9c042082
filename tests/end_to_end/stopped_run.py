"""A run of two ranks that is stopped in the middle: settings, data, progress."""

from pathlib import Path

from ranks import metrics, write_tokens
from tiny import tiny_run

STEPS = 40
SETTINGS = [
    "--config",
    "tiny.yaml",
    f"run.steps={STEPS}",
    "checkpoint.mirror=null",
    "checkpoint.interval=0",  # saved because of the stop only
    # A validation of a few seconds, so that a signal can come in the middle of it; not due in
    # most tests.
    "data.validation_fraction=0.5",
    "evaluation.sequences=1500",
]
RUN = Path("runs") / "tiny"


def prepared(folder: Path) -> Path:
    tiny_run(folder)
    write_tokens(folder / "tokens", shards=3, tokens=40_000, vocabulary=512)
    return folder


def last_step(run: Path) -> int:
    return max(metrics(run), default=0)
