"""Small checkpoints with the layout of real ones."""

import datetime
import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

from refocused.bucket.bucket import Bucket, crc32c_of
from refocused.checkpoints.mirror.copies import CheckpointCopier
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints, prefix_of
from refocused.checkpoints.step.checkpoint_directory import (
    Checkpoint,
    name_of,
    rank_file,
    read_checkpoint,
)
from refocused.checkpoints.step.checkpoint_manifest import (
    CheckpointManifest,
    FileRecord,
    SaveReason,
)
from refocused.checkpoints.step.staging import Staging, write_manifest

PREFIX = prefix_of("sample")
START = datetime.datetime(2026, 11, 21, 8, 0, tzinfo=datetime.UTC)


def layout(world_size: int = 2) -> list[str]:
    ranks = [rank_file(rank) for rank in range(world_size)]
    shards = [f"zero/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world_size)]
    return ["trainer.json", "run.yaml", "model.json", *ranks, *shards]


def manifest_for(folder: Path, step: int, **changes: object) -> CheckpointManifest:
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            size=path.stat().st_size, crc32c=crc32c_of(path)
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    fields = {
        "run": "sample",
        "name": name_of(step, branch=int(str(changes.get("branch", 1)))),
        "step": step,
        "epoch": 0,
        "files_done": step // 10,
        "created": START + datetime.timedelta(minutes=step),
        "world_size": 2,
        "zero_stage": 3,
        "dtype": "bf16",
        "versions": {"deepspeed": "0.19.8"},
        "data_fingerprint": "f00d",
        "data_order": "seed 1",
        "parameters": 1000,
        "validation_loss": None,
        "loss": 2.5,
        "tokens": 1024 * step,
        "files": files,
    }
    return CheckpointManifest.model_validate(fields | changes)


def summary(*reasons: SaveReason, loss: float | None = None) -> CheckpointManifest:
    """Return as much of a manifest as retention needs."""
    tiers = reasons or (SaveReason.ROLLING,)
    return CheckpointManifest.model_construct(
        tiers=tiers, validation_loss=loss, validation_set="", files={}
    )


def state_file(content: object, *, size: int | None = None, seed: int = 0) -> bytes:
    """Return what `torch.save` writes of plain values, padded to `size` bytes."""
    file, letters = io.BytesIO(), random.Random(seed).randbytes(size or 0).hex()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps(content, 2))
    if size is None:
        return file.getvalue()
    assert isinstance(content, dict)
    room = size - len(state_file({**content, "letters": "a"})) + 1
    return state_file({**content, "letters": letters[:room]})


def fill(folder: Path, *, seed: int, size: int = 1000, step: int | None = None) -> None:
    for number, name in enumerate(layout()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "trainer.json":
            content = (
                json.dumps({"step": seed if step is None else step, "seed": seed})
                .encode()
                .ljust(size)
            )
        elif name.endswith(".pt"):
            state = {"optimizer_state_dict": {"zero_stage": 3}}
            content = state_file(state, size=size, seed=seed * 100 + number)
        else:
            content = random.Random(seed * 100 + number).randbytes(size)
        path.write_bytes(content)


def commit(staging: Staging, manifest: CheckpointManifest) -> Checkpoint:
    staging.seal(manifest)
    return staging.publish(manifest)


def make_step(
    checkpoints: Path,
    step: int,
    *,
    size: int = 1000,
    seed: int | None = None,
    token: str = "t",
    **changes: object,
) -> Checkpoint:
    """Commit a step of random files of `size` bytes; `changes` are fields of its manifest."""
    name = name_of(step, branch=int(str(changes.get("branch", 1))))
    staging = Staging(checkpoints, name=name, token=token)
    staging.create()
    fill(staging.path, seed=step if seed is None else seed, size=size, step=step)
    return commit(staging, manifest_for(staging.path, step, **changes))


def copied(
    remote: RemoteCheckpoints, step: Checkpoint, stopping: Callable[[], bool] = lambda: False
) -> bool:
    return CheckpointCopier(remote, stopping=stopping, report=lambda _done, _total: None).copy(step)


def mirrored(bucket: Bucket, step: Checkpoint, *, run: str = "sample") -> Checkpoint:
    """Copy a checkpoint to its place in the mirror."""
    assert copied(RemoteCheckpoints(bucket, prefix_of(run)), step)
    return step


def make_readable_step(
    checkpoints: Path, step: int, *, settings: dict[str, object] | None = None, **changes: object
) -> Checkpoint:
    """Commit a step whose training state and settings can be read.

    `changes` are fields of the training state; its losses go into the manifest too.
    """
    trainer = {
        "step": step,
        "tokens": 1024 * step,
        "position": {"epoch": 0, "sequences": 4 * step},
        "loss": 2.5,
        "validation_loss": None,
        "bits_per_byte": None,
        "best_loss": None,
        "best_step": None,
        "seconds": 90.0,
        "cost_usd": None,
    } | changes
    staging = Staging(checkpoints, name=name_of(step), token="t")
    staging.create()
    fill(staging.path, seed=step)
    (staging.path / "trainer.json").write_text(json.dumps(trainer))
    (staging.path / "run.yaml").write_text(json.dumps(settings or {"run": {"name": "sample"}}))
    losses = {name: trainer[name] for name in ("loss", "validation_loss", "bits_per_byte")}
    return commit(staging, manifest_for(staging.path, step, **losses))


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def reseal(path: Path, file: str, content: bytes) -> None:
    """Replace a file, and its size and checksum in the manifest."""
    (path / file).write_bytes(content)
    manifest = read_checkpoint(path).manifest
    record = FileRecord(size=len(content), crc32c=crc32c_of(path / file))
    manifest = manifest.model_copy(update={"files": {**manifest.files, file: record}})
    write_manifest(path, manifest)
