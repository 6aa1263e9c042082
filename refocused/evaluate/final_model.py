"""Export a finished run's last checkpoint to `final_model/`, in a process of its own."""

from __future__ import annotations

import logging
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pydantic

from refocused.checkpoints.step.branches import present_branch
from refocused.config.outputs import CheckpointConfig
from refocused.evaluate.export_copy import FOLDER
from refocused.system.processes import ProcessIdentity, identify, start_detached
from refocused.system.world import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class FinalModelRequest(pydantic.BaseModel):
    """What the process is to make, and where the copy goes."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run: Path
    step: Path  # the checkpoint's directory
    token: str  # distinguishes this request's answer from others
    bucket: str | None = None  # `gs://bucket/prefix` or a folder; None: no copy
    prefix: str = ""  # of the copy in the bucket
    credentials_file: Path | None = None
    project: str | None = None

    @property
    def folder(self) -> Path:
        """Where the model goes."""
        return self.run / FOLDER

    @property
    def answer(self) -> Path:
        """The file that gets the answer."""
        return self.run / f"{FOLDER}.json"


class FinalModelAnswer(pydantic.BaseModel):
    """What has become of a request; `made` is not in the bucket, where a copy was requested."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    token: str
    status: Literal["made", "uploaded", "failed"]
    text: str  # the model's size, or why it failed


def read_answer(request: FinalModelRequest) -> FinalModelAnswer | None:
    """Return the answer to a request; None: there is none yet."""
    try:
        answer = FinalModelAnswer.model_validate_json(request.answer.read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None
    return answer if answer.token == request.token else None


class FinalModel:
    """The final model of a run, made in the background; all ranks call together.

    It is made from the files of the checkpoint, without the ranks and their memory, and goes on
    when they no longer wait.
    """

    def __init__(
        self,
        run: Path,
        world: World,
        *,
        mirror: str | None,
        credentials_file: Path | None,
        project: str | None,
    ) -> None:
        """Prepare; `mirror` (`gs://bucket/prefix` or a folder) gets a copy, None: there is none."""
        self.folder = run / FOLDER  # where the model is when it is made
        self._run, self._world = run.absolute(), world
        self._log = self._run / "logs" / f"{FOLDER}.log"
        if mirror is not None and "://" not in mirror:
            mirror = str(Path(mirror).expanduser().absolute())
        self._place = {
            "bucket": mirror,
            "prefix": f"{self._run.name}/{FOLDER}",
            "credentials_file": credentials_file and credentials_file.expanduser().absolute(),
            "project": project,
        }
        self._request: FinalModelRequest | None = None
        self._process: ProcessIdentity | None = None
        self._failure = f"The process that makes it has died; see {self._log}."

    def begin(self, step: int) -> None:
        """Start to make it from a saved step."""
        if not self._world.is_rank_0:
            return
        checkpoints = self._run / "checkpoints"
        self._request = FinalModelRequest(
            run=self._run,
            step=checkpoints / present_branch(checkpoints).name_of(step),
            token=secrets.token_hex(8),
            **self._place,
        )
        module, request = "refocused.evaluate.final_model_process", self._request.model_dump_json()
        try:
            self._process = identify(start_detached(module, request, log=self._log))
        except (OSError, subprocess.SubprocessError) as error:
            self._failure = f"The process that makes it could not be started ({error})."

    def wait(self, timeout_s: float, stopping: Callable[[], object]) -> FinalModelAnswer | None:
        """Wait for it; return the answer, None where it is not made yet.

        Args:
            timeout_s: Longest wait, in seconds.
            stopping: Whether to stop waiting; the same on every rank.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._answer() if self._world.is_rank_0 else None
            answer, late = self._world.broadcast((answer, time.monotonic() > deadline))
            if answer is not None or late or stopping():
                return answer
            time.sleep(POLL_SECONDS)

    def _answer(self) -> FinalModelAnswer | None:
        assert self._request is not None  # it was begun
        alive = self._process is not None and self._process.alive
        answer = read_answer(self._request)  # after the look at the process, which may just end
        if answer is None and not alive:
            return FinalModelAnswer(token="", status="failed", text=self._failure)
        return answer


def prepare_final_model(
    run: Path,
    settings: CheckpointConfig,
    *,
    world: World,
    credentials_file: Path | None,
    project: str | None,
) -> FinalModel | None:
    """Prepare the export; None if `checkpoint.export_final` is off or no disk has all files."""
    if not settings.export_final:
        return None
    if world.storage_ranks > 1:
        if world.is_rank_0:
            logger.warning(
                "No %s/ is made, since no machine's disk has all files of a step. The mirror's "
                "make one, on another machine: launch/checkpoints.py export latest FOLDER --run "
                "%s --bucket URL",
                FOLDER,
                run.name,
            )
        return None
    return FinalModel(
        run, world, mirror=settings.mirror, credentials_file=credentials_file, project=project
    )
