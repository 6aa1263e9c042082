from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from refocused.models.causal_lm import CausalLM
from refocused.models.families import build_model
from refocused.models.ten.cells import TenCells
from refocused.models.ten.scan import sequential_scan
from refocused.system.errors import ConfigError

SHAPE: dict[str, Any] = {
    "model_type": "ten",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_eigenstates": 6,
    "max_position_embeddings": 64,
    "chunk_size": 8,
}
SCALES = [[1], [1, 2, 4, 8], [3]]
all_scales = pytest.mark.parametrize("scales", SCALES, ids=str)


def build(*, seed: int = 0, document_id: int | None = None, **changes: Any) -> CausalLM:
    torch.manual_seed(seed)
    model = build_model(
        SHAPE | changes,
        vocabulary=512,
        dropout=0.0,
        activation_checkpointing=False,
        chunk_tokens=50,
        document_id=document_id,
    )
    return model.eval()


def stir(model: CausalLM) -> CausalLM:
    """Move the spectrum off its start, so that nothing is right because it is zero."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_shift"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def tokens(rows: int = 2, length: int = 48, *, seed: int = 1) -> Tensor:
    return torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(seed))


@all_scales
@pytest.mark.parametrize("changed", [1, 20, 47])
def test_no_logit_depends_on_a_later_token(scales: list[int], changed: int) -> None:
    model, ids = stir(build(scales=scales, initializer_range=0.2)), tokens()
    other = ids.clone()
    other[:, changed] = (other[:, changed] + 1) % 512
    with torch.no_grad():
        before, after = model.logits(ids), model.logits(other)
    largest = (before - after).abs().amax(dim=(0, 2)) / before.abs().max()
    assert float(largest[:changed].max()) <= 1e-5
    assert float(largest[changed]) > 1e-4
    assert float(largest[changed:].min()) > (1e-7 if scales == [1] else -1)


def test_a_group_is_heard_from_its_last_token_on() -> None:
    mixer = build(scales=[4]).network.model.layers[0].mixer
    with torch.no_grad():
        inputs = torch.randn((1, 16, 32), generator=torch.Generator().manual_seed(2))
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


@all_scales
def test_loss_and_gradients_do_not_depend_on_the_chunk(scales: list[int]) -> None:
    ids, results = tokens(length=50), []
    for chunk in (1, 8, 64):
        model = stir(build(scales=scales, chunk_size=chunk)).double()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


@all_scales
def test_every_parameter_receives_a_gradient(scales: list[int]) -> None:
    model, ids = build(scales=scales), tokens(length=33)
    model(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("width", [32, 256])
def test_the_first_loss_is_that_of_a_uniform_guess(width: int) -> None:
    ids = tokens(8, 65)
    loss = build(hidden_size=width, scales=[1, 2])(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(math.log(512) + width * 0.0002, abs=0.1)


@all_scales
@pytest.mark.parametrize("learned_positions", [True, False])
def test_generation_with_the_state_is_generation_without(
    scales: list[int], learned_positions: bool
) -> None:
    model = build(scales=scales, learned_positions=learned_positions, initializer_range=0.2)
    network = stir(model).network
    arguments = {"max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
    carried = network.generate(tokens(2, 11), use_cache=True, **arguments)
    again = network.generate(tokens(2, 11), use_cache=False, **arguments)
    assert carried.shape == (2, 29)
    assert torch.equal(carried, again)


@all_scales
def test_the_state_gives_the_logits_of_the_whole_prefix_and_does_not_grow(
    scales: list[int],
) -> None:
    network = stir(build(scales=scales, initializer_range=0.2)).network
    ids = tokens(2, 64)
    sizes = set()
    with torch.no_grad():
        whole = network(ids).logits
        state, found = None, []
        for piece in ids.split([5, 1, 1, 3, 24, *[1] * 10, 20], dim=1):
            outputs = network(piece, past_key_values=state, use_cache=True)
            state = outputs.past_key_values
            found.append(outputs.logits)
            sizes.add(
                sum(s.eigenstates.numel() + s.latest.numel() for b in state.blocks for s in b)
            )
            assert all(
                s.pending.shape[1] < scale
                for block in state.blocks
                for s, scale in zip(block, scales, strict=True)
            )
    assert len(sizes) == 1
    assert state.get_seq_length() == 64
    within = 1e-5 * float(whole.abs().max())
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=within)


def test_beams_take_their_states_along() -> None:
    network = stir(build(scales=[1, 2], initializer_range=0.2)).network
    arguments = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    carried = network.generate(tokens(2, 11), use_cache=True, **arguments)
    assert torch.equal(carried, network.generate(tokens(2, 11), use_cache=False, **arguments))


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_predicts_the_same_when_transformers_reads_it(
    tied: bool, tmp_path: Path
) -> None:
    model, ids = stir(build(scales=[1, 4], tie_word_embeddings=tied)), tokens()
    model.network.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.scales == [1, 4]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model.logits(ids))


def test_bf16_parameters_follow_float32_within_two_percent() -> None:
    """The recurrence is in float32 whatever the parameters are: only products are rounded."""
    ids = tokens(2, 1025)
    changes = {"max_position_embeddings": 1024, "scales": [1, 2], "chunk_size": 64}
    exact = stir(build(initializer_range=0.1, **changes))
    rounded = stir(build(initializer_range=0.1, **changes)).bfloat16()
    with torch.no_grad():
        wanted, found = exact.logits(ids[:, :-1]), rounded.logits(ids[:, :-1]).float()
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        losses = [float(m(ids[:, :-1], ids[:, 1:])) for m in (exact, rounded)]
    assert float(error.mean()) < 0.02
    assert float(error[:, -256:].mean()) < 1.5 * float(error[:, :256].mean())  # it does not pile up
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_the_recurrence_runs_in_float32_on_bf16_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noting(beta: Tensor, *modes: Tensor, **others: Any) -> Tensor:
        seen.append((beta.dtype, *(mode.dtype for mode in modes)))
        return beta[0]

    monkeypatch.setattr("refocused.models.ten.cells.chunked_scan", noting)
    build().bfloat16().logits(tokens())
    assert set(seen) == {(torch.float32, torch.float64, torch.float64)}


def test_activation_checkpointing_changes_nothing() -> None:
    ids, results = tokens(), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = build_model(
            SHAPE | {"scales": [1, 2]},
            vocabulary=512,
            dropout=0.1,
            activation_checkpointing=checkpointing,
            chunk_tokens=50,
        )
        torch.manual_seed(3)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-8)


def test_what_a_recurrence_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="mask_documents"):
        build(document_id=7)
    network, ids = build().network, tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="without padding"):
        network(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        network(tokens(1, 65))
    assert build(learned_positions=False).network(tokens(1, 65)).logits.shape == (1, 65, 512)
