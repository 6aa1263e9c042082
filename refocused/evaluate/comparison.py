"""Cost of running a model: latency, tokens a second and memory over lengths and batches."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refocused.config.model_shape import ModelShape
from refocused.evaluate.load_model import be_quiet
from refocused.evaluate.model_weights import network_class
from refocused.evaluate.multiple_choice import Measure
from refocused.evaluate.safetensors_files import TORCH_DTYPES, Dtype
from refocused.models.families import transformers_config

REPEATS = 3
CLEAR_PEAK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedRow:
    """One model at one length and batch.

    Attributes:
        model: Its name.
        parameters: Of the whole model.
        length: Tokens of each prompt.
        batch: Prompts at once.
        latency_seconds: Median time to read all prompts; None: they are too long for the model.
        tokens_per_second: Prompt tokens read in a second.
        written_per_second: Tokens written in a second after the prompts, with the model's cache;
            None: none were, or there is no room for them.
        memory_gib: Most memory of a pass beside the weights; None: unknown.
    """

    model: str
    parameters: int
    length: int
    batch: int
    latency_seconds: float | None = None
    tokens_per_second: float | None = None
    written_per_second: float | None = None
    memory_gib: float | None = None


def measure_speed(
    name: str,
    network: Any,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[SpeedRow]:
    """Yield a row for each length and batch, from the smallest on.

    Args:
        name: Of the model.
        network: transformers' model, in evaluation mode, where it is.
        lengths: Tokens of a prompt.
        batches: Prompts at once.
        new_tokens: Tokens to write after each prompt; below 2: none.
        clock: Seconds.
    """
    longest = getattr(network.config, "max_position_embeddings", None)
    for length in sorted(lengths):
        for batch in sorted(batches):
            row = SpeedRow(name, network.num_parameters(), length, batch)
            if longest is not None and length > longest:
                yield row
                continue
            ids = _ids(network, length, batch)
            written = None
            if new_tokens > 1 and (longest is None or length + new_tokens <= longest):
                written = _writing_rate(network, ids, new_tokens, clock)
            memory_bytes, seconds = _reading(network, ids, clock)
            yield dataclasses.replace(
                row,
                latency_seconds=seconds,
                tokens_per_second=ids.numel() / seconds,
                written_per_second=written,
                memory_gib=None if memory_bytes is None else memory_bytes / 2**30,
            )


def _ids(network: Any, length: int, batch: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(network.config.vocab_size, (batch, length), generator=draw)
    return ids.to(network.device)


def _reading(
    network: Any, ids: torch.Tensor, clock: Callable[[], float]
) -> tuple[int | None, float]:
    """Return the peak memory of a pass, and the median time of several after the first."""

    def read() -> None:
        with torch.inference_mode():
            network(input_ids=ids, use_cache=False)
        _finish(ids.device)

    memory = _peak_bytes(ids.device, read)
    return memory, statistics.median(_timed(read, clock) for _ in range(REPEATS))


def _writing_rate(
    network: Any, ids: torch.Tensor, new_tokens: int, clock: Callable[[], float]
) -> float | None:
    """Return the tokens written in a second, reading the prompts left out; None: too short."""

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
    reading, whole = (
        statistics.median(_timed(functools.partial(write, count), clock) for _ in range(REPEATS))
        for count in (1, new_tokens)
    )
    # The first token comes with the reading. On a busy machine the rest may drown in noise.
    seconds = whole - reading
    return len(ids) * (new_tokens - 1) / seconds if seconds > 0 else None


def _timed(action: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    action()
    return clock() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(device: torch.device, action: Callable[[], None]) -> int | None:
    """Return the most memory that an action takes beside what was held; None: unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return torch.cuda.max_memory_allocated(device) - held
    try:
        CLEAR_PEAK.write_text("5")  # forgets the peak of the resident set (proc(5))
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
    be_quiet()
    config = transformers_config(shape.settings, vocabulary=shape.vocabulary, dropout=0.0)
    return network_class(config)(config).to(TORCH_DTYPES[dtype]).eval()


def draw_scores(
    rows: Mapping[str, Mapping[str, Measure]], file: Path, *, steps: Mapping[str, int]
) -> None:
    """Write each measure over the models as a PNG, with standard errors.

    Args:
        rows: For each model the measures by what they are called.
        file: Where the picture goes.
        steps: Step of each model; where one has none, models stand side by side by name.

    Raises:
        OSError: The file cannot be written.
    """
    names = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    figure, panels = _panels(len(names))
    over_steps = len(set(steps.values())) == len(rows)
    for axes, name in zip(panels, names, strict=True):
        known = {model: found[name] for model, found in rows.items() if name in found}
        places = [steps[model] for model in known] if over_steps else list(range(len(known)))
        values = [measure.value for measure in known.values()]
        errors = [measure.standard_error or 0.0 for measure in known.values()]
        axes.errorbar(
            places, values, yerr=errors, marker="o", capsize=3, linestyle="-" if over_steps else ""
        )
        axes.set_title(name)
        axes.set_xlabel("step" if over_steps else "model")
        if not over_steps:
            axes.set_xticks(places, list(known), rotation=30, ha="right")
    _save(figure, file)


def draw_speed(rows: Sequence[SpeedRow], file: Path) -> None:
    """Write latency, tokens a second and memory over the length as a PNG.

    Raises:
        OSError: The file cannot be written.
    """
    columns = {
        "latency_seconds": "latency, s",
        "tokens_per_second": "tokens read a second",
        "written_per_second": "tokens written a second",
        "memory_gib": "memory of a pass, GiB",
    }
    figure, panels = _panels(len(columns))
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for model, batch in dict.fromkeys((row.model, row.batch) for row in rows):
            own = [row for row in rows if (row.model, row.batch) == (model, batch)]
            known = [row for row in own if getattr(row, column)]  # a logarithm has no zero
            axes.plot(
                [row.length for row in known],
                [getattr(row, column) for row in known],
                marker="o",
                label=f"{model}, batch {batch}",
            )
        if any(getattr(row, column) for row in rows):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:  # of no value matplotlib makes no logarithmic axis
            axes.text(0.5, 0.5, "unknown", ha="center", transform=axes.transAxes)
        axes.set_xlabel("tokens of a prompt")
        axes.set_title(label)
    panels[0].legend(fontsize="small")
    _save(figure, file)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with so many axes, two a row."""
    from matplotlib.figure import Figure

    rows = (count + 1) // 2
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.grid(alpha=0.3)
    return figure, panels[:count]


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
