"""The values that alarms watch: of GPUs, the machine and the run."""

import statistics
from collections.abc import Iterator, Sequence

from refocused.config.outputs import CostConfig
from refocused.metrics.history import StepMetrics
from refocused.metrics.jsonl import number
from refocused.metrics.rank_times import DEVIATION, SlowestRank
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_reader import Mirror, RunView
from refocused.monitor.sampler.alarms import Reading
from refocused.system.errors import counted
from refocused.system.number_text import duration

SLOWDOWN_CELSIUS = 87  # of a GPU that does not report it; that of the H100 and similar ones
LEAST_DISK_FRACTION, LEAST_DISK_GIB = 0.02, 5.0
# A shorter trend would be that of a single save; retention takes back what a longer one has.
SHORTEST_TREND_SECONDS, LONGEST_TREND_SECONDS = 1200.0, 3600.0
FEWEST_LOSSES = 20
SPIKE_NATS, SPIKE_DEVIATIONS = 0.5, 6.0
LOW_CLOCK = 0.95  # share of the clock of other GPUs; healthy ones differ by 1 or 2 %
BUSY_CPU = 0.9  # share of all cores' time
# Alarm, field and text of what a GPU should have as much of as others of its kind.
_AS_OTHERS = (
    ("gpu_nvlink", "nvlinks_active", "{} has {} active NVLinks; others of its kind have {}."),
    ("gpu_pcie", "pcie_width", "{} has {} PCIe lanes; others of its kind have {}."),
    (
        "gpu_power_limit",
        "power_limit_watts",
        "{} is limited to {:.0f} W; others of its kind to {:.0f} W.",
    ),
)

DiskPoint = tuple[float, float]  # seconds, and GiB that were free then


def gpu_readings(samples: Sequence[GpuSample], *, is_training: bool) -> Iterator[Reading]:
    """Yield the readings of a machine's GPUs, which should be busy if the run trains."""
    for gpu in samples:
        name = f"{gpu.host} GPU {gpu.index}"
        lost = f"({gpu.uuid or 'unknown UUID'}) has fallen off the bus: the driver cannot reach it."
        text = f"{name} {lost if gpu.lost else 'responds.'}"
        yield Reading("gpu_lost", name, gpu.lost, text)
        if gpu.lost:
            continue
        celsius, slowdown = gpu.temperature_celsius, gpu.slowdown_celsius or SLOWDOWN_CELSIUS
        text = f"{name} is at {celsius} C; it slows down at {slowdown} C."
        above = None if celsius is None else celsius - slowdown
        yield Reading("gpu_temperature", name, above, text)
        memory = gpu.memory_temperature_celsius
        text = f"The memory of {name} is at {memory} C."
        yield Reading("gpu_memory_temperature", name, memory, text)
        if gpu.throttle_reasons is not None:
            yield Reading("gpu_throttle", name, bool(gpu.throttle_reasons), _clock_text(gpu, name))
        power, limit = gpu.power_watts, gpu.power_limit_watts
        if limit and power is not None:
            text = f"{name} draws {power:.0f} W; its limit is {limit:.0f} W."
            yield Reading("gpu_power", name, power / limit, text)
        errors = gpu.ecc_uncorrected
        text = f"{name} has had {errors or 0:,} uncorrected memory errors since the driver was "
        yield Reading("gpu_ecc", name, errors, f"{text}loaded.")
        text = f"{name} has {'no' if gpu.remap_failed else 'enough'} spare rows for broken memory."
        yield Reading("gpu_remap_failed", name, gpu.remap_failed, text)
        row = "a broken memory row, which" if gpu.remap_pending else "no memory row that"
        text = f"{name} has {row} a reset will replace."
        yield Reading("gpu_remap_pending", name, gpu.remap_pending, text)
        peers = [one for one in samples if one.name == gpu.name]
        for alarm, field, text in _AS_OTHERS:  # where all are alike, the machine is built so
            own = getattr(gpu, field)
            most = max((value for one in peers if (value := getattr(one, field))), default=None)
            if own is not None and most:
                yield Reading(alarm, name, own / most, text.format(name, own, most))
        if gpu.local_rank is not None and is_training:
            busy = gpu.utilization_fraction
            text = f"{name} is busy {busy or 0:.0%} of the time while the run trains."
            yield Reading("gpu_idle", name, busy, text)
        elif gpu.local_rank is not None:  # clears the alarm of a run that has stopped
            yield Reading("gpu_idle", name, 1.0, f"{name} has no steps to compute.")


def _clock_text(gpu: GpuSample, name: str) -> str:
    reasons = ", ".join(gpu.throttle_reasons or ()).replace("_", " ")
    text = f"{name} is {f'throttled ({reasons})' if reasons else 'not throttled'}"
    if gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz is not None:
        text += f": {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz"
    return text + ("." if gpu.temperature_celsius is None else f", {gpu.temperature_celsius} C.")


def system_readings(system: SystemSample, disk: Sequence[DiskPoint]) -> Iterator[Reading]:
    """Yield the readings of a machine and of its disk, whose oldest point is the first."""
    free, total = system.disk_free_gib, system.disk_total_gib
    if free is not None and total is not None:
        least = max(LEAST_DISK_GIB, LEAST_DISK_FRACTION * total)
        text = f"{free:.1f} GiB of {total:.0f} GiB are free on the run's disk."
        yield Reading("disk_full", system.host, free / least, text)
        hours = hours_until_full(disk)
        rate = "." if hours is None else f"; at this rate it is full in {hours:.1f} h."
        text = f"{free:.1f} GiB are free on the run's disk{rate}"
        value = float("inf") if hours is None else hours
        yield Reading("disk_filling", system.host, value, text)
    used, memory = system.memory_used_gib, system.memory_total_gib
    if used is not None and memory:
        text = f"{system.host} uses {used:.1f} of {memory:.1f} GiB of memory."
        yield Reading("memory", system.host, used / memory, text)


def hours_until_full(disk: Sequence[DiskPoint]) -> float | None:
    """Return when a disk is full at its present rate; None: never, or too few points to tell."""
    if not disk:
        return None
    end, free = disk[-1]
    began, free_then = next(point for point in disk if end - point[0] <= LONGEST_TREND_SECONDS)
    if end - began < SHORTEST_TREND_SECONDS or free_then <= free:
        return None
    return free / (free_then - free) * (end - began) / 3600


def run_readings(run: RunView, cost: CostConfig, *, began: float, alive: bool) -> Iterator[Reading]:
    """Yield the readings of a run.

    Steps logged before `began` (Unix seconds) do not count; `alive`: the training process runs.
    """
    died = run.reported_status == "training" and not alive
    cause = "ended without reporting why; it was probably killed" if died else "has not died"
    text = f"The training process {cause} (step {run.step:,})."
    yield Reading("run_died", "run", died, text)
    yield from _loss(run, began=began)
    # While the status is an earlier session's, the mirror's file may be, too.
    if run.mirror is not None and (run.reported_status == "training" or not alive):
        yield from _mirror(run.mirror, run.now)
    yield from _money(run, cost)


def rank_readings(
    run: RunView, gpus: Sequence[GpuSample], systems: Sequence[SystemSample], *, began: float
) -> Iterator[Reading]:
    """Yield the reading of the slowest rank, if it is of this session, with the likely cause."""
    last = run.steps[-1] if run.steps else StepMetrics(0)
    slow = last.slowest
    if slow is None or (last.time or 0.0) < began:
        return
    excess = f"takes {slow.excess_fraction:.0%} longer than the others (mostly {slow.phase})"
    text = f"In each step {slow.place} {excess}."
    if slow.is_slow:
        text = f"{text[:-1]}, and they wait for it. {_slow_cause(slow, gpus, systems)}"
    yield Reading("slow_rank", "run", slow.excess_fraction / slow.limit_fraction, text)


def _slow_cause(
    slow: SlowestRank, gpus: Sequence[GpuSample], systems: Sequence[SystemSample]
) -> str:
    if slow.phase == "data":
        return "Its data come late: look at the disk, the network and the CPU of its machine."
    place = (slow.host, slow.local_rank)
    for own in (gpu for gpu in gpus if (gpu.host, gpu.local_rank) == place):
        name, clock = f"{own.host} GPU {own.index}", own.sm_clock_mhz
        if own.throttle_reasons:
            return _clock_text(own, name)
        peers = [one for one in gpus if one.name == own.name and one.local_rank is not None]
        usual = statistics.median(one.sm_clock_mhz or 0 for one in peers)
        if clock and clock < LOW_CLOCK * usual:
            return f"{name} runs at {clock} MHz; others of its kind at {usual:.0f} MHz."
    for host in (system for system in systems if system.host == slow.host):
        busy, load = host.cpu_fraction or 0.0, host.load_1m or 0.0
        if busy >= BUSY_CPU or load > (host.cpu_cores or load):
            return f"The CPU of {host.host} is busy: {busy:.0%}, load {load:.0f}."
        return "The readings of its machine show no cause."
    return "There are no readings of its machine here."


def _loss(run: RunView, *, began: float) -> Iterator[Reading]:
    logged = [point for point in run.steps if point.time is not None]
    if not logged or (logged[-1].time or 0.0) < began:
        return
    last = logged[-1]
    value = "not finite" if last.loss is None else f"{last.loss:.4f}"
    text = f"The loss of step {last.step:,} is {value}"
    yield Reading("non_finite", "run", last.loss is None, f"{text}.")
    before = [point.loss for point in logged[:-1] if point.loss is not None]
    if last.loss is not None and len(before) >= FEWEST_LOSSES:
        median = statistics.median(before)
        spread = DEVIATION * statistics.median(abs(loss - median) for loss in before)
        jump = max(SPIKE_NATS, SPIKE_DEVIATIONS * spread)
        text += f"; the median of the {len(before)} logged before it is {median:.4f}."
        yield Reading("loss_spike", "run", (last.loss - median) / jump, text)


def _mirror(mirror: Mirror, now: float) -> Iterator[Reading]:
    if mirror.heartbeat is None:
        return
    error = mirror.last_error
    text = "The mirror's uploads work." if error is None else f"The mirror's uploads fail: {error}"
    yield Reading("mirror_failing", "run", error is not None, text)
    text = f"{counted(mirror.waiting, 'checkpoint waits', 'checkpoints wait')} to be mirrored."
    yield Reading("mirror_behind", "run", mirror.waiting, text)
    silent = max(0.0, now - mirror.heartbeat)
    text = f"The mirror's last heartbeat was {duration(silent)} ago."
    yield Reading("mirror_silent", "run", 0.0 if mirror.drained else silent, text)


def _money(run: RunView, cost: CostConfig) -> Iterator[Reading]:
    spent = number(run.state or {}, "cost_usd")  # of all sessions
    if spent is None:
        return
    if cost.budget_usd is not None:  # at 100 % the run itself saves and stops
        share = spent / cost.budget_usd
        text = (
            f"The run has cost ${spent:,.2f}, {share:.0%} of its budget (${cost.budget_usd:,.2f})."
        )
        yield Reading("budget_80", "run", share, text)
        yield Reading("budget_95", "run", share, text)
    if cost.credit_usd is None or not cost.per_hour_usd:
        return
    left = cost.credit_usd - spent
    hours = left / cost.per_hour_usd
    lasts = f"The credit lasts for {max(0.0, hours):.1f} h"
    rest = run.steps[-1].cost_left_usd if run.steps else None
    if rest is not None:
        share = rest / left if left > 0 else float("inf")
        text = (
            f"{lasts} (${left:,.2f}); the rest of the run takes "
            f"{rest / cost.per_hour_usd:.1f} h (${rest:,.2f})."
        )
        yield Reading("credit_short", "run", share if run.has_steps_left else 0.0, text)
    text = f"{lasts} more; then the provider takes the machine."
    yield Reading("credit_ending", "run", hours if run.has_steps_left else float("inf"), text)
