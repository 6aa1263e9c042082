"""Check the GPUs and their driver: number, kind, health, free memory and links."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from refocused.doctor.finding import Finding, Level
from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.alarms import alarm_rules, gpu_readings
from refocused.system.errors import RefocusedError, counted

BUSY_GB = 2.0  # more than a driver and a screen hold


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """What NVIDIA's library and torch report; None: unknown.

    `samples` holds the GPUs of the run, or all GPUs if that is unknown. If it is empty, `note` says
    why; `is_fault` means that a driver does not answer. `driver_cuda` is the newest CUDA version
    that the driver supports, `capability` the lowest of the GPUs.
    """

    samples: tuple[GpuSample, ...] = ()
    note: str | None = None
    is_fault: bool = False
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None
    torch_count: int = 0
    capability: tuple[int, int] | None = None


def probe_gpus(host: str, *, wanted: int | None, environment: Mapping[str, str]) -> Gpus:
    """Query NVIDIA's library and torch for `wanted` GPUs (None: all that torch sees)."""
    import torch

    from refocused.monitor.sampler import gpu_reader

    try:
        # First of all: if the driver hangs, torch would, too.
        known = dict(enumerate(gpu_reader.gpu_capabilities()))
    except RefocusedError as error:
        return Gpus(note=str(error), is_fault=True)
    found = Gpus(torch_cuda=torch.version.cuda, torch_count=torch.cuda.device_count())
    try:
        reader = gpu_reader.GpuReader(
            host=host,
            visible=environment.get("CUDA_VISIBLE_DEVICES"),
            cuda_order=environment.get("CUDA_DEVICE_ORDER"),
            ranks=wanted or found.torch_count,
        )
    except gpu_reader.NoGpusError as error:
        return dataclasses.replace(found, note=str(error), is_fault=error.is_fault)
    with contextlib.closing(reader):
        driver, driver_cuda = gpu_reader.driver_versions()
        samples = tuple(chosen(reader.samples()))
    return dataclasses.replace(
        found,
        samples=samples,
        note=None if samples else "The driver lists no GPU.",
        is_fault=not samples,
        driver=driver,
        driver_cuda=driver_cuda,
        capability=min((one for gpu in samples if (one := known.get(gpu.index))), default=None),
    )


def chosen(samples: Sequence[GpuSample]) -> Sequence[GpuSample]:
    """Return the GPUs that ranks would have; all, where that is unknown."""
    return [gpu for gpu in samples if gpu.local_rank is not None] or samples


def judge_gpus(
    found: Gpus, *, wanted: int | None, device: Literal["auto", "cuda", "cpu"]
) -> Iterator[Finding]:
    """Report what about the GPUs stops a run or slows it down; `device` is `run.device`."""
    if device == "cpu":
        yield Finding("gpus", "ok", "not used (run.device=cpu)")
    elif found.samples:
        yield _count(found, wanted)
        yield _torch(found, wanted)
        yield from _health(found.samples)
        yield from _free(found.samples)
        if len(found.samples) > 1:
            yield _links(found.samples)
    elif found.is_fault:
        yield Finding("gpus", "fail", str(found.note))
    elif device == "cuda" or wanted is not None:
        fix = "Rent a machine with GPUs, or set run.device=cpu for a trial."
        text = "this machine has no NVIDIA driver, and the run needs GPUs"
        yield Finding("gpus", "fail", text, fix)
    else:
        text = "none: the run would train on the CPU, which is only for trials"
        yield Finding("gpus", "warn", text)


def _count(found: Gpus, wanted: int | None) -> Finding:
    samples = found.samples
    kinds = sorted({gpu.name for gpu in samples if gpu.name is not None})
    first = max(samples, key=lambda gpu: not gpu.lost)
    memory = f", {first.memory_total_gb:.1f} GB" if first.memory_total_gb else ""
    cuda = f" (CUDA {'.'.join(map(str, found.driver_cuda))})" if found.driver_cuda else ""
    text = f"{len(samples)} x {first.name or 'unknown'}{memory}, driver {found.driver}{cuda}"
    if wanted is not None and wanted > len(samples):
        fix = f"Start with {len(samples)}, or ask for a machine with {wanted}."
        return Finding("gpus", "fail", f"{wanted} requested, found {text}", fix)
    if len(kinds) > 1:
        text = f"{len(samples)} of several kinds ({', '.join(kinds)}): the slowest sets the pace"
        return Finding("gpus", "warn", text, "Select one kind with CUDA_VISIBLE_DEVICES.")
    return Finding("gpus", "ok", text)


def _torch(found: Gpus, wanted: int | None) -> Finding:
    built = found.torch_cuda
    if built is None:
        text = "torch is built without CUDA and cannot use the GPUs"
        fix = "Install torch's build for CUDA; pip takes the build that its index offers."
        return Finding("torch", "fail", text, fix)
    if found.driver_cuda is not None and found.driver_cuda[0] < int(built.partition(".")[0]):
        newest = ".".join(map(str, found.driver_cuda))
        text = f"torch is built for CUDA {built}, but the driver supports up to {newest}"
        fix = "Install a newer driver, or torch for the driver's CUDA."
        return Finding("torch", "fail", text, fix)
    if found.torch_count < (wanted or 1):
        text = f"torch sees {found.torch_count} of the {counted(len(found.samples), 'GPU')}"
        fix = "Check CUDA_VISIBLE_DEVICES and the error of torch.cuda.init()."
        return Finding("torch", "fail", text, fix)
    return Finding(
        "torch", "ok", f"built for CUDA {built}, sees {counted(found.torch_count, 'GPU')}"
    )


def _health(samples: Sequence[GpuSample]) -> Iterator[Finding]:
    """Apply the rules of the alarms to the GPUs."""
    bad = [one for one in gpu_readings(samples, is_training=False) if one.level == "bad"]
    for reading in bad:
        rule = alarm_rules()[reading.alarm]
        level: Level = "fail" if rule.severity == "critical" else "warn"
        yield Finding("health", level, reading.text, rule.advice)
    for gpu in samples:
        if gpu.mig:
            text = f"GPU {gpu.index} is divided by MIG: a rank gets one slice of it"
            fix = "Turn MIG off (nvidia-smi -mig 0) if you rent the whole GPU."
            yield Finding("health", "warn", text, fix)
    if not bad:
        has_ecc = any(gpu.ecc_uncorrected is not None for gpu in samples)
        ecc = "no memory errors" if has_ecc else "ECC is off or not reported"
        degrees = [gpu.temperature_celsius for gpu in samples if gpu.temperature_celsius]
        heat = f", at most {max(degrees)} C" if degrees else ""
        yield Finding("health", "ok", f"{ecc}, no row to replace, none throttled{heat}")


def _free(samples: Sequence[GpuSample]) -> Iterator[Finding]:
    """Report memory in use by other processes."""
    busy = {gpu.index: gpu for gpu in samples if (gpu.memory_used_gb or 0.0) > BUSY_GB}
    if not busy:
        return
    most = max(gpu.memory_used_gb or 0.0 for gpu in busy.values())
    pids = sorted({pid for gpu in busy.values() for pid in gpu.processes or ()})
    whose = f"process {_listed(pids)}" if pids else "processes that this container cannot see"
    text = f"up to {most:.1f} GB of GPU {_listed(busy)} are in use by {whose}"
    fix = "End them (see nvidia-smi), or select other GPUs with CUDA_VISIBLE_DEVICES."
    yield Finding("memory", "warn", text, fix)


def _links(samples: Sequence[GpuSample]) -> Finding:
    """Report the NVLinks of the GPUs; a GPU with some links down is an alarm."""
    without = [gpu.index for gpu in samples if not gpu.nvlinks_active and not gpu.lost]
    if not without:
        return Finding("nvlink", "ok", f"{fewest_links(samples)} links up on every GPU")
    text = f"GPU {_listed(without)} has no active NVLink: ZeRO communicates over PCIe"
    fix = "Use zero.stage=1, which communicates least, or GPUs with NVLink (SXM, HGX)."
    return Finding("nvlink", "warn", text, fix)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def smallest_memory_bytes(samples: Sequence[GpuSample]) -> float | None:
    """Return the memory of the smallest GPU; None: unknown."""
    known = [gpu.memory_total_gb for gpu in samples if gpu.memory_total_gb is not None]
    return min(known) * 1e9 if known else None


def fewest_links(samples: Sequence[GpuSample]) -> int | None:
    """Return the smallest number of active NVLinks of a GPU; None: no GPU answers."""
    return min((gpu.nvlinks_active or 0 for gpu in samples if not gpu.lost), default=None)
