"""The process that exports and uploads a finished run: `python -m ... REQUEST`."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from refocused.system.processes import detach

if TYPE_CHECKING:
    from refocused.checkpoints.step.step_directory import StepDirectory
    from refocused.evaluate.final_model import FinalModelAnswer, FinalModelRequest


def main(argv: list[str]) -> int:
    """Detach, then make the final model; `argv` is one JSON text of FinalModelRequest."""
    # Import the rest after the fork: the trainer waits for the fork.
    detach()
    from refocused.evaluate.final_model import FinalModelRequest

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logger = logging.getLogger(__name__)
    try:
        request = FinalModelRequest.model_validate_json(argv[0])
        logger.info("process %d exports %s", os.getpid(), request.step)
        answer = answer_to(request)
    except Exception:
        # The trainer notices that the process ended without an answer.
        logger.exception("the export failed")
        return 1
    logger.info("%s: %s", answer.status, answer.text)
    return 0


def answer_to(request: FinalModelRequest) -> FinalModelAnswer:
    """Export and upload a final model, and write the answer."""
    from refocused.bucket.open_bucket import open_bucket
    from refocused.evaluate.export_copy import upload_folder
    from refocused.evaluate.final_model import FinalModelAnswer
    from refocused.system.atomic_files import write_json_atomic
    from refocused.system.errors import RefocusedError

    status: Literal["made", "uploaded", "failed"] = "failed"
    try:
        text, status = _make(request), "made"
        if request.bucket is not None:
            bucket = open_bucket(
                request.bucket, credentials_file=request.credentials_file, project=request.project
            )
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
    from refocused.bucket.bucket import crc32c_of
    from refocused.checkpoints.step.checkpoint_manifest import MANIFEST
    from refocused.checkpoints.step.step_directory import in_use, read_step
    from refocused.evaluate.export_copy import FOLDER

    step = read_step(request.step)
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


def _replace(folder: Path, step: StepDirectory, origin: Mapping[str, object]) -> None:
    from refocused.evaluate.export import export_step
    from refocused.evaluate.export_copy import ORIGIN
    from refocused.evaluate.model_weights import ModelWeights, tokenizer_of
    from refocused.system.atomic_files import replace_folder, write_json_atomic
    from refocused.system.strict_json import parse_json

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
