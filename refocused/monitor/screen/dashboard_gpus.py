"""The table of a run's GPUs, as lines: a GPU in each, and what is wrong with it behind."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from refocused.monitor.readings import GpuSample
from refocused.monitor.run_status import RunView
from refocused.monitor.screen.dashboard_words import stale_text, value

_HEAD = ("GPU", "util", "memory GiB", "temp", "power W", "SM MHz", "link", "ECC")
_WIDTHS = (3, 4, 11, 4, 7, 9, 5, 3)
_THROTTLES = {  # the worst first
    "hw_thermal": "HW THERMAL",
    "hw_power_brake": "POWER BRAKE",
    "sw_thermal": "THERMAL",
    "hw_slowdown": "HW SLOWDOWN",
}


def gpu_lines(view: RunView) -> list[Text]:
    """Return the table of GPUs; one line that says so where there is none."""
    if not view.gpus:
        notes = [system.gpu_note for system in view.systems if system.gpu_note]
        return [Text(f" {notes[0] if notes else 'no GPU samples'}", style="dim")]
    several = len({gpu.host for gpu in view.gpus}) > 1
    return [
        Text(_row(_HEAD, stale_text(view.samples_age_seconds) or "note"), style="bold"),
        *(_line(gpu, host=gpu.host if several else "") for gpu in view.gpus),
    ]


def _line(gpu: GpuSample, *, host: str) -> Text:
    trouble = gpu_trouble(gpu)
    if gpu.lost:
        return Text(f" {gpu.index:<3} LOST   {trouble} {host}", style="bold red")
    cells = (
        f"{gpu.index}",
        value(gpu.utilization_fraction, ".0%"),
        _pair(gpu.memory_used_gib, gpu.memory_total_gib, ".1f"),
        value(gpu.temperature_celsius, ".0f") + " C",
        _pair(gpu.power_watts, gpu.power_limit_watts, ".0f"),
        _pair(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, ".0f"),
        _pair(gpu.nvlinks_active, gpu.nvlinks_total, ".0f"),
        value(gpu.ecc_uncorrected, ".0f"),
    )
    line = Text(_row(cells, ""))
    return line.append(f"{trouble} " if trouble else "", style="bold red").append(host, style="dim")


def _row(cells: Sequence[str], note: str) -> str:
    first, *others = (
        f"{cell:>{width}}" if place else f"{cell:<{width}}"
        for place, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return f" {first} {'  '.join(others)}  {note}"


def gpu_trouble(gpu: GpuSample) -> str:
    """Say what is wrong with a GPU in few words; empty: nothing that it tells of."""
    troubles = []
    if gpu.lost:
        troubles.append("fallen off the bus")
    troubles += [
        words for name, words in _THROTTLES.items() if name in (gpu.throttle_reasons or ())
    ][:1]
    if gpu.ecc_uncorrected:
        troubles.append("memory errors")
    if gpu.remap_failed or gpu.remap_pending:
        troubles.append("row remap failed" if gpu.remap_failed else "row remap pending")
    return "; ".join(troubles)


def _pair(used: float | None, total: float | None, form: str) -> str:
    return f"{value(used, form)}/{value(total, form)}"
