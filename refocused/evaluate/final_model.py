"""Export a finished run's last checkpoint to `final_model/`, in a process of its own."""

import logging
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pydantic

from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials
from refocused.checkpoints.step.checkpoint_directory import present_branch
from refocused.config.outputs import CheckpointConfig
from refocused.evaluate.export_copy import FOLDER
from refocused.system.errors import as_typed
from refocused.system.processes import ProcessIdentity, identify, start_detached
from refocused.system.world import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class FinalModelRequest(pydantic.BaseModel, frozen=True, extra="forbid"):
    """What the process exports, and where the copy goes."""

    run: Path
    step: Path = Path()  # the checkpoint's directory
    token: str = ""  # identifies the answer to this request
    bucket: str | None = None  # `gs://bucket/prefix` or a folder; None: no copy
    prefix: str = ""  # of the copy in the bucket
    credentials: Credentials = BY_ENVIRONMENT

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return self.run / FOLDER

    @property
    def answer(self) -> Path:
        """The file with the answer."""
        return self.run / f"{FOLDER}.json"


class FinalModelAnswer(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The outcome of a request; `made`: a requested copy is not in the bucket."""

    token: str
    status: Literal["made", "uploaded", "failed"]
    text: str  # the model's size, or why it failed


def read_answer(request: FinalModelRequest) -> FinalModelAnswer | None:
    """Return the answer to a request; None if there is none yet."""
    try:
        answer = FinalModelAnswer.model_validate_json(request.answer.read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None
    return answer if answer.token == request.token else None


class FinalModel:
    """The final model of a run, exported in the background; all ranks call together.

    A separate process reads the checkpoint's files, and continues when the ranks have stopped
    waiting.
    """

    def __init__(self, folder: Path, world: World, request: FinalModelRequest) -> None:
        """Prepare; `folder` is where the model will be, and `request` lacks only the step."""
        self.folder = folder
        self._world, self._request = world, request
        self._log = request.run / "logs" / f"{FOLDER}.log"
        self._process: ProcessIdentity | None = None
        self._failure = f"The export process died; see {self._log}."

    def begin(self, step: int) -> None:
        """Start the export of a saved step."""
        if not self._world.is_rank_0:
            return
        checkpoints = self._request.run / "checkpoints"
        directory = checkpoints / present_branch(checkpoints).name_of(step)
        named = {"step": directory, "token": secrets.token_hex(8)}
        self._request = self._request.model_copy(update=named)
        function = "refocused.evaluate.export:export_final_model"
        try:
            process = start_detached(function, self._request.model_dump_json(), log=self._log)
            self._process = identify(process)
        except (OSError, subprocess.SubprocessError) as error:
            self._failure = f"The export process could not be started ({error})."

    def wait(self, timeout_s: float, stopping: Callable[[], object]) -> FinalModelAnswer | None:
        """Return the answer, or None after `timeout_s` seconds or once all ranks are `stopping`."""
        deadline = time.monotonic() + timeout_s
        answer: FinalModelAnswer | None = None
        while True:
            if self._world.is_rank_0:
                alive = self._process is not None and self._process.alive
                answer = read_answer(self._request)  # after the look at the process: it may end now
                if answer is None and not alive:
                    answer = FinalModelAnswer(token="", status="failed", text=self._failure)
            answer, late = self._world.broadcast((answer, time.monotonic() > deadline))
            if answer is not None or late or stopping():
                return answer
            time.sleep(POLL_SECONDS)


def prepare_final_model(
    run: Path, settings: CheckpointConfig, *, world: World, credentials: Credentials
) -> FinalModel | None:
    """Prepare the export; None if `checkpoint.export_final` is off or no disk has all files."""
    if not settings.export_final:
        return None
    if world.storage_ranks > 1:
        if world.is_rank_0:
            logger.warning(
                "No %s/ is exported, because no machine's disk has all files of a step. Export it "
                f"from the mirror: {as_typed('checkpoints export')} latest FOLDER --run %s "
                "--bucket URL",
                FOLDER,
                run.name,
            )
        return None
    mirror = settings.mirror
    if mirror is not None and "://" not in mirror:
        mirror = str(Path(mirror).expanduser().absolute())
    request = FinalModelRequest(
        run=run.absolute(),
        bucket=mirror,
        prefix=f"{run.absolute().name}/{FOLDER}",
        credentials=credentials,
    )
    return FinalModel(run / FOLDER, world, request)
