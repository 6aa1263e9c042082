from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refocused.estimate.memory import SPECTRA
from refocused.models.resonance import convolution as module

SPECTRUM_BYTES = 2**22


def most_at_once(compute: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at once, inside operators too."""
    with torch.profiler.profile(profile_memory=True) as profile:
        compute()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(("rows", "held"), [(1, SPECTRA), (4, SPECTRA - 1)])
def test_a_convolution_holds_as_many_spectra_as_the_plan_says(
    rows: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where blocks of channels are turned and transformed at the same time."""
    length, width = 4096, 512
    at_once = module._spectra(SPECTRUM_BYTES, rows=rows, length=length)
    monkeypatch.setattr(module, "BYTES_ON_CPU", SPECTRUM_BYTES)
    monkeypatch.setattr(module, "_turned_at_once", lambda _: module._cut(width, at_once))
    inputs, kernel = torch.randn(rows, length, width), torch.randn(width, length)
    most = most_at_once(lambda: module.causal_convolution_backward(inputs, inputs, kernel))
    working = most - inputs.nbytes - kernel.nbytes  # these are as large as the results
    assert working / SPECTRUM_BYTES == pytest.approx(held, rel=0.05)
