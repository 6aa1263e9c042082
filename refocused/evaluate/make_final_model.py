"""A finished run's `final_model/`: its last step as transformers load it, here and mirrored."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pydantic

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.checkpoints.step.step_directory import StepDirectory, in_use, read_step
from refocused.evaluate.export import export_step
from refocused.evaluate.export_copy import FOLDER, ORIGIN, upload_folder
from refocused.evaluate.model_weights import open_model_weights, travelled_tokenizer
from refocused.system.atomic_files import replace_folder, write_json_atomic
from refocused.system.errors import BucketError, RefocusedError
from refocused.system.strict_json import parse_json


class FinalModelRequest(pydantic.BaseModel):
    """What the process that makes a final model is told.

    Attributes:
        run: The run's folder.
        step: The step's directory.
        token: Tells this request's answer from others.
        bucket: `gs://bucket/prefix` or a folder that gets a copy; None: nothing does.
        prefix: Where the copy is below it.
        credentials_file: Key file for `gs://`; None: what the environment offers.
        project: Google Cloud project; None: that of the credentials.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run: Path
    step: Path
    token: str
    bucket: str | None = None
    prefix: str = ""
    credentials_file: Path | None = None
    project: str | None = None

    @property
    def folder(self) -> Path:
        """Where the model goes."""
        return self.run / FOLDER

    @property
    def answer(self) -> Path:
        """The file in which the process says how far it is."""
        return self.run / f"{FOLDER}.json"


class FinalModelAnswer(pydantic.BaseModel):
    """What has become of a request.

    Attributes:
        token: Of the request.
        status: `made`: here, and not in the bucket, where one is wanted.
        text: What to tell a person: the model's size, or why it failed.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    token: str
    status: Literal["made", "uploaded", "failed"]
    text: str


def answer_to(request: FinalModelRequest) -> FinalModelAnswer:
    """Make and upload a final model, and write down what became of it."""
    answer = _made(request)
    write_json_atomic(request.answer, answer.model_dump())
    return answer


def _made(request: FinalModelRequest) -> FinalModelAnswer:
    try:
        text = make_final_model(request)
    except RefocusedError as error:
        return FinalModelAnswer(token=request.token, status="failed", text=str(error))
    if request.bucket is None:
        return FinalModelAnswer(token=request.token, status="made", text=text)
    try:
        bucket = open_bucket(
            request.bucket, credentials_file=request.credentials_file, project=request.project
        )
        upload_folder(request.folder, bucket, request.prefix)
    except BucketError as error:
        return FinalModelAnswer(token=request.token, status="made", text=f"{text}. {error}")
    where = f"{text}, also in {bucket.url.rstrip('/')}/{request.prefix}"
    return FinalModelAnswer(token=request.token, status="uploaded", text=where)


def make_final_model(request: FinalModelRequest) -> str:
    """Export the step in place of the final model that may be there; return what it is.

    Raises:
        CheckpointError: The step is damaged, or its export cannot be written.
        ShardError: Its tokenizer is damaged.
    """
    step = read_step(request.step)
    origin = _origin(step)
    # A process of an earlier session may still be at it.
    with (request.run / f".{FOLDER}.lock").open("w") as lock, in_use(step.path):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _read_origin(request.folder) != origin:
            _replace(request.folder, step, origin)
    sizes = [path.stat().st_size for path in request.folder.iterdir()]
    return f"step {step.step:,}, {sum(sizes) / 1e6:,.1f} MB"


def _replace(folder: Path, step: StepDirectory, origin: Mapping[str, object]) -> None:
    fresh = folder.with_name(f".{FOLDER}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    weights = open_model_weights(step)
    export_step(weights, fresh, tokenizer=travelled_tokenizer(weights))
    write_json_atomic(fresh / ORIGIN, origin)
    replace_folder(fresh, folder)


def _origin(step: StepDirectory) -> dict[str, object]:
    """Say which save a model is of."""
    manifest = step.manifest
    crc = crc32c_of(step.path / MANIFEST)
    return {"run": manifest.run, "step": manifest.step, "manifest_crc32c": crc}


def _read_origin(folder: Path) -> object:
    try:
        return parse_json((folder / ORIGIN).read_bytes())
    except (OSError, ValueError):
        return None


def read_answer(request: FinalModelRequest) -> FinalModelAnswer | None:
    """Return the answer to a request; None: there is none yet."""
    try:
        answer = FinalModelAnswer.model_validate_json(request.answer.read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None
    return answer if answer.token == request.token else None
