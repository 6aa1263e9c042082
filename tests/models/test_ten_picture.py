from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from refocused.errors import ConfigError
from refocused.models.ten import TenConfig, TenForCausalLM
from refocused.models.ten_picture import draw_spectrum, spectrum_rows


def small() -> TenForCausalLM:
    return TenForCausalLM(
        TenConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=3,
            num_eigenstates=5,
            max_position_embeddings=100,
            scales=[1, 2],
        )
    )


def test_every_mode_of_every_block_has_a_row() -> None:
    rows = spectrum_rows(small())
    assert np.bincount(rows["block"]).tolist() == [10] * 6
    assert 1 < rows["horizon_tokens"].min() < 2
    assert 70 < rows["horizon_tokens"].max() < 100


def test_a_mode_that_slowed_down_is_seen_where_it_is_now() -> None:
    model = small()
    before = spectrum_rows(model)
    with torch.no_grad():
        model.model.layers[1].mixer.cells[0].rate_shift[4] = -3.0
    after = spectrum_rows(model)
    (moved,) = np.nonzero(before["horizon_tokens"] != after["horizon_tokens"])
    assert moved.tolist() == [2 * 10 + 4]
    ratio = after["horizon_tokens"][24] / before["horizon_tokens"][24]
    assert ratio == pytest.approx(np.exp(3), rel=0.05)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "spectrum.png"
    draw_spectrum(small(), file, title="small, step 0")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_model_without_eigenstates_has_no_spectrum() -> None:
    with pytest.raises(ConfigError, match="no eigenstates"):
        spectrum_rows(nn.Linear(2, 2))
