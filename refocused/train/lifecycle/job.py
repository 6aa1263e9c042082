"""One run on one rank: what the command line asks for, and where it happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import open_bucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun
from refocused.system.world import World
from refocused.train.lifecycle.planning import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for besides the run file.

    Attributes:
        resume: `auto`, `latest`, `best`, `none`, a step, a name, a path or a `gs://` address.
        dry_run: Build and check everything, train nothing.
        profile_steps: Steps to trace after the first ones; 0: none.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.
        command: The command that was typed, for the summary.
        allowed_changes: Settings that may differ from those of the checkpoint.
        trusts_others: A checkpoint of another run may be taken over.
        or_start: Where nothing can be resumed, start from scratch under another name.
    """

    resume: str
    dry_run: bool
    credentials_file: Path | None
    project: str | None
    command: str
    allowed_changes: frozenset[str] = frozenset()
    trusts_others: bool = False
    or_start: bool = False
    profile_steps: int = 0

    def open_bucket(self, url: str) -> Bucket:
        """Return the bucket of an address, reached with the command line's credentials."""
        return open_bucket(url, credentials_file=self.credentials_file, project=self.project)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run on this rank: what was asked for, and where it happens.

    Attributes:
        loaded: The run file, the model's shape and DeepSpeed's extra settings.
        request: The command line.
        planned: What of it was left to the plan, and the memory it takes.
        plan: The batch of a step.
        world: The ranks.
        folder: The run's folder.
    """

    loaded: LoadedRun
    request: Request
    planned: Plan
    plan: BatchPlan
    world: World
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Where the step directories are."""
        return self.folder / "checkpoints"
