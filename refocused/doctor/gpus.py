"""The GPUs and their driver: whether there are enough, alike, healthy, free and linked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from refocused.doctor.finding import Finding
from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.alarm_rules import gpu_readings
from refocused.system.errors import RefocusedError

BUSY_GIB = 2.0  # more than a driver and a screen hold


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """What NVIDIA's library and torch say.

    Attributes:
        samples: One of each GPU that the run would have, of all where that is not known.
        note: Why there are none; None where there are.
        is_fault: There is a driver, and it does not answer.
        driver: Its version; None: unknown.
        driver_cuda: Newest CUDA that the driver runs; None: unknown.
        torch_cuda: CUDA that torch was built for; None: it was built without.
        torch_count: GPUs that torch sees (`CUDA_VISIBLE_DEVICES` counts).
        capability: Compute capability of the least able one; None: unknown, or there are none.
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
    """Ask NVIDIA's library and torch.

    Args:
        host: Name of this machine.
        wanted: GPUs that the run is to have; None: all that torch sees.
        environment: Of this process, which chooses among them.
    """
    import torch

    from refocused.monitor.sampler.gpu_reader import (
        GpuReader,
        NoGpusError,
        driver_versions,
        gpu_capabilities,
    )

    try:
        known = dict(enumerate(gpu_capabilities()))  # torch would hang where the driver does
    except RefocusedError as error:
        return Gpus(note=str(error), is_fault=True)
    torch_cuda, torch_count = torch.version.cuda, torch.cuda.device_count()
    try:
        reader = GpuReader(
            host=host,
            visible=environment.get("CUDA_VISIBLE_DEVICES"),
            cuda_order=environment.get("CUDA_DEVICE_ORDER"),
            ranks=wanted or torch_count,
        )
    except NoGpusError as error:
        return Gpus(
            note=str(error), is_fault=error.is_fault, torch_cuda=torch_cuda, torch_count=torch_count
        )
    try:
        driver, driver_cuda = driver_versions()
        samples = tuple(chosen(reader.samples()))
    finally:
        reader.close()
    return Gpus(
        samples=samples,
        note=None if samples else "The driver lists no GPU.",
        is_fault=not samples,
        driver=driver,
        driver_cuda=driver_cuda,
        torch_cuda=torch_cuda,
        torch_count=torch_count,
        capability=min((one for gpu in samples if (one := known.get(gpu.index))), default=None),
    )


def chosen(samples: Sequence[GpuSample]) -> Sequence[GpuSample]:
    """Return the GPUs that ranks would have; all, where nobody knows which those are."""
    return [gpu for gpu in samples if gpu.local_rank is not None] or samples


def judge_gpus(
    found: Gpus, *, wanted: int | None, device: Literal["auto", "cuda", "cpu"]
) -> Iterator[Finding]:
    """Say what of the GPUs is in the way of a run, or slows it down.

    Args:
        found: What there is.
        wanted: GPUs that the run is to have; None: all.
        device: `run.device`.
    """
    if device == "cpu":
        yield Finding("gpus", "ok", "not used (run.device=cpu)")
        return
    if not found.samples:
        yield _none(found, needed=device == "cuda" or wanted is not None)
        return
    yield from _count(found, wanted)
    yield from _torch(found, wanted)
    yield from _health(found.samples)
    yield from _free(found.samples)
    if len(found.samples) > 1:
        yield _links(found.samples)


def _none(found: Gpus, *, needed: bool) -> Finding:
    if found.is_fault:
        return Finding("gpus", "fail", str(found.note))
    if needed:
        return Finding(
            "gpus",
            "fail",
            "this machine has no NVIDIA driver, and the run is to have GPUs",
            "Rent a machine with GPUs, or set run.device=cpu for a trial.",
        )
    return Finding("gpus", "warn", "none: the run would train on the CPU, which is for trials only")


def _count(found: Gpus, wanted: int | None) -> Iterator[Finding]:
    samples = found.samples
    kinds = sorted({gpu.name for gpu in samples if gpu.name is not None})
    first = max(samples, key=lambda gpu: not gpu.lost)
    memory = f", {first.memory_total_gib:.1f} GiB" if first.memory_total_gib else ""
    cuda = f" (CUDA {found.driver_cuda[0]}.{found.driver_cuda[1]})" if found.driver_cuda else ""
    text = f"{len(samples)} x {first.name or 'unknown'}{memory}, driver {found.driver}{cuda}"
    if wanted is not None and wanted > len(samples):
        fix = f"Start with {len(samples)}, or ask for a machine with {wanted}."
        yield Finding("gpus", "fail", f"{wanted} are wanted, and there are {text}", fix)
    elif len(kinds) > 1:
        yield Finding(
            "gpus",
            "warn",
            f"{len(samples)} of several kinds ({', '.join(kinds)}): the slowest sets the pace",
            "Choose those of one kind by CUDA_VISIBLE_DEVICES.",
        )
    else:
        yield Finding("gpus", "ok", text)


def _torch(found: Gpus, wanted: int | None) -> Iterator[Finding]:
    """Compare torch with the driver below it."""
    if found.torch_cuda is None:
        yield Finding(
            "torch",
            "fail",
            "torch is built without CUDA, and cannot use the GPUs",
            "Install the build for CUDA: ./launch/setup_environment.sh chooses it.",
        )
        return
    built = int(found.torch_cuda.partition(".")[0])
    if found.driver_cuda is not None and found.driver_cuda[0] < built:
        newest = ".".join(str(part) for part in found.driver_cuda)
        yield Finding(
            "torch",
            "fail",
            f"torch is built for CUDA {found.torch_cuda}, and the driver runs up to {newest}",
            "Install a newer driver, or torch for the driver's CUDA.",
        )
    elif found.torch_count < (wanted or 1):
        yield Finding(
            "torch",
            "fail",
            f"torch sees {found.torch_count} of the {len(found.samples)} GPUs",
            "See CUDA_VISIBLE_DEVICES, and what torch.cuda.init() says.",
        )
    else:
        yield Finding(
            "torch", "ok", f"built for CUDA {found.torch_cuda}, sees {found.torch_count} GPUs"
        )


def _health(samples: Sequence[GpuSample]) -> Iterator[Finding]:
    """Put the alarms' own rules to the GPUs."""
    bad = [one for one in gpu_readings(samples, is_training=False) if one.level == "bad"]
    for reading in bad:
        level: Literal["warn", "fail"] = "fail" if reading.severity == "critical" else "warn"
        yield Finding("health", level, reading.text)
    for gpu in samples:
        if gpu.mig:
            yield Finding(
                "health",
                "warn",
                f"GPU {gpu.index} is cut into slices (MIG): a rank gets one slice of it",
                "Turn MIG off (nvidia-smi -mig 0) where the whole GPU is paid for.",
            )
    if not bad:
        told = [gpu.ecc_uncorrected for gpu in samples if gpu.ecc_uncorrected is not None]
        ecc = "no memory errors" if told else "ECC is off or does not tell"
        degrees = [gpu.temperature_celsius for gpu in samples if gpu.temperature_celsius]
        heat = f", at most {max(degrees)} C" if degrees else ""
        yield Finding("health", "ok", f"{ecc}, no row to replace, none throttled{heat}")


def _free(samples: Sequence[GpuSample]) -> Iterator[Finding]:
    """Find memory that somebody else holds."""
    busy = [gpu for gpu in samples if (gpu.memory_used_gib or 0.0) > BUSY_GIB]
    if not busy:
        return
    most = max(gpu.memory_used_gib or 0.0 for gpu in busy)
    pids = sorted({pid for gpu in busy for pid in gpu.processes or ()})
    whose = f"process {_listed(pids)}" if pids else "processes that are not seen from here"
    yield Finding(
        "memory",
        "warn",
        f"of GPU {_listed([gpu.index for gpu in busy])} up to {most:.1f} GiB are in use by {whose}",
        "End what is left there (nvidia-smi), or choose other GPUs by CUDA_VISIBLE_DEVICES.",
    )


def _links(samples: Sequence[GpuSample]) -> Finding:
    """Say how the GPUs are linked; one that lacks some of its links is unhealthy."""
    without = [gpu.index for gpu in samples if not gpu.nvlinks_active and not gpu.lost]
    if not without:
        return Finding("nvlink", "ok", f"{fewest_links(samples)} links up on every GPU")
    return Finding(
        "nvlink",
        "warn",
        f"GPU {_listed(without)} has no NVLink that is up: what ZeRO exchanges goes over PCIe",
        "zero.stage=1 exchanges least; machines with NVLink (SXM, HGX) exchange tens of times "
        "faster.",
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def smallest_memory_bytes(samples: Sequence[GpuSample]) -> float | None:
    """Return the memory of the smallest GPU; None: none tells."""
    told = [gpu.memory_total_gib for gpu in samples if gpu.memory_total_gib is not None]
    return min(told) * 2**30 if told else None


def fewest_links(samples: Sequence[GpuSample]) -> int | None:
    """Return the NVLinks of the GPU that has the fewest up; None: no GPU answers."""
    return min((gpu.nvlinks_active or 0 for gpu in samples if not gpu.lost), default=None)
