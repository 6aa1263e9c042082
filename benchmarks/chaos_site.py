"""A tiny training to be killed: its files, its store with faults, its processes, its results.

Its processes are found by a mark in their environment.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from measuring import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from fakes import Emulator, Fault, FaultProxy, Request, storage_emulator
from ranks import free_port, is_running, write_tokens

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copies import verify_remote
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.step.checkpoint_directory import (
    checkpoint_paths,
    name_of,
    read_checkpoint,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.verify import describe, verify
from refocused.system.errors import RefocusedError

MARK = "REFOCUSED_CHAOS"

SUPERVISOR, COMMAND, LAUNCHER = "supervisor", "command", "launcher"
RANK, MIRROR, SAMPLER = "rank", "mirror", "sampler"
ROLES = {  # by the first pattern that a command line has
    MIRROR: "refocused.checkpoints.mirror.mirror_loop:mirror",
    SAMPLER: "refocused.monitor.sampler.sampler:sample",
    SUPERVISOR: "refocused.commands.launch",  # of launch/train.sh
    LAUNCHER: "deepspeed.launcher.launch",  # DeepSpeed's inner one
    COMMAND: r"(^|[ /])deepspeed( |$)",
    RANK: "launch/train.py( |$)",
}
RUN = """
run: {{name: chaos, steps: {steps}, directory: runs}}
model: {{preset: gpt2_tiny, sequence_length: 32, dropout: 0.1}}
batch: {{micro_batch_size: 2, gradient_accumulation_steps: 2}}
data: {{source: tokens, cache: cache, validation_fraction: 0.1}}
optimizer: {{lr: 3e-3}}
schedule: {{warmup_steps: 5}}
precision: {{dtype: bf16}}
checkpoint: {{interval: 6, keep: 3, mirror: "{mirror}", export_final: false}}
evaluation: {{interval: 15, sequences: 8}}
log: {{interval: 1}}
"""
# Probability of each fault per request; those of downloads need a body.
FAULTS = (
    (0.02, False, Fault(status=503, message="down for a moment")),
    (0.01, False, Fault(status=429, message="too many requests")),
    (0.02, False, Fault(lose_reply=True)),
    (0.01, False, Fault(stall_after=0, stall_s=1.5)),
    (0.05, True, Fault(cut_after=20_000)),
    (0.02, True, Fault(stall_after=10_000, stall_s=1.5)),
    (0.05, True, Fault(flip_byte=9)),
    (0.50, True, Fault(bytes_per_second=600_000)),
)
_LOSS = {"step": "loss", "validation": "validation_loss"}  # the field of each kind of record


class Site:
    """The folder of the training, its runs, and the store beside it."""

    def __init__(self, folder: Path, emulator: Emulator, *, steps: int, mark: str) -> None:
        self.folder = folder
        self.steps = steps
        self.mark = mark
        self.store = emulator
        self.run = folder / "runs" / "chaos"
        self.reference = folder / "reference" / "chaos"
        self.losses: dict[str, set[str]] = {}
        write_tokens(folder / "tokens", shards=3, tokens=4000, vocabulary=512)
        text = RUN.format(steps=steps, mirror=f"{emulator.url}/runs")
        (folder / "chaos.yaml").write_text(text)

    @property
    def checkpoints(self) -> Path:
        """The run's step directories."""
        return self.run / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The records of the steps."""
        return self.run / "logs" / "training_metrics.jsonl"

    def start(
        self, session: str, *changes: str, supervised: bool = False
    ) -> subprocess.Popen[bytes]:
        """Type the command, `deepspeed` or what `launch/train.sh` ends in.

        What it says goes to `SESSION.log`.
        """
        deepspeed = str(Path(sys.executable).with_name("deepspeed"))
        ranks = ["--num_gpus", "2", "--master_port", str(free_port()), "--log_level", "error"]
        plain = [deepspeed, *ranks, str(ROOT / "launch" / "train.py")]
        command = [sys.executable, "-P", "-m", "refocused.commands.launch"] if supervised else plain
        with (self.folder / f"{session}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--config", "chaos.yaml", *changes],
                cwd=self.folder,
                env={
                    **os.environ,
                    MARK: session,
                    "RANKS": "2",
                    "PYTHONPATH": str(ROOT),
                    "PYTHONWARNINGS": "ignore",
                    "OMP_NUM_THREADS": "1",
                    "DS_ACCELERATOR": "cpu",
                    "CUDA_VISIBLE_DEVICES": "",
                    "STORAGE_EMULATOR_HOST": self.store.proxy.url,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, session: str) -> str:
        """What the command of a session has printed."""
        return (self.folder / f"{session}.log").read_text(errors="replace")

    def said_in_all(self, beginning: str) -> int:
        """Count the lines of all starts with a given beginning."""
        logs = self.folder.glob(f"{self.mark}-[0-9]*.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return sum(line.startswith(beginning) for line in lines)

    def lose_machine(self, number: int) -> None:
        """Remove the run's folder, as if its machine were lost."""
        self.harvest()
        if self.run.exists():
            self.run.rename(self.folder / f"lost-{number}")
            shutil.rmtree(self.folder / f"lost-{number}")

    def harvest(self) -> None:
        """Keep every loss ever written, also those of repeated steps."""
        for key, loss in losses(self.run):
            self.losses.setdefault(key, set()).add(loss)

    def broken(self) -> list[str]:
        """Every incomplete visible checkpoint, here and in the store."""
        found = []
        for path in checkpoint_paths(self.checkpoints).values():
            try:
                problems = verify(read_checkpoint(path), deep=True)
            except RefocusedError as error:
                found.append(f"here, {path.name}: {error}")
                continue
            found += [f"here, {path.name}: {describe(problems)}"] if problems else []
        for name in self.committed():
            problems = verify_remote(self._remote(), name, deep=True)
            found += [f"in the store, {name}: {describe(problems)}"] if problems else []
        return found

    def committed(self) -> list[str]:
        """The checkpoints with a marker in the store."""
        steps = self._remote().scan()
        return [name for name in steps if COMMITTED in steps[name]]

    def _remote(self) -> RemoteCheckpoints:
        return RemoteCheckpoints(open_bucket(f"{self.store.url}/runs"), "chaos/checkpoints")


@contextlib.contextmanager
def site(folder: Path, *, steps: int, mark: str, seed: int) -> Iterator[Site]:
    """Create the training and its store, which this process accesses without faults."""
    with storage_emulator("chaos") as emulator:
        chance = random.Random(seed)
        for share, is_download, fault in FAULTS:
            emulator.proxy.script(_drawn(chance, share, is_download), fault, times=10**9)
        quiet = FaultProxy(emulator._server._api._httpd.server_address[1])
        os.environ["STORAGE_EMULATOR_HOST"] = quiet.url
        try:
            yield Site(folder, emulator, steps=steps, mark=mark)
        finally:
            os.environ["STORAGE_EMULATOR_HOST"] = emulator.proxy.url
            quiet.close()


def losses(run: Path) -> list[tuple[str, str]]:
    """Return kind and step, and the loss in hexadecimal, of every whole record of a run."""
    path = run / "logs" / "training_metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [
        (f"{record['kind']} {record['step']}", float(record[name]).hex())
        for record in records
        if (name := _LOSS.get(record["kind"]))
    ]


def steps_made(run: Path) -> list[int]:
    """Return the steps of a run's records, in order."""
    kinds = [key.split() for key, _ in losses(run)]
    return [int(step) for kind, step in kinds if kind == "step"]


def digest(run: Path, step: int) -> str:
    """Return a SHA-256 over every rank's tensors, counters and random state of a saved step."""
    import torch

    found = hashlib.sha256()
    folder = run / "checkpoints" / name_of(step)
    for path in [*sorted(folder.glob("zero/*optim*.pt")), *sorted(folder.glob("ranks/*.pt"))]:
        found.update(path.name.encode())
        _add(found, torch.load(path, weights_only=False))
    trainer = json.loads((folder / "trainer.json").read_text())
    lasting = {name: trainer[name] for name in ("step", "tokens", "position", "loss")}
    found.update(json.dumps(lasting, sort_keys=True).encode())
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    """Add a nested value to a digest."""
    import torch

    if isinstance(value, torch.Tensor):
        found.update(str(value.dtype).encode())
        found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _add(found, value[key])
    elif isinstance(value, list | tuple):
        for inner in value:
            _add(found, inner)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(repr(value).encode())
    else:  # DeepSpeed's loss scaler
        _add(found, vars(value))


def _drawn(chance: random.Random, share: float, is_download: bool) -> Any:
    def meets(request: Request) -> bool:
        return (request.is_download or not is_download) and chance.random() < share

    return meets


class Process(NamedTuple):
    """One living process of a session."""

    pid: int  # its process id
    session: str  # its start, from the mark
    role: str  # `other`, or as in `ROLES`


def living(mark: str) -> list[Process]:
    """Return every running process whose mark starts with a text, without zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            session = process.environ().get(MARK, "")
            if session.startswith(mark) and is_running(process):
                found.append(Process(process.pid, session, _role(process.cmdline())))
    return found


def kill(processes: Collection[Process]) -> None:
    """Kill processes; ignore those that have ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], *, seconds: float, poll: float = 0.05) -> bool:
    """Wait for a condition; return whether it was met in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll)
    return True


def _role(arguments: list[str]) -> str:
    words = " ".join(arguments)
    return next((role for role, pattern in ROLES.items() if re.search(pattern, words)), "other")
