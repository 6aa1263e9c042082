"""The run's folder: shared or one per machine, and claimed by one training at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun, render_run
from refocused.estimate.flops import count_of_run
from refocused.metrics.expected_loss import EXPECTED_LOSS_FILE, expected_curve
from refocused.metrics.jsonl import Record, as_record, read_json, utc_now, write_state
from refocused.system.atomic_files import replace_file
from refocused.system.errors import ConfigError, TrainingError, as_typed
from refocused.system.locks import FileLock
from refocused.system.processes import liveness_of, session_record
from refocused.system.world import World

if TYPE_CHECKING:
    from refocused.data.loader.open_data import DataParts

logger = logging.getLogger(__name__)

CLAIM_SECONDS = 60.0  # ranks whose launcher was killed need some time to notice, save and exit
_POLL_SECONDS = 0.2


def claim_run(folder: Path, *, timeout_seconds: float = CLAIM_SECONDS) -> FileLock:
    """Lock a run's folder until this process ends; wait for another start to end first.

    Two starts of one run would overwrite each other's checkpoints and mix their records.

    Raises:
        TrainingError: Another process is still training it after the time-out.
    """
    lock = FileLock(folder / "run.lock")
    if lock.acquire():
        return lock
    logger.warning(
        "%s is being trained by another process; waiting up to %.0f s for it to end",
        folder,
        timeout_seconds,
    )
    deadline = time.monotonic() + timeout_seconds
    while not lock.acquire():
        if time.monotonic() >= deadline:
            raise TrainingError(
                f"{folder} is being trained by another process, which still holds "
                f"{folder / 'run.lock'}. Wait until it has ended or stop it ("
                f"{as_typed('stop')} {folder}), or give this run another name (run.name=...)."
            )
        time.sleep(_POLL_SECONDS)
    return lock


def has_newer_stop(run: Path, since_seconds: float) -> bool:
    """Return whether a STOP file is there that was made after a time on the monotonic clock.

    Its age counts by the clock of the disk, which may be another machine's.
    """
    clock, now = run / f".clock-{secrets.token_hex(4)}", time.time()
    try:
        made = (run / "STOP").stat().st_mtime
    except OSError:
        return False
    with contextlib.suppress(OSError):  # the disk may be full
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink()
    return now - made <= time.monotonic() - since_seconds


class StartNotice:
    """Shows in `state.json` that a session starts, until it trains or withdraws the notice.

    Figures of sessions before it stay. A session that has not claimed the run leaves the state of
    another one alone.
    """

    def __init__(self, run: Path | None = None, *, is_claimed: bool = False) -> None:
        """Show nothing yet; without a `run`, never."""
        self._run, self._is_claimed = run, is_claimed
        self._before: tuple[bytes, os.stat_result] | None = None
        self._session_began = utc_now()
        self._made = list[Path]()  # folders, the innermost first
        if run is not None:
            self._made = [path for path in (run, *run.parents) if not path.exists()]
            with contextlib.suppress(OSError):
                self._before = (run / "state.json").read_bytes(), (run / "state.json").stat()

    def show(self, phase: str) -> None:
        """Write what the start does next."""
        if self._run is None:
            return
        state = read_json(self._run / "state.json") or {}
        is_live = state.get("status") in ("starting", "training")
        is_others = is_live and liveness_of(state) in ("alive", "elsewhere")
        if is_others and not self._is_claimed and state.get("pid") != os.getpid():
            return
        ended = ("updated", "exit_code", "stopped_by", "mirrored")
        kept = {name: value for name, value in state.items() if name not in ended}
        now = {
            "status": "starting",
            "phase": phase,  # of a start: what it does next
            "session_began": self._session_began,
        }
        with contextlib.suppress(OSError):  # whoever needs the folder reports it
            self._run.mkdir(parents=True, exist_ok=True)
            record = {"run": self._run.name, **kept, **session_record(), **now}
            write_state(self._run / "state.json", record)

    def found_complete(self) -> bool:
        """Whether the run had ended, with all in its mirror, before this start, which took no step.

        Then the states before and after name the same end, at one step of one branch.
        """
        before = {} if self._before is None else as_record(self._before[0]) or {}
        if self._run is None or before.get("status") != "finished" or before.get("exit_code") != 0:
            return False
        now = read_json(self._run / "state.json") or {}
        head = "run_id", "branch", "step", "status", "exit_code"
        return all(before.get(name) == now.get(name) for name in head)

    def withdraw(self) -> None:
        """Restore what was there, unless this session has trained or another one starts."""
        if self._run is None:
            return
        file = self._run / "state.json"
        state = read_json(file) or {}
        is_others = state.get("pid") != os.getpid() and liveness_of(state) != "gone"
        if state.get("status") != "starting" or is_others:
            return
        with contextlib.suppress(OSError):
            if self._before is None:
                file.unlink()
                for folder in self._made:  # as long as the session has put nothing else there
                    folder.rmdir()
            else:
                content, written = self._before
                replace_file(file, content)
                os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name the run's folder in the error if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The run's folder {folder} cannot be written: {error.strerror}. Make room there, or "
            "set run.directory to a folder on another disk."
        ) from error


def expected_loss(loaded: LoadedRun, plan: BatchPlan, data: DataParts) -> Record:
    """Return the `curve` of the loss to expect, or the `reason` why there is none."""
    trained = plan.sequences_between(0, loaded.config.run.total_steps)
    epochs = trained / sum(source.sequences for source in data.sources)
    parameters = count_of_run(loaded).total
    curve = expected_curve(loaded, plan, parameters=parameters, epochs=epochs)
    return {"reason" if isinstance(curve, str) else "curve": curve}


def write_run_files(folder: Path, loaded: LoadedRun, plan: BatchPlan, data: DataParts) -> None:
    """Write the run's settings and the loss to expect."""
    expected = expected_loss(loaded, plan, data)
    with writing(folder):
        (folder / "run.yaml").write_text(render_run(loaded.config))
        replace_file(folder / EXPECTED_LOSS_FILE, json.dumps(expected).encode())


def find_storage_ranks(folder: Path, world: World) -> World:
    """Determine which ranks write the run's files; return the updated world. All ranks call.

    Either all ranks see the same folder, and rank 0 writes it; or every machine has its own, and
    its first rank writes that.

    Raises:
        ConfigError: On every rank: some machines share the folder and others do not, or the ranks
            of one machine see different ones.
    """
    nodes = list(dict.fromkeys(world.gather(world.node)))  # rank 0's machine comes first
    world = dataclasses.replace(world, node=nodes.index(world.node))
    seen = _machines_seen(folder, world, nodes=len(nodes))
    if all(len(machines) == len(nodes) for machines in seen):
        return world
    if len(nodes) > 1 and seen == world.gather({world.node}):
        return dataclasses.replace(world, storage_ranks=len(nodes))
    odd = next(rank for rank, machines in enumerate(seen) if machines != seen[0])
    raise ConfigError(
        f"rank {odd}: The run's folder {folder.absolute()} is another one for this rank than for "
        "rank 0, and the machines do not have one each either. Set run.directory to a folder on a "
        "disk that all machines share, or to one on each machine's own disk."
    ).agreed()


def require_one_mirror(mirror: str | None, world: World) -> None:
    """Raise ConfigError on every rank if the mirror is another folder on each machine."""
    if world.storage_ranks == 1 or mirror is None or "://" in mirror:
        return
    seen = _machines_seen(Path(mirror).expanduser(), world, nodes=world.storage_ranks)
    if any(len(machines) < world.storage_ranks for machines in seen):
        raise ConfigError(
            f"The folder checkpoint.mirror={mirror} is another one on each machine, so that none "
            "would hold all files of a checkpoint. Set it to a bucket, or to a folder on a disk "
            "that all machines share."
        ).agreed()


def _machines_seen(folder: Path, world: World, *, nodes: int) -> list[set[int]]:
    """Return, for each rank, the machines whose new file it sees; remove a folder made for this."""
    token = world.broadcast(secrets.token_hex(4))
    signs = [folder / f".seen-{token}-{node}" for node in range(nodes)]
    sign = signs[world.node]
    missing = [path for path in (folder, *folder.parents) if not path.exists()]

    def write() -> None:
        if world.is_local_rank_0:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                sign.touch()

    try:
        world.on_all_ranks(write)
        seen = world.gather({node for node, path in enumerate(signs) if path.exists()})
    finally:
        if world.is_local_rank_0:
            sign.unlink(missing_ok=True)
    world.barrier()
    for path in missing if world.is_local_rank_0 else ():
        with contextlib.suppress(OSError):  # another machine removed it, or it is not empty
            path.rmdir()
    world.barrier()
    return seen
