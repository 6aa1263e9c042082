"""One run on one rank: the request, and the choices that the run file leaves open."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials, open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.mirror.lease import Lease
from refocused.checkpoints.mirror.remote_checkpoints import prefix_of
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import Origin
from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.load_run import LoadedRun
from refocused.data.manifest.vocabulary import decide_vocabulary, require_room_for_tokenizer
from refocused.engine.resharding import FillWeights
from refocused.estimate import memory_plan
from refocused.estimate.memory import usable_bytes
from refocused.estimate.memory_plan import (
    Choice,
    choose,
    largest_micro,
    needless_offload,
    refuse_cpu,
)
from refocused.metrics.jsonl import read_json
from refocused.system.hardware import cpu_flags
from refocused.system.processes import this_process
from refocused.system.world import World
from refocused.train.lifecycle.model_and_engine import memory_of_a_step


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Options of the command line besides the run file."""

    resume: str  # `auto`, `latest`, `best`, `none`, a step, a name, a path or a `gs://` address
    dry_run: bool  # build and check everything, train nothing
    command: str  # the command that was typed, for the summary
    credentials: Credentials = BY_ENVIRONMENT  # to `gs://`
    allowed_changes: frozenset[str] = frozenset()  # settings that may differ from the checkpoint's
    trusts_others: bool = False  # a checkpoint of another run may be taken over
    parent: str | None = None  # the run that `resume` is a checkpoint of, if the run is a new one
    profile_steps: int = 0  # steps to trace after the first ones; 0: none
    at_the_end: Callable[..., None] | None = None  # of a dry run: `Trial.take_step`

    def open_bucket(self, url: str) -> Bucket:
        """Return the bucket of an address, reached with the command line's credentials."""
        return open_bucket(url, self.credentials)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The choices made for the hardware, and its memory."""

    choice: Choice  # stage, offloads, micro-batch and the memory they take
    batch: BatchPlan  # of a step
    memory_bytes: float | None  # of the smallest GPU; None without GPUs
    without_offload: int | None  # bytes of a step without an offload that is not needed
    native: memory_plan.NativeDtype  # what the hardware of all ranks computes fastest in
    is_native_by_choice: bool  # whether `precision.dtype: auto` chose it


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The model that a run starts from, or started from before a resume."""

    origin: Origin | None = None  # None: random weights
    tokenizer: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # the model's files
    fill: FillWeights | None = None  # reads the weights; None on a resume
    new_ids: range = range(0)  # of the vocabulary, which the model does not have
    cut_ids: range = range(0)  # of the model, which the vocabulary does not have


UNTRAINED = Start()


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run on this rank: request, plan, world and folder."""

    loaded: LoadedRun
    request: Request
    planned: Plan
    world: World
    folder: Path
    lease: Lease | None = None  # None: a dry run

    @property
    def plan(self) -> BatchPlan:
        """The batch of a step."""
        return self.planned.batch

    @property
    def checkpoints(self) -> Path:
        """The folder of the step directories."""
        return self.folder / "checkpoints"

    def catalog(self) -> Catalog:
        """List the run's checkpoints, here and in the mirror."""
        return self.catalog_of(self.loaded.config.run.name)

    def catalog_of(self, run: str) -> Catalog:
        """List the checkpoints of a run in the same place as this one."""
        mirror, local = self.loaded.config.checkpoint.mirror, self.folder.with_name(run)
        if mirror is None:
            return Catalog(local / "checkpoints")
        if "://" not in mirror:
            with contextlib.suppress(OSError):  # listing it reports that it is missing
                Path(mirror).expanduser().mkdir(parents=True, exist_ok=True)
        bucket = self.request.open_bucket(mirror)
        return Catalog(local / "checkpoints", bucket, prefix_of(run))


def settle(
    loaded: LoadedRun, world: World, *, open_source: Callable[[str], Bucket]
) -> tuple[LoadedRun, Plan]:
    """Return the run with all `auto` settings decided, and its plan; every rank must call.

    An `auto` micro-batch on GPUs is the largest that the memory of a real step proves to fit.
    `open_source` opens a source of the data, which may have to give the vocabulary.

    Raises:
        RefocusedError: On every rank: nothing fits, the global batch cannot be divided, a large
            model would train on the CPU by accident, or the vocabulary cannot be found or does not
            fit the tokenizer.
    """

    def vocabulary() -> int:
        require_room_for_tokenizer(loaded, fetch=True)
        return decide_vocabulary(loaded, open_source).shape.vocabulary

    loaded = loaded.with_vocabulary(world.on_rank_0(vocabulary))
    if world.device_kind == "cpu":
        world.on_all_ranks(lambda: refuse_cpu(loaded, ranks=world.world_size))
    native, is_auto = _native_dtype(world), loaded.config.precision.dtype == "auto"
    if is_auto:
        loaded = world.on_all_ranks(lambda: memory_plan.with_dtype(loaded, native.dtype))
    config, memory_bytes = loaded.config, None
    if world.device_kind == "cuda":  # of the smallest GPU
        total = torch.cuda.get_device_properties(world.device).total_memory
        memory_bytes = -world.largest([-total])[0]
    here = {"ranks": world.world_size, "ranks_here": world.local_world_size}
    choice = world.on_all_ranks(lambda: choose(loaded, memory_bytes=memory_bytes, **here))

    def decided(choice: Choice) -> tuple[LoadedRun, Plan]:
        batch = config.batch.model_copy(update={"micro_batch_size": choice.micro_batch_size})
        settled = config.model_copy(update={"zero": choice.zero, "batch": batch})
        plan = world.on_all_ranks(
            lambda: plan_batch(batch, world_size=world.world_size, **config.model.sequence)
        )
        bare = needless_offload(loaded, choice, ranks=world.world_size, memory_bytes=memory_bytes)
        without_offload = bare.peak if bare is not None else None
        planned = Plan(choice, plan, memory_bytes, without_offload, native, is_auto)
        return dataclasses.replace(loaded, config=settled), planned

    if config.batch.micro_batch_size == "auto" and memory_bytes is not None:

        def measure(micro_batch_size: int) -> tuple[int, int, int]:
            return memory_of_a_step(
                *decided(dataclasses.replace(choice, micro_batch_size=micro_batch_size)), world
            )

        micro_batch_size = largest_micro(
            loaded,
            choice,
            ranks=world.world_size,
            limit=usable_bytes(memory_bytes),
            measure=measure,
        )
        run, _ = decided(dataclasses.replace(choice, micro_batch_size=micro_batch_size))
        choice = choose(run, memory_bytes=memory_bytes, **here)
    return decided(choice)


def _native_dtype(world: World) -> memory_plan.NativeDtype:
    """Return the dtype of the least capable rank, so that all ranks decide alike."""
    on_gpu = world.device_kind == "cuda"
    own = memory_plan.native_dtype(
        capability=torch.cuda.get_device_capability(world.device) if on_gpu else None,
        cpu_flags=cpu_flags(),
        cpu_gain=memory_plan.cpu_bf16_gain,
    )
    return max(world.gather(own), key=lambda one: memory_plan.FASTEST_FIRST.index(one.dtype))


def take_lease(job: Job, *, cancelled: Callable[[], bool]) -> Lease:
    """Take the run's lease on rank 0, in the mirror or else in the run's folder."""
    mirror, world, request = job.loaded.config.checkpoint.mirror, job.world, job.request
    bucket = open_bucket(
        mirror or str(job.folder.absolute()),
        request.credentials,
        retry=Retry(attempts=4),  # the lease's thread tries again later
    )
    prefix = "" if mirror is None else prefix_of(job.loaded.config.run.name)
    token = world.broadcast(secrets.token_hex(8))
    known = str((read_json(job.folder / "state.json") or {}).get("lease"))
    lease = Lease(bucket, prefix, token=token, training=this_process(), known=known)
    world.on_rank_0(lambda: lease.acquire(cancelled=cancelled))
    return lease
