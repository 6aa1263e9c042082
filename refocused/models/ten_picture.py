"""A picture of a model's spectrum: the horizon and the frequency of every mode of every block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from refocused.errors import ConfigError
from refocused.models.ten_cells import TenCells
from refocused.models.ten_spectrum import initial_spectrum


def spectrum_rows(model: nn.Module) -> dict[str, np.ndarray]:
    """Return all modes of a model, one row of each array a mode.

    Returns:
        `block` (counted over the cells of all scales, in the model's order), `horizon_tokens` (in
        tokens of the mode's scale), `frequency` (radians a token of the scale).

    Raises:
        ConfigError: The model has no eigenstates.
    """
    found = [module for module in model.modules() if isinstance(module, TenCells)]
    if not found:
        raise ConfigError("This model has no eigenstates: only the ten family has a spectrum.")
    spectra = [cells.spectrum() for cells in found]
    counts = [len(spectrum.frequency) for spectrum in spectra]
    return {
        "block": np.repeat(np.arange(len(found)), counts),
        "horizon_tokens": np.concatenate([s.horizon_tokens.detach().numpy() for s in spectra]),
        "frequency": np.concatenate([s.frequency.detach().numpy() for s in spectra]),
    }


def draw_spectrum(model: nn.Module, file: Path, *, title: str) -> None:
    """Write the spectrum of a model as a PNG: modes by place, and horizons beside their start.

    Args:
        model: Any module that contains the cells, its parameters whole and on the CPU.
        file: The PNG.
        title: Of the picture, such as run and step.

    Raises:
        ConfigError: The model has no eigenstates.
    """
    from matplotlib.figure import Figure

    rows = spectrum_rows(model)
    first = next(module for module in model.modules() if isinstance(module, TenCells))
    start = initial_spectrum(len(first.rate_shift), longest=first.longest)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    places, horizons = figure.subplots(1, 2)
    points = places.scatter(
        rows["horizon_tokens"], rows["frequency"], c=rows["block"], s=6, cmap="viridis"
    )
    figure.colorbar(points, ax=places, label="block (first to last)")
    places.set(xscale="log", xlabel="horizon (tokens)", ylabel="frequency (radians a token)")
    highest = max(float(rows["horizon_tokens"].max()), first.longest)
    bins = np.geomspace(1, highest, 30).tolist()
    horizons.hist(rows["horizon_tokens"], bins=bins, density=False, label="now")
    weights = np.full(len(start.frequency), len(rows["block"]) / len(start.frequency))
    horizons.hist(
        start.horizon_tokens.numpy(), bins=bins, weights=weights, histtype="step", label="start"
    )
    horizons.set(xscale="log", xlabel="horizon (tokens)", ylabel="modes")
    horizons.legend()
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
