"""A run with step directories and a mirror, for the tests of the checkpoints command."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints.step_samples import make_readable_step, make_step

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.copies import CheckpointCopier
from refocused.checkpoints.mirror.mirror import MirrorFiles, MirrorStatus
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.step.checkpoint_directory import Checkpoint
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.commands.main import run_command
from refocused.system.processes import this_process

# A run file for the folder `tokens`, in a few seconds on one core.
TINY_RUN = """
run: {steps: 20, device: cpu}
model: {preset: gpt2_tiny, sequence_length: 32}
batch: {micro_batch_size: 2, gradient_accumulation_steps: 2}
data: {source: tokens}
optimizer: {lr: 3e-3}
"""


class Terminal(io.StringIO):
    """A stream at which somebody sits."""

    def isatty(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRun:
    """The run `one` below runs/ of the current folder."""

    folder: Path
    bucket: Path
    capture: pytest.CaptureFixture[str]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def save(self, step: int, **changes: Any) -> Checkpoint:
        """Commit a step of random files."""
        return make_step(self.checkpoints, step, **changes)

    def save_all(self, *steps: int) -> None:
        for step in steps:
            self.save(step)

    def save_readable(self, step: int, **changes: Any) -> Checkpoint:
        """Commit a step whose small files can be read."""
        return make_readable_step(self.checkpoints, step, **changes)

    def tell_of_mirror(self) -> None:
        """Make the bucket known as the run's own, as its mirror would."""
        self.bucket.mkdir(exist_ok=True)
        status = MirrorStatus(
            bucket=str(self.bucket),
            prefix=f"{self.folder.name}/checkpoints",
            process=this_process(),
            heartbeat=0.0,
        )
        MirrorFiles(self.folder).status.write_text(status.model_dump_json())

    def mirror(self, step: Checkpoint, *, keep: bool = True) -> None:
        """Copy a step to the bucket, and remove the local one unless it is kept."""
        self.tell_of_mirror()
        remote = RemoteCheckpoints(DirectoryBucket(self.bucket), f"{self.folder.name}/checkpoints")
        copier = CheckpointCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
        assert copier.copy(step)
        if not keep:
            remove_checkpoint(step.path)

    def there(self, step: int, file: str = "") -> Path:
        """Where the bucket keeps a file of a step."""
        name = f"checkpoint_step_{step}"
        return self.bucket / self.folder.name / "checkpoints" / name / file

    def local_steps(self) -> list[int]:
        """Steps on the disk."""
        found = self.checkpoints.glob("checkpoint_step_*")
        return sorted(int(path.name.rpartition("_")[2]) for path in found)

    def command(self, *arguments: object) -> tuple[int, str, str]:
        """Run a verb; return its exit code, standard output and standard error."""
        try:
            code = run_command("checkpoints", [str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = self.capture.readouterr()
        return code, out, err

    def command_json(self, *arguments: object, code: int = 0) -> Any:
        """Run a verb with --json; return what it printed."""
        found, out, err = self.command(*arguments, "--json")
        assert found == code, err
        return json.loads(out)
