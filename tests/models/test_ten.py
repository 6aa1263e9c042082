from typing import Any

import pytest
import torch
from small_families import build, tokens
from torch import Tensor


def test_a_group_applies_from_its_last_token() -> None:
    mixer = build("ten", scales=[4]).network.model.layers[0].mixer
    with torch.no_grad():
        inputs = torch.randn((1, 16, 64), generator=torch.Generator().manual_seed(2))
        plain = mixer(inputs)
        for changed in range(16):
            other = inputs.clone()
            other[:, changed] += 1
            moved = (mixer(other) - plain).abs().amax(dim=(0, 2)).nonzero().flatten().tolist()
            assert moved == list(range(changed // 4 * 4 + 3, 16))


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

    monkeypatch.setattr("refocused.models.ten.chunked_scan", noting)
    build("ten").bfloat16().logits(tokens())
    assert set(seen) == {(torch.float32, torch.float64, torch.float64)}
