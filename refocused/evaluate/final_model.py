"""At a run's end its last step becomes `final_model/`, by a process that holds nothing of ours."""

from __future__ import annotations

import logging
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from refocused.checkpoints.step.branches import present_branch
from refocused.config.outputs import CheckpointConfig
from refocused.evaluate.export_copy import FOLDER
from refocused.evaluate.make_final_model import FinalModelAnswer, FinalModelRequest, read_answer
from refocused.system.processes import ProcessIdentity, identify, start_detached
from refocused.system.world import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SLICE_SECONDS = 1.0  # between two looks at whether somebody wants to wait no longer


class FinalModel:
    """The final model of a run, made in the background; all ranks call together.

    It is made from the files of the step, without the ranks and their memory; where they do not
    wait any more, it goes on.

    Attributes:
        folder: Where the model is when it is made.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        mirror: str | None,
        credentials_file: Path | None,
        project: str | None,
    ) -> None:
        """Say where it goes.

        Args:
            run: The run's folder.
            world: The ranks.
            mirror: `gs://bucket/prefix` or a folder that gets a copy; None: no copy.
            credentials_file: Key file for `gs://`.
            project: Google Cloud project.
        """
        self.folder = run / FOLDER
        self._run = run.absolute()
        self._world = world
        self._mirror = mirror
        self._credentials_file = credentials_file
        self._project = project
        self._request: FinalModelRequest | None = None
        self._process: ProcessIdentity | None = None
        self._failure = ""

    def begin(self, step: int) -> None:
        """Start to make it from a saved step."""
        if self._world.is_rank_0:
            self._start(step)

    def wait(self, timeout_s: float, stopping: Callable[[], object]) -> FinalModelAnswer | None:
        """Wait for it; return what has become of it, None where it is not done yet.

        Args:
            timeout_s: Longest wait, in seconds.
            stopping: Whether to wait no longer; the same on every rank.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._answer() if self._world.is_rank_0 else None
            answer, late = self._world.broadcast((answer, time.monotonic() > deadline))
            if answer is not None or late or stopping():
                return answer

    def _start(self, step: int) -> None:
        mirror = self._mirror
        if mirror is not None and "://" not in mirror:
            mirror = str(Path(mirror).expanduser().absolute())
        credentials, checkpoints = self._credentials_file, self._run / "checkpoints"
        self._request = FinalModelRequest(
            run=self._run,
            step=checkpoints / present_branch(checkpoints).name_of(step),
            token=secrets.token_hex(8),
            bucket=mirror,
            prefix=f"{self._run.name}/{FOLDER}",
            credentials_file=credentials.expanduser().absolute() if credentials else None,
            project=self._project,
        )
        try:
            self._process = identify(
                start_detached(
                    "refocused.evaluate.final_model_process",
                    self._request.model_dump_json(),
                    log=self._log,
                )
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._failure = f"The process that makes it could not be started ({error})."

    @property
    def _log(self) -> Path:
        return self._run / "logs" / f"{FOLDER}.log"

    def _answer(self) -> FinalModelAnswer | None:
        """Look for the answer for a while."""
        assert self._request is not None  # it was begun
        pause_at = time.monotonic() + SLICE_SECONDS
        while True:
            alive = self._process is not None and self._process.alive
            answer = read_answer(self._request)
            if answer is not None:
                return answer
            if not alive:
                failure = self._failure or f"The process that makes it has died; see {self._log}."
                return FinalModelAnswer(token=self._request.token, status="failed", text=failure)
            if time.monotonic() > pause_at:
                return None
            time.sleep(POLL_SECONDS)


def prepare_final_model(
    run: Path,
    settings: CheckpointConfig,
    *,
    world: World,
    credentials_file: Path | None,
    project: str | None,
) -> FinalModel | None:
    """Prepare what `checkpoint.export_final` asks for; None where nothing is or can be made.

    Args:
        run: The run's folder.
        settings: Whether it is wanted, and the mirror.
        world: The ranks.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.
    """
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
        run, world=world, mirror=settings.mirror, credentials_file=credentials_file, project=project
    )
