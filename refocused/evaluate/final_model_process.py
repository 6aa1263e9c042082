"""The process that exports and uploads a finished run."""

import fcntl
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.step.checkpoint_directory import Checkpoint, in_use, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
from refocused.evaluate.export import export_step
from refocused.evaluate.export_copy import FOLDER, ORIGIN, upload_folder
from refocused.evaluate.final_model import FinalModelAnswer, FinalModelRequest
from refocused.evaluate.model_weights import ModelWeights, tokenizer_of
from refocused.system.atomic_files import replace_folder, write_json_atomic
from refocused.system.errors import RefocusedError
from refocused.system.strict_json import parse_json

logger = logging.getLogger(__name__)


def export_final_model(argument: str) -> None:
    """Make the final model in this process; the argument is FinalModelRequest as JSON."""
    request = FinalModelRequest.model_validate_json(argument)
    logger.info("process %d exports %s", os.getpid(), request.step)
    answer = answer_to(request)
    logger.info("%s: %s", answer.status, answer.text)


def answer_to(request: FinalModelRequest) -> FinalModelAnswer:
    """Export and upload a final model, and write the answer."""
    status: Literal["made", "uploaded", "failed"] = "failed"
    try:
        text, status = _make(request), "made"
        if request.bucket is not None:
            bucket = open_bucket(request.bucket, request.credentials)
            upload_folder(request.folder, bucket, request.prefix)
            status, copy = "uploaded", f"{bucket.url.rstrip('/')}/{request.prefix}"
            text = f"{text}, also in {copy}"
    except RefocusedError as error:
        text = f"{text}. {error}" if status == "made" else str(error)
    answer = FinalModelAnswer(token=request.token, status=status, text=text)
    write_json_atomic(request.answer, answer.model_dump())
    return answer


def _make(request: FinalModelRequest) -> str:
    """Export the checkpoint, in place of an older final model; return a description."""
    step = read_checkpoint(request.step)
    origin = {
        "run": step.manifest.run,
        "step": step.step,
        "manifest_crc32c": crc32c_of(step.path / MANIFEST),
    }
    # A process of an earlier session may still be running.
    with (request.run / f".{FOLDER}.lock").open("w") as lock, in_use(step.path):
        fcntl.flock(lock, fcntl.LOCK_EX)
        _replace(request.folder, step, origin)
    size = sum(path.stat().st_size for path in request.folder.iterdir())
    return f"step {step.step:,}, {size / 1e6:,.1f} MB"


def _replace(folder: Path, step: Checkpoint, origin: Mapping[str, object]) -> None:
    try:
        if parse_json((folder / ORIGIN).read_bytes()) == origin:
            return
    except (OSError, ValueError):
        pass  # no model, or one of an unknown origin
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    weights = ModelWeights(step)
    export_step(weights, fresh, tokenizer=tokenizer_of(weights, is_optional=True))
    write_json_atomic(fresh / ORIGIN, origin)
    replace_folder(fresh, folder)
