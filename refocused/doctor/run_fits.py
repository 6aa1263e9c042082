"""Compute whether a run fits into memory and on the disks, without building anything."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from refocused.bucket.partial_files import existing_folder, free_bytes
from refocused.config.batch_plan import plan_batch
from refocused.config.cadence import Cadence
from refocused.config.load_run import LoadedRun
from refocused.data.formats.token_layout import element_type
from refocused.doctor.finding import Finding, Level
from refocused.estimate.flops import count_of_run
from refocused.estimate.memory import checkpoint_bytes, checkpoints_on_disk
from refocused.estimate.memory_plan import (
    Choice,
    Device,
    HostPlan,
    choose,
    plan_host,
    settings_that_fit,
)
from refocused.system.errors import ConfigError
from refocused.system.hardware import FreeMemory
from refocused.system.number_text import size_text

EXPORTED_BYTES = 2  # a parameter of the final model, in bfloat16


def fitting_on_gpus(loaded: LoadedRun, choice: Choice, *, ranks: int, memory_bytes: float) -> str:
    """Return advice: the settings with which a step fits into the GPUs' memory."""

    def fits(run: LoadedRun, number: int) -> bool:
        return choose(run, ranks=number, memory_bytes=memory_bytes).memory.fits(memory_bytes)

    settings = settings_that_fit(
        loaded, micro_batch_size=choice.micro_batch_size, ranks=ranks, fits=fits
    )
    if settings is not None:
        return f"It fits with: {settings}"
    return "Lower model.sequence_length, or use a smaller model.preset or more or larger GPUs."


def host_shortage(
    loaded: LoadedRun,
    *,
    ranks: int,
    ranks_here: int,
    device: Device,
    gpu_bytes: float | None,
    memory: FreeMemory,
) -> Finding | None:
    """Return why a run does not fit into this machine's memory; None if it fits.

    `gpu_bytes` is the memory of the smallest GPU; None: no GPU, or not known yet.
    """

    def plan(run: LoadedRun, number: int) -> tuple[Choice, HostPlan]:
        choice = choose(run, ranks=number, memory_bytes=gpu_bytes)
        here = ranks_here if number == ranks else number
        return choice, plan_host(run, choice, ranks=number, ranks_here=here, device=device)

    def fits(run: LoadedRun, number: int) -> bool:
        choice, planned = plan(run, number)
        if device == "cuda" and gpu_bytes is None and run.config.zero != loaded.config.zero:
            return False  # it might not fit into the GPUs
        on_device = gpu_bytes is None or choice.memory.fits(gpu_bytes)
        return on_device and planned.total <= memory.available

    try:
        choice, planned = plan(loaded, ranks)
    except ConfigError:
        return None  # without a plan of the ranks there is none of the machine
    if planned.total <= memory.available:
        return None
    settings = settings_that_fit(
        loaded,
        micro_batch_size=choice.micro_batch_size,
        ranks=ranks,
        fits=fits,
        fewer_ranks=device == "cpu" and 1 < ranks == ranks_here,
    )
    total, unit = size_text(planned.total), "CPU" if device == "cpu" else "GPU"
    copies = f"{size_text(planned.copies)} copies for saves, " if planned.copies else ""
    parts = f"{size_text(planned.tensors)} tensors, {copies}"
    if planned.building > planned.tensors + planned.copies:
        parts = f"{size_text(planned.building)} to build the whole model on each, "
    text = (
        f"the run needs {total} of this machine's memory ({ranks_here} {unit} ranks: {parts}"
        f"{size_text(planned.processes)} processes), and {size_text(memory.available)} of "
        f"{size_text(memory.total)} are free"
    )
    fix = f"Use a machine with {total} of free memory, or a smaller model.preset."
    return Finding("memory", "fail", text, f"It fits with: {settings}" if settings else fix)


class DiskNeed(NamedTuple):
    """Room that something needs in a folder; with less than `least_bytes` the run fails."""

    what: str
    folder: Path
    wanted_bytes: int
    least_bytes: int


def check_disks(disk_needs: Iterable[DiskNeed]) -> Iterator[Finding]:
    """Report for each disk whether it has room for the run."""
    by_device: dict[int, list[DiskNeed]] = {}
    for need in disk_needs:
        by_device.setdefault(existing_folder(need.folder).stat().st_dev, []).append(need)
    fix = "Free space, set data.disk_limit_gb or a lower checkpoint.keep, or use a larger disk for "
    fix += "run.directory and data.cache."
    for needs in by_device.values():
        level: Level = "ok"
        free = free_bytes(needs[0].folder)
        if free < sum(need.wanted_bytes for need in needs):
            level = "fail" if free < sum(need.least_bytes for need in needs) else "warn"
        places = ", ".join(dict.fromkeys(str(need.folder) for need in needs))
        parts = ", ".join(f"{size_text(need.wanted_bytes)} {need.what}" for need in needs)
        text = f"{size_text(free)} free for {places}: {parts}"
        yield Finding("disk", level, text, None if level == "ok" else fix)


def disk_needs(
    loaded: LoadedRun, choice: Choice, *, ranks: int, tokens: int | None
) -> Iterator[DiskNeed]:
    """Yield what a run puts into its folders, besides what is there; `tokens` is the data's."""
    config, parameters = loaded.config, count_of_run(loaded).allocated
    folder = Path(config.run.directory) / config.run.name
    step = checkpoint_bytes(loaded.shape, config, stage=choice.zero.stage)
    if config.run.tokens is not None:
        batch = config.batch.model_copy(update={"micro_batch_size": choice.micro_batch_size})
        plan = plan_batch(batch, world_size=ranks, **config.model.sequence)
        config = loaded.with_steps(plan).config
    saves = int(Cadence.of(config).left(0, config.run.total_steps)["save"])
    most = checkpoints_on_disk(saves, config.checkpoint)
    final = EXPORTED_BYTES * parameters if config.checkpoint.export_final else 0
    there = _folder_bytes(folder / "checkpoints")
    most_bytes, least = max(0, most * step + final - there), max(0, 2 * step - there)
    yield DiskNeed(f"of checkpoints ({most} x {size_text(step)})", folder, most_bytes, least)
    if tokens is not None:
        cache, limit = Path(config.data.cache), config.data.disk_limit_gb
        data = tokens * element_type(loaded.shape.vocabulary).itemsize
        data = data if limit is None else min(data, int(limit * 1e9))
        yield DiskNeed("of shards", cache, max(0, data - _folder_bytes(cache)), 0)
    if choice.memory.nvme and config.zero.nvme_path is not None:
        states, drive = ranks * choice.memory.nvme, Path(config.zero.nvme_path)
        yield DiskNeed("of offloaded states", drive, states, states)


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, linked ones once; 0 if it is missing."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())
