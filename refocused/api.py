"""What a notebook or a script imports; it calls what the commands call."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.resume.catalog import Catalog, CatalogEntry
from refocused.commands.estimate_cost import GPU, estimate_of
from refocused.commands.run_selection import (
    RunChoice,
    catalog_of,
    find_run,
    model_source,
    whole_steps,
)
from refocused.config.load_run import load_run
from refocused.config.optimization import Dtype
from refocused.monitor.run_reader import RunReader
from refocused.system.errors import ConfigError, ExitCode, TrainingError, local_path
from refocused.tokenizers.encoders import TokenizerChoice

Overrides = Mapping[str, object]  # settings by name, as {"run.steps": 100}
FAILURES = {ExitCode.FAILED, ExitCode.WRONG_USE, ExitCode.CHECK_FAILED, ExitCode.HUNG}
POLL_SECONDS = 0.2
SHOWN_LINES = 12  # of a failed run's output, in the error


def load(
    run_or_path: str | Path,
    checkpoint: str | int = "best",
    *,
    device: str | None = None,
    dtype: Dtype | None = None,
    tokenizer: str | None = "own",
) -> tuple[Any, Any]:
    """Load a model for inference, and its tokenizer; download what is only in a bucket.

    Args:
        run_or_path: A run's folder or name; or the folder or `gs://` address of a checkpoint (also
            `gs://bucket/prefix/RUN/checkpoints/best`) or of an exported model.
        checkpoint: Of a run: `best`, `latest`, `final`, a step or a name.
        device: `cpu`, `cuda`, `cuda:1`; None: `cuda` where there is a GPU.
        dtype: `bf16`, `fp16` or `fp32`; None: what GPUs compute in fastest, and fp32 on CPUs.
        tokenizer: `own`: that of the model; `bytes`, `hub:NAME` or a `tokenizer.json`; None: none.

    Returns:
        transformers' model, in evaluation mode on the device, and transformers' tokenizer or None.

    Raises:
        ConfigError: There is no such run or device.
        CheckpointError: There is no such model, it is damaged, or has no tokenizer.
    """
    model, choice, folder = str(run_or_path), RunChoice(), local_path(run_or_path)
    if "://" not in model and (not folder.is_dir() or (folder / "checkpoints").is_dir()):
        model, choice = str(checkpoint), RunChoice(str(find_run(model, option=None)))
    elif "://" not in model:
        model = str(folder.absolute())
    from refocused.evaluate.load_model import model_for_inference  # imports torch

    loaded = model_for_inference(
        model_source(model, choice),
        device=device,
        dtype=dtype,
        tokenizer=None if tokenizer in (None, "own") else TokenizerChoice(tokenizer),
        without_tokenizer=tokenizer is None,
    )
    return loaded.network, loaded.tokenizer


class CheckpointManager:
    """The checkpoints of a run, on this disk and in its bucket.

    Args:
        local: The run's folder or name; with a bucket, it need not exist.
        bucket: `gs://bucket/prefix` or a folder that holds mirrored runs; None: the run's own.
        prefix: Where in the bucket the checkpoints are; empty: where a mirror puts the run's.

    Raises:
        ConfigError: There is no such run.
    """

    def __init__(self, local: str | Path, bucket: str | None = None, prefix: str = "") -> None:
        run = find_run(str(local), must_exist=bucket is None, option=None)
        self._catalog = catalog_of(run, RunChoice(bucket=bucket))
        if bucket is not None and prefix:
            self._catalog = Catalog(self._catalog.local, open_bucket(bucket), prefix.strip("/"))

    def list_checkpoints(self) -> list[CatalogEntry]:
        """List the checkpoints, the newest last; raise BucketError if the bucket cannot be read."""
        return self._catalog.entries()

    def download_checkpoint(self, checkpoint: str | int = "latest", *, threads: int = 8) -> Path:
        """Return the folder of a checkpoint, every byte verified; download what is not whole here.

        `checkpoint` is `latest`, `best`, `final`, a step or a name. Raises CheckpointError if there
        is none, or only a damaged one, and BucketError if it cannot be downloaded.
        """
        name = self._catalog.resolve(str(checkpoint)).name
        step = self._catalog.fetch(name, threads=threads)
        if self._catalog.problems(name):
            step = self._catalog.fetch(name, threads=threads, replace=True)
        return step.path


def estimate_run(
    config: str | Path,
    *,
    gpus: int = 8,
    gpu: str = GPU,
    per_hour_usd: float | None = None,
    budget_usd: float | None = None,
    overrides: Overrides | None = None,
) -> dict[str, Any]:
    """Estimate a run's hours, dollars, memory and storage, as `estimate_cost --json` prints them.

    `config` is a run file or the name of a shipped one. `per_hour_usd` is the price of all GPUs
    together; without it, and without a budget, those of the run file are taken. Raises ConfigError
    if a setting is wrong or the run cannot be made on these GPUs.
    """
    estimate, fix = estimate_of(
        config,
        _words(overrides),
        gpus=gpus,
        gpu=gpu,
        per_hour_usd=per_hour_usd,
        budget_usd=budget_usd,
    )
    return {**estimate.as_record(), "fix": fix}


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that `start_training` started. It continues if this process ends."""

    folder: Path  # of the run
    log: Path  # what it prints
    process: subprocess.Popen[bytes]  # its supervisor

    def status(self) -> dict[str, Any]:
        """Return what `monitor --json` prints: step, losses, hours, dollars, GPUs, alarms."""
        return RunReader(self.folder, saved_steps=whole_steps).read(time.time()).as_record()

    def stop(self) -> None:
        """Ask the run to save and stop; the same call of `start_training` resumes it."""
        self.process.terminate()

    def wait(self, *, show: bool = True) -> ExitCode:
        """Wait for the end, and print what the run prints; Ctrl+C saves and stops the run.

        Returns OK, or with the state saved: LIMIT_REACHED (money or time), NOT_MIRRORED,
        INTERRUPTED. Raises ConfigError if the run cannot start as it is, TrainingError if it fails.
        """
        with self.log.open(errors="replace") as log:
            code = None
            while code is None:
                try:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = self.process.wait(POLL_SECONDS)
                    print(log.read() if show else "", end="", flush=True)
                except KeyboardInterrupt:
                    self.stop()
        if code in set(ExitCode) - FAILURES:
            return ExitCode(code)
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        kind = ConfigError if code == ExitCode.WRONG_USE else TrainingError
        raise kind(f"{self.folder.name}: exit code {code}. The end of {self.log}:\n{last}")


def start_training(
    config: str | Path = "demo",
    overrides: Overrides | None = None,
    *,
    name: str | None = None,
    resume: str = "auto",
    ranks: int | None = None,
    wait: bool = True,
) -> TrainingRun:
    """Train in processes of their own, under the supervisor of `refocused launch`.

    `config` is a run file or the name of a shipped one. None stands for the run file's `name`, and
    for a rank on each GPU, or two without any. `resume` is `auto` (the newest checkpoint, if any),
    `latest`, `best`, `none`, a step or a name. With `wait`, print what the run prints until its
    end. Raises ConfigError if a setting is wrong, and as `TrainingRun.wait`.
    """
    words = _words(overrides)
    run = load_run(config, words, name=name).config.run
    command = [sys.executable, "-P", "-m", "refocused", "launch", "--config", str(config)]
    # No pipe, which would break when this process ends.
    with tempfile.NamedTemporaryFile(suffix=f"-{run.name}.log", delete=False) as log:
        process = subprocess.Popen(
            [*command, "--run", run.name, "--resume", resume, *words],
            env={**os.environ, **({} if ranks is None else {"RANKS": str(ranks)})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = TrainingRun(Path(run.directory) / run.name, Path(log.name), process)
    if wait:
        started.wait()
    return started


def _words(overrides: Overrides | None) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in (overrides or {}).items()]
