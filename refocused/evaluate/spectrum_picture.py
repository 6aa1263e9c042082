"""The spectrum of a model without attention: horizon and frequency of all modes, as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from refocused.models.resonance.resonators import Resonators, grid
from refocused.models.ten.cells import TenCells
from refocused.models.ten.scan import Spectrum
from refocused.system.errors import ConfigError

BINS = 30  # of the histogram of horizons


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleSpectrum:
    """The modes of one module of a model: a block's, or those of one of its scales.

    Attributes:
        name: Of the module in the model.
        now: Its modes; horizons count tokens of its scale.
        start: Where they began.
    """

    name: str
    now: Spectrum
    start: Spectrum

    def summary(self) -> dict[str, float]:
        """Return the modes' number, their horizons in tokens and frequencies in radians a token."""
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
    """Return the spectra of a model, in its order.

    Args:
        model: Any module, its parameters whole and on the CPU.

    Raises:
        ConfigError: Nothing in it rings: it has attention.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, TenCells):
            found.append(ModuleSpectrum(name, module.spectrum(), module.initial_spectrum()))
        elif isinstance(module, Resonators):
            now, (decay, frequency) = module.spectrum(), grid(module.count, module.max_length)
            found.append(ModuleSpectrum(name, Spectrum(*now), Spectrum(-decay, frequency)))
    if not found:
        raise ConfigError(
            "This model has no spectrum: its positions meet by attention. The families resonance "
            "and ten have one."
        )
    return found


def draw_spectrum(modules: list[ModuleSpectrum], file: Path, *, title: str) -> None:
    """Write spectra as a PNG: every mode in its place, and horizons beside where they began.

    Args:
        modules: From `spectra`.
        file: The PNG.
        title: Of the picture, such as run and step.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    horizons = [_numbers(one.now.horizon_tokens) for one in modules]
    frequencies = [_numbers(one.now.frequency) for one in modules]
    numbers = np.repeat(np.arange(len(modules)), [len(each) for each in horizons])
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    places, counts = figure.subplots(1, 2)
    points = places.scatter(
        np.concatenate(horizons), np.concatenate(frequencies), c=numbers, s=6, cmap="viridis"
    )
    figure.colorbar(points, ax=places, label="part of the model (first to last)")
    places.set(xscale="log", xlabel="horizon (tokens)", ylabel="frequency (radians a token)")
    start = np.concatenate([_numbers(one.start.horizon_tokens) for one in modules])
    now = np.concatenate(horizons)
    bins = np.geomspace(1, max(now.max(), start.max()), BINS).tolist()
    counts.hist(now, bins=bins, label="now")
    counts.hist(start, bins=bins, histtype="step", label="start")
    counts.set(xscale="log", xlabel="horizon (tokens)", ylabel="modes")
    counts.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)


def _numbers(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found
