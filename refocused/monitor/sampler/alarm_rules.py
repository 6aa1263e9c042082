"""The rules for GPUs: what of a sample is an alarm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.alarms import Level, Reading, level_above, level_below

SLOWDOWN_CELSIUS = 87  # where a GPU does not tell; that of the H100 and its like
MEMORY_CELSIUS = 95  # HBM3 is specified to this
SHORT_SECONDS = 10.0  # what lasts less is a spike
IDLE_SECONDS = 120.0  # longer than a validation or a save leaves a GPU to wait
IDLE_FRACTION, BUSY_FRACTION = 0.3, 0.5
POWER_OVER_FRACTION = 1.1


def gpu_readings(samples: Sequence[GpuSample], *, is_training: bool) -> Iterator[Reading]:
    """Return what the rules say of a machine's GPUs.

    Args:
        samples: Of one time.
        is_training: Whether the run takes steps, so that its GPUs should be at work.
    """
    for gpu in samples:
        yield Reading("gpu_lost", _name(gpu), _yes(gpu.lost), _lost_text(gpu), "critical")
        if not gpu.lost:
            peers = [other for other in samples if other.name == gpu.name]
            yield from _heat(gpu)
            yield from _memory_errors(gpu)
            yield from _links(gpu, peers)
            yield from _power(gpu, peers)
            if gpu.local_rank is not None:
                yield from _work(gpu, is_training=is_training)


def _heat(gpu: GpuSample) -> Iterator[Reading]:
    if gpu.temperature_celsius is not None:
        slowdown = gpu.slowdown_celsius or SLOWDOWN_CELSIUS
        yield Reading(
            "gpu_temperature",
            _name(gpu),
            level_above(gpu.temperature_celsius, bad=slowdown - 2, good=slowdown - 7),
            f"{_name(gpu)} is at {gpu.temperature_celsius} C; it slows down at {slowdown} C. See "
            "that its fans run and that the room is cool.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if gpu.memory_temperature_celsius is not None:
        yield Reading(
            "gpu_memory_temperature",
            _name(gpu),
            level_above(
                gpu.memory_temperature_celsius, bad=MEMORY_CELSIUS, good=MEMORY_CELSIUS - 5
            ),
            f"the memory of {_name(gpu)} is at {gpu.memory_temperature_celsius} C.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if gpu.throttle_reasons is not None:
        yield Reading(
            "gpu_throttle",
            _name(gpu),
            _yes(bool(gpu.throttle_reasons)),
            _throttle_text(gpu),
            raised_after_seconds=SHORT_SECONDS,
            cleared_after_seconds=3 * SHORT_SECONDS,
        )


def _memory_errors(gpu: GpuSample) -> Iterator[Reading]:
    if gpu.ecc_uncorrected is not None:
        yield Reading(
            "gpu_ecc",
            _name(gpu),
            _yes(gpu.ecc_uncorrected > 0),
            f"{_name(gpu)} has had {gpu.ecc_uncorrected:,} memory errors that could not be "
            "corrected since its driver was loaded. Look at the loss, and have the GPU reset.",
            "critical",
        )
    if gpu.remap_failed is not None:
        yield Reading(
            "gpu_remap_failed",
            _name(gpu),
            _yes(gpu.remap_failed),
            f"{_name(gpu)} has no spare rows for its broken memory: have it exchanged.",
            "critical",
        )
    if gpu.remap_pending is not None:
        yield Reading(
            "gpu_remap_pending",
            _name(gpu),
            _yes(gpu.remap_pending),
            f"{_name(gpu)} has a broken row of memory that only a reset replaces: have it reset "
            "at the next stop.",
        )


def _links(gpu: GpuSample, peers: Sequence[GpuSample]) -> Iterator[Reading]:
    """Compare with the GPUs of the same kind: what all lack is how the machine is built."""
    best_nvlink = _most(peer.nvlinks_active for peer in peers)
    if gpu.nvlinks_active is not None and best_nvlink:
        yield Reading(
            "gpu_nvlink",
            _name(gpu),
            _yes(gpu.nvlinks_active < best_nvlink),
            f"{_name(gpu)} has {gpu.nvlinks_active:g} NVLinks that are up, others have "
            f"{best_nvlink:g}: every step waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )
    best_width = _most(peer.pcie_width for peer in peers)
    if gpu.pcie_width is not None and best_width:
        yield Reading(
            "gpu_pcie",
            _name(gpu),
            _yes(gpu.pcie_width < best_width),
            f"{_name(gpu)} has {gpu.pcie_width:g} PCIe lanes, others have {best_width:g}.",
            raised_after_seconds=SHORT_SECONDS,
        )


def _power(gpu: GpuSample, peers: Sequence[GpuSample]) -> Iterator[Reading]:
    limit, highest = gpu.power_limit_watts, _most(peer.power_limit_watts for peer in peers)
    if limit and highest:
        yield Reading(
            "gpu_power_limit",
            _name(gpu),
            level_below(limit / highest, bad=0.95, good=0.97),
            f"{_name(gpu)} may draw {limit:.0f} W, others of its kind {highest:.0f} W: every step "
            "waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if limit and gpu.power_watts is not None:
        yield Reading(
            "gpu_power",
            _name(gpu),
            level_above(gpu.power_watts / limit, bad=POWER_OVER_FRACTION, good=1.02),
            f"{_name(gpu)} draws {gpu.power_watts:.0f} W of {limit:.0f} W that it may.",
            raised_after_seconds=3 * SHORT_SECONDS,
        )


def _work(gpu: GpuSample, *, is_training: bool) -> Iterator[Reading]:
    """A run that takes no steps any more ends the alarm."""
    if not is_training:
        yield Reading("gpu_idle", _name(gpu), "good", f"{_name(gpu)} has no steps to compute.")
    elif gpu.utilization_fraction is not None:
        yield Reading(
            "gpu_idle",
            _name(gpu),
            level_below(gpu.utilization_fraction, bad=IDLE_FRACTION, good=BUSY_FRACTION),
            f"{_name(gpu)} is busy {gpu.utilization_fraction:.0%} of the time while the run "
            "trains. See the share of `data` in the log lines, and whether another GPU is slow.",
            raised_after_seconds=IDLE_SECONDS,
        )


def _name(gpu: GpuSample) -> str:
    return f"{gpu.host} GPU {gpu.index}"


def _lost_text(gpu: GpuSample) -> str:
    if not gpu.lost:
        return f"{_name(gpu)} answers."
    return (
        f"{_name(gpu)} ({gpu.uuid or 'of unknown UUID'}) is lost: it answers nothing any more. "
        "Restart the machine, or ask for another one; the run goes on from its last checkpoint."
    )


def _throttle_text(gpu: GpuSample) -> str:
    reasons = ", ".join(gpu.throttle_reasons or ()).replace("_", " ")
    clocks = ""
    if gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz is not None:
        clocks = f": {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz"
    heat = "" if gpu.temperature_celsius is None else f", {gpu.temperature_celsius} C"
    return f"{_name(gpu)} {reasons or 'not throttled'}{clocks}{heat}"


def _yes(is_bad: bool) -> Level:
    return "bad" if is_bad else "good"


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
