from __future__ import annotations

from typing import Any

import pytest
import torch
from small_families import build, tokens
from torch import Tensor

from refocused.models.ten.cells import TenCells
from refocused.models.ten.scan import sequential_scan


def test_a_group_is_heard_from_its_last_token_on() -> None:
    mixer = build("ten", scales=[4]).network.model.layers[0].mixer
    with torch.no_grad():
        inputs = torch.randn((1, 16, 64), generator=torch.Generator().manual_seed(2))
        plain = mixer(inputs)
        for changed in range(16):
            other = inputs.clone()
            other[:, changed] += 1
            moved = (mixer(other) - plain).abs().amax(dim=(0, 2)).nonzero().flatten().tolist()
            assert moved == list(range(changed // 4 * 4 + 3, 16))


def test_cells_are_the_mean_of_their_recurrences_read_out_through_r() -> None:
    draw = torch.Generator().manual_seed(4)
    cells = TenCells(8, eigenstates=3, longest=64, chunk=4).double()
    with torch.no_grad():
        for parameter in cells.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        inputs = torch.randn((2, 20, 8), generator=draw, dtype=torch.float64)
        found, _ = cells(inputs)
        spectrum, total = cells.spectrum(), torch.zeros_like(found)
        for cell in range(2):
            modes = slice(3 * cell, 3 * cell + 3)
            weight = cells.in_weight[:, modes] * spectrum.gain[modes, None]
            beta = torch.einsum("pkd,btd->pkbt", weight, inputs)
            real, _ = sequential_scan(beta, spectrum.log_decay[modes], spectrum.frequency[modes])
            mixing = cells.mixing[cell]
            coupling = torch.eye(3, dtype=torch.float64) + 0.01 * mixing / mixing.norm()
            total += real.permute(1, 2, 0) @ coupling @ cells.out_weight[cell]
    torch.testing.assert_close(found, total / 2, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scales", [[1, 2, 4, 8], [3]], ids=str)
def test_loss_and_gradients_do_not_depend_on_the_chunk(scales: list[int]) -> None:
    ids, results = tokens(2, 50), []
    for chunk in (1, 8, 64):
        model = build("ten", scales=scales, chunk_size=chunk).double()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


def test_the_recurrence_runs_in_float32_on_bf16_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noting(beta: Tensor, *modes: Tensor, **others: Any) -> Tensor:
        seen.append((beta.dtype, *(mode.dtype for mode in modes)))
        return beta[0]

    monkeypatch.setattr("refocused.models.ten.cells.chunked_scan", noting)
    build("ten").bfloat16().logits(tokens())
    assert set(seen) == {(torch.float32, torch.float64, torch.float64)}
