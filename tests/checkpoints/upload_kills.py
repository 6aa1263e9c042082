"""The mirror killed at random moments, again and again: what it leaves in the bucket.

    STORAGE_EMULATOR_HOST=... .venv/bin/python tests/checkpoints/upload_kills.py FOLDER \
        --bucket gs://NAME --kills 30

The mirror's own loop runs in a process that is forked from one that has imported everything. Now
and then a step is saved again, as by a run that went back, so that its copy is being replaced.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoints.step_samples import PREFIX, START, make_step

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copies import verify_remote
from refocused.checkpoints.mirror.mirror import MirrorSettings
from refocused.checkpoints.mirror.mirror_loop import MirrorLoop
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.step.checkpoint_directory import name_of
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, SaveReason
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.checkpoints.step.verify import describe
from refocused.system.processes import this_process

LONGEST_LIFE_S = 0.6  # about the imports of a mirror and one step's upload
PATIENCE_S = 60.0
AGAIN_EVERY = 4  # kills after which a step whose upload is not complete is saved once more


@dataclasses.dataclass
class Report:
    """The results; `broken` must be empty and every step committed."""

    kills: int = 0
    interrupted: int = 0  # kills that left a copy without its marker
    replaced: int = 0  # saved again under the same name
    broken: list[str] = dataclasses.field(default_factory=list)  # committed, but incomplete
    committed: int = 0  # in the bucket at the end, equal to the disk
    steps: int = 0  # on the disk at the end


def run_kills(folder: Path, bucket: str, *, kills: int, seed: int) -> Report:
    """Kill `kills` mirrors, then let one finish."""
    chance, report = random.Random(seed), Report(kills=kills)
    settings = MirrorSettings(
        run=folder, bucket=bucket, prefix=PREFIX, training=this_process(), scan_seconds=0.01
    )
    checkpoints = settings.files.checkpoints
    checkpoints.mkdir(parents=True)
    for kill in range(1, kills + 1):
        _save(checkpoints, kill)
        if kill % AGAIN_EVERY == 0:
            _save_again(checkpoints, _unmarked(bucket, kill), kill)
            report.replaced += 1
        mirror = _start(settings)
        if kill % 3:
            time.sleep(chance.uniform(0.02, LONGEST_LIFE_S))
        else:  # on a slow machine too some uploads have begun
            _await_an_object(bucket, kill)
        os.kill(mirror, signal.SIGKILL)
        os.waitpid(mirror, 0)
        _check(bucket, report)
    settings.files.drain.write_text("finish")
    _end(_start(settings))
    remote = RemoteCheckpoints(open_bucket(bucket), PREFIX)
    for step in range(1, kills + 1):
        mine = (checkpoints / name_of(step) / MANIFEST).read_bytes()
        there = remote.objects(name_of(step))
        whole = COMMITTED in there and verify_remote(remote, name_of(step), deep=True) == []
        same = whole and remote.bucket.read(there[MANIFEST].name) == mine
        report.committed += same
    report.steps = kills
    return report


def _await_an_object(bucket: str, step: int) -> None:
    remote, deadline = RemoteCheckpoints(open_bucket(bucket), PREFIX), time.monotonic() + PATIENCE_S
    while not remote.objects(name_of(step)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _unmarked(bucket: str, newest: int) -> int:
    """Return the oldest step that has no marker; a complete one is never replaced."""
    marked = RemoteCheckpoints(open_bucket(bucket), PREFIX).scan()
    steps = range(1, newest + 1)
    return next((s for s in steps if COMMITTED not in marked.get(name_of(s), {})), newest)


def _save(checkpoints: Path, step: int, **changes: object) -> None:
    make_step(checkpoints, step, size=200_000, tiers=[SaveReason.EPOCH], **changes)  # not skipped


def _save_again(checkpoints: Path, step: int, kill: int) -> None:
    remove_checkpoint(checkpoints / name_of(step))
    created = START.replace(year=START.year + 1 + kill)
    _save(checkpoints, step, seed=1000 + kill, token="again", created=created)


def _start(settings: MirrorSettings) -> int:
    """Fork a mirror that logs to a file."""
    mirror = os.fork()
    if not mirror:
        words = os.open(settings.run / "mirror.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(words, 1)
        os.dup2(words, 2)
        MirrorLoop(settings).run()
        os._exit(0)
    return mirror


def _end(mirror: int) -> None:
    """Wait until a mirror has finished its queue."""
    deadline = time.monotonic() + PATIENCE_S
    while os.waitpid(mirror, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(mirror, signal.SIGKILL)
            os.waitpid(mirror, 0)
            sys.exit("the mirror did not finish its queue")
        time.sleep(0.01)


def _check(bucket: str, report: Report) -> None:
    remote = RemoteCheckpoints(open_bucket(bucket), PREFIX)
    unmarked = False
    for name, objects in remote.scan().items():
        if COMMITTED not in objects:
            unmarked = True
        elif problems := verify_remote(remote, name, deep=True):
            report.broken.append(f"{name}: {describe(problems)}")
    report.interrupted += unmarked


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    shutil.rmtree(chosen.folder, ignore_errors=True)
    report = run_kills(chosen.folder, chosen.bucket, kills=chosen.kills, seed=chosen.seed)
    print(json.dumps(dataclasses.asdict(report)))
