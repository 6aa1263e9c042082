"""How fast models read and write, and how far back those without attention remember.

    .venv/bin/python benchmarks/inspect_models.py speed MODEL ... [--lengths N N] [--batches N N]
    .venv/bin/python benchmarks/inspect_models.py spectrum MODEL [--picture FILE.png]

A MODEL is a name in config/models, with random weights, or a folder that `refocused.api.load`
reads. `speed` gives medians of three passes. `spectrum` gives the horizons of the modes of each
module of resonance and TEN: after so many tokens a mode has forgotten 63 % of its input; on a scale
of s tokens it is counted in tokens of that scale.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Column, Record, parser_of, table, write_report
from torch import Tensor, nn

from refocused.api import load
from refocused.config.load_run import find_config
from refocused.config.model_shape import load_shape
from refocused.evaluate.model_weights import network_class
from refocused.models.families import transformers_config
from refocused.models.resonance import ResonatorBank, grid
from refocused.models.ten import Spectrum, TenCells
from refocused.system.errors import ConfigError

REPEATS = 3
BINS = 30  # of the histogram of horizons
SPEED = (
    Column("parameters", "parameters", "{:,.0f}"),
    Column("latency_seconds", "latency s", "{:.3f}"),
    Column("tokens_per_second", "read tok/s", "{:,.0f}"),
    Column("written_per_second", "written tok/s", "{:,.1f}"),
    Column("memory_gib", "memory GiB", "{:.3f}"),
)
HORIZONS = (
    Column("modes", "modes", "{:,.0f}"),
    *(Column(f"{name}_tokens", f"{name}, tokens") for name in ("shortest", "median", "longest")),
    *(
        Column(f"{name}_frequency", f"{name}, rad/token", "{:.2g}")
        for name in ("lowest", "median", "highest")
    ),
)


def main() -> None:
    """Measure what the first argument names."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("verb", choices=("speed", "spectrum"))
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], help="tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="prompts at once")
    parser.add_argument("--new-tokens", type=int, default=16, help="to generate; 0: none")
    parser.add_argument("--picture", type=Path, help="a PNG of the horizons of the first model")
    chosen = parser.parse_args()
    rows: dict[str, Record] = {}
    for model in chosen.models:
        if chosen.verb == "spectrum":
            modules = spectra(network_of(model))
            rows |= {f"{model} {module.name}": module.summary() for module in modules}
            if chosen.picture is not None and model == chosen.models[0]:
                draw_spectrum(modules, chosen.picture, title=model)
        else:
            shapes = {"lengths": chosen.lengths, "batches": chosen.batches}
            found = measure_speed(network_of(model), new_tokens=chosen.new_tokens, **shapes)
            rows |= {f"{model} {row['length']} x {row['batch']}": row for row in found}
    columns = HORIZONS if chosen.verb == "spectrum" else SPEED
    print(table(rows, columns, title=chosen.verb))
    write_report(chosen, rows)


def network_of(model: str) -> Any:
    """Load a model in inference mode, or build one from a shape in config/models."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        shape = load_shape(find_config("models", model))
    except ConfigError:
        return load(model, device=device, tokenizer=None)[0]
    torch.manual_seed(0)
    config = transformers_config(shape.settings, vocabulary=shape.vocabulary, dropout=0.0)
    return network_class(config)(config).eval().to(device)


def measure_speed(
    network: Any,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Record]:
    """Yield a row for each length and batch; None is unknown, or too long for the model."""
    longest = getattr(network.config, "max_position_embeddings", None) or float("inf")
    for length in sorted(lengths):
        for batch in sorted(batches):
            row: Record = {"parameters": network.num_parameters(), "length": length, "batch": batch}
            if length <= longest:
                draw = torch.Generator().manual_seed(0)
                ids = torch.randint(network.config.vocab_size, (batch, length), generator=draw)
                ids = ids.to(network.device)
                if new_tokens > 1 and length + new_tokens <= longest:
                    row["written_per_second"] = _writing_rate(network, ids, new_tokens, clock)
                read = functools.partial(_read, network, ids)
                row["memory_gib"] = _peak_gib(ids.device, read)
                seconds = row["latency_seconds"] = _median_seconds(read, clock)
                row["tokens_per_second"] = ids.numel() / seconds
            yield row


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


def _peak_gib(device: torch.device, action: Callable[[], None]) -> float | None:
    """Return the peak GPU memory of an action beyond what was allocated; None on a CPU."""
    if device.type != "cuda":
        action()
        return None
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    return (torch.cuda.max_memory_allocated(device) - held) / 2**30


class ModuleSpectrum(NamedTuple):
    """The modes of one module, now and when initialized; horizons in its own tokens."""

    name: str
    now: Spectrum
    start: Spectrum

    def summary(self) -> Record:
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
    """Return the spectra of a model, in module order; empty if it uses attention alone."""
    found = []
    for name, module in model.cpu().named_modules():
        if isinstance(module, TenCells):
            found.append(ModuleSpectrum(name, module.spectrum(), module.initial_spectrum()))
        elif isinstance(module, ResonatorBank):
            now, (decay, frequency) = module.spectrum(), grid(module.count, module.max_length)
            found.append(ModuleSpectrum(name, Spectrum(*now), Spectrum(-decay, frequency)))
    return found


def draw_spectrum(modules: Sequence[ModuleSpectrum], file: Path, *, title: str) -> None:
    """Write a PNG with each mode's frequency over its horizon, and histograms of horizons."""
    import numpy as np
    from matplotlib.figure import Figure

    now = torch.cat([module.now.horizon_tokens for module in modules]).detach().numpy()
    start = torch.cat([module.start.horizon_tokens for module in modules]).detach().numpy()
    frequencies = torch.cat([module.now.frequency for module in modules]).detach().numpy()
    owners = np.repeat(np.arange(len(modules)), [len(module.now.frequency) for module in modules])
    figure = Figure(figsize=(11, 4), layout="constrained")
    places, counts = figure.subplots(1, 2)
    points = places.scatter(now, frequencies, c=owners, s=6, cmap="viridis")
    figure.colorbar(points, ax=places, label="part of the model (first to last)")
    places.set(xscale="log", xlabel="horizon (tokens)", ylabel="frequency (radians a token)")
    bins = np.geomspace(1, max(now.max(), start.max()), BINS).tolist()
    counts.hist(now, bins=bins, label="now")
    counts.hist(start, bins=bins, histtype="step", label="start")
    counts.set(xscale="log", xlabel="horizon (tokens)", ylabel="modes")
    counts.legend()
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=120)


if __name__ == "__main__":
    main()
