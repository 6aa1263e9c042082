"""Compare models: speed and memory by length and batch, scores by step, spectra."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from refocused.config.model_shape import ModelShape
from refocused.evaluate.load_model import quiet_transformers
from refocused.evaluate.model_weights import TORCH_DTYPES, Dtype, network_class
from refocused.evaluate.multiple_choice import Measure
from refocused.models.families import transformers_config
from refocused.models.resonance.resonators import Resonators, grid
from refocused.models.ten.cells import TenCells
from refocused.models.ten.scan import Spectrum
from refocused.system.errors import ConfigError

REPEATS = 3
BINS = 30  # of the histogram of horizons
CLEAR_PEAK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedRow:
    """One model at one length and batch; None is unknown, or too long for the model."""

    model: str
    parameters: int
    length: int  # tokens of each prompt
    batch: int  # prompts at once
    latency_seconds: float | None = None  # median, to read all prompts
    tokens_per_second: float | None = None  # read
    written_per_second: float | None = None  # generated tokens a second, with the model's cache
    memory_gib: float | None = None  # peak of a pass, without the weights


def measure_speed(
    name: str,
    network: Any,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[SpeedRow]:
    """Yield a row for each length and batch, ascending; generate only if `new_tokens` > 1."""
    longest = getattr(network.config, "max_position_embeddings", None) or float("inf")
    vocabulary, draw = network.config.vocab_size, torch.Generator()
    for length in sorted(lengths):
        for batch in sorted(batches):
            row = SpeedRow(name, network.num_parameters(), length, batch)
            if length > longest:
                yield row
                continue
            ids = torch.randint(vocabulary, (batch, length), generator=draw.manual_seed(0))
            ids, written = ids.to(network.device), None
            if new_tokens > 1 and length + new_tokens <= longest:
                written = _writing_rate(network, ids, new_tokens, clock)
            read = functools.partial(_read, network, ids)
            memory_bytes = _peak_bytes(ids.device, read)
            seconds = _median_seconds(read, clock)
            yield dataclasses.replace(
                row,
                latency_seconds=seconds,
                tokens_per_second=ids.numel() / seconds,
                written_per_second=written,
                memory_gib=None if memory_bytes is None else memory_bytes / 2**30,
            )


def _read(network: Any, ids: Tensor) -> None:
    with torch.inference_mode():
        network(input_ids=ids, use_cache=False)
    _finish(ids.device)


def _writing_rate(
    network: Any, ids: Tensor, new_tokens: int, clock: Callable[[], float]
) -> float | None:
    """Return tokens generated per second, without the prompt; None: too few to measure."""

    def write(count: int) -> None:
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        _finish(ids.device)

    write(1)
    reading = _median_seconds(lambda: write(1), clock)
    # The prompt's pass gives the first token. On a busy machine noise may hide the rest.
    seconds = _median_seconds(lambda: write(new_tokens), clock) - reading
    return len(ids) * (new_tokens - 1) / seconds if seconds > 0 else None


def _median_seconds(action: Callable[[], None], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device, action: Callable[[], None]) -> int | None:
    """Return the peak memory of an action beyond what was allocated; None: unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return torch.cuda.max_memory_allocated(device) - held
    try:
        CLEAR_PEAK.write_text("5")  # resets the peak of the resident set (proc(5))
        held = _resident_bytes("VmRSS:")
    except OSError:
        action()
        return None
    action()
    return max(0, _resident_bytes("VmHWM:") - held)


def _resident_bytes(name: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def random_network(shape: ModelShape, *, dtype: Dtype) -> Any:
    """Build a model of a shape with random weights, in evaluation mode, on the CPU."""
    quiet_transformers()
    config = transformers_config(shape.settings, vocabulary=shape.vocabulary, dropout=0.0)
    return network_class(config)(config).to(TORCH_DTYPES[dtype]).eval()


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSpectrum:
    """The modes of one module, now and when initialized; horizons in its own tokens."""

    name: str
    now: Spectrum
    start: Spectrum

    def summary(self) -> dict[str, float]:
        """Return the number of modes, horizons in tokens and frequencies in radians per token."""
        horizons, frequencies = self.now.horizon_tokens.detach(), self.now.frequency.detach()
        return {
            "modes": len(horizons),
            "shortest_tokens": float(horizons.min()),
            "median_tokens": float(horizons.median()),
            "longest_tokens": float(horizons.max()),
            "lowest_frequency": float(frequencies.min()),
            "median_frequency": float(frequencies.median()),
            "highest_frequency": float(frequencies.max()),
        }


def spectra(model: nn.Module) -> list[ModuleSpectrum]:
    """Return the spectra of a model on the CPU, in module order; raise ConfigError without any."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, TenCells):
            found.append(ModuleSpectrum(name, module.spectrum(), module.initial_spectrum()))
        elif isinstance(module, Resonators):
            now, (decay, frequency) = module.spectrum(), grid(module.count, module.max_length)
            found.append(ModuleSpectrum(name, Spectrum(*now), Spectrum(-decay, frequency)))
    if not found:
        raise ConfigError(
            "This model uses attention, which has no spectrum. Models of the families resonance "
            "and ten have one."
        )
    return found


def draw_spectrum(modules: Sequence[ModuleSpectrum], file: Path, *, title: str) -> None:
    """Write a PNG with each mode's frequency over its horizon, and histograms of horizons."""
    now = torch.cat([one.now.horizon_tokens for one in modules]).detach().numpy()
    start = torch.cat([one.start.horizon_tokens for one in modules]).detach().numpy()
    frequencies = torch.cat([one.now.frequency for one in modules]).detach().numpy()
    owners = np.repeat(np.arange(len(modules)), [len(one.now.frequency) for one in modules])
    figure, (places, counts) = _panels(2)
    points = places.scatter(now, frequencies, c=owners, s=6, cmap="viridis")
    figure.colorbar(points, ax=places, label="part of the model (first to last)")
    places.set(xscale="log", xlabel="horizon (tokens)", ylabel="frequency (radians a token)")
    bins = np.geomspace(1, max(now.max(), start.max()), BINS).tolist()
    counts.hist(now, bins=bins, label="now")
    counts.hist(start, bins=bins, histtype="step", label="start")
    counts.set(xscale="log", xlabel="horizon (tokens)", ylabel="modes")
    counts.legend()
    figure.suptitle(title)
    _save(figure, file)


def draw_scores(
    rows: Mapping[str, Mapping[str, Measure]], file: Path, *, steps: Mapping[str, int]
) -> None:
    """Write a PNG with each measure over the models' steps; over their names without steps."""
    names = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    figure, panels = _panels(len(names))
    over_steps = len(set(steps.values())) == len(rows)
    for axes, name in zip(panels, names, strict=True):
        known = {model: found[name] for model, found in rows.items() if name in found}
        axes.errorbar(
            [steps[model] if over_steps else model for model in known],
            [measure.value for measure in known.values()],
            yerr=[measure.standard_error or 0.0 for measure in known.values()],
            marker="o",
            capsize=3,
            linestyle="-" if over_steps else "",
        )
        axes.set(title=name, xlabel="step" if over_steps else "model")
        axes.tick_params(axis="x", labelrotation=0 if over_steps else 30)
    _save(figure, file)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with `count` axes, two in a row."""
    from matplotlib.figure import Figure

    rows = (count + 1) // 2
    figure = Figure(figsize=(11, 4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.grid(alpha=0.3)
    return figure, panels[:count]


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
