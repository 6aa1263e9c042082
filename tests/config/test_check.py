from __future__ import annotations

import dataclasses
from typing import Any

import pydantic
import pytest

from refocused.config.consistency import check_run, check_shape
from refocused.config.load_run import load_run
from refocused.config.model_shape import Resonators
from refocused.config.run_config import RunConfig

LOADED = load_run("demo")


def changed(**sections: dict[str, Any]) -> RunConfig:
    values = LOADED.config.model_dump()
    for section, settings in sections.items():
        values[section] |= settings
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"schedule": {"warmup_steps": 500}}, "schedule.warmup_steps"),
        (
            {"schedule": {"kind": "warm_restarts", "cycle_steps": 30, "warmup_steps": 30}},
            "schedule.cycle_steps",
        ),
        ({"batch": {"micro": 4, "windows": 18}}, "batch.windows"),
        ({"optimizer": {"kind": "muon"}, "zero": {"offload_optimizer": "cpu"}}, "optimizer.kind"),
        ({"data": {"tokenizer": "unknown"}}, "evaluation.sample_prompt"),
        ({"data": {"tokenizer": "gpt2"}}, "evaluation.sample_prompt"),
        (
            {
                "data": {"tokenizer": "gpt2"},
                "evaluation": {"sample_prompt": None, "tasks": ["a.jsonl"]},
            },
            "evaluation.tasks",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(sections: dict[str, Any], key: str) -> None:
    assert [misfit.key for misfit in check_run(changed(**sections))] == [key]


def test_settings_at_their_limit_fit() -> None:
    gpt2 = {"tokenizer": "gpt2", "bpe_folder": "bpe"}
    assert check_run(changed(data=gpt2, evaluation={"tasks": ["hellaswag=a.jsonl"]})) == []
    assert check_run(changed(schedule={"warmup_steps": LOADED.config.run.steps - 1})) == []
    assert check_shape(LOADED.config, LOADED.shape) == []


def test_a_sequence_longer_than_the_shape_is_named() -> None:
    config = changed(model={"sequence_length": 257})
    [misfit] = check_shape(config, LOADED.shape)
    assert misfit.key == "model.sequence_length"
    assert "demo_gpt2 goes up to 256" in misfit.message


def test_a_document_id_that_the_model_cannot_know_is_named() -> None:
    last = LOADED.shape.vocabulary - 1
    assert check_shape(changed(data={"document_id": last}), LOADED.shape) == []
    [misfit] = check_shape(changed(data={"document_id": last + 1}), LOADED.shape)
    assert misfit.key == "data.document_id"
    assert f"knows ids up to {last}" in misfit.message


def test_what_cannot_be_multiplied_in_8_bits_is_named() -> None:
    fp8 = {"fp8": "tensorwise"}
    assert check_shape(changed(precision=fp8), LOADED.shape) == []
    narrow = dataclasses.replace(LOADED.shape, width=100, ffn_width=200)
    odd = changed(precision=fp8, model={"sequence_length": 100})
    found = check_shape(odd, narrow)
    assert {misfit.key for misfit in found} == {"precision.fp8"}
    told = " ".join(misfit.message for misfit in found)
    for size in ("is 100 wide", "feed-forward part is 200 wide", "sequence_length is 100"):
        assert size in told
    mixed = dataclasses.replace(LOADED.shape, family="resonance", mixer=Resonators(4))
    [misfit] = check_shape(changed(precision=fp8), mixed)
    assert "demo_gpt2 is resonance" in misfit.message


def test_8_bits_go_with_bf16_alone() -> None:
    with pytest.raises(pydantic.ValidationError, match="fp8: rowwise needs dtype: bf16"):
        changed(precision={"fp8": "rowwise", "dtype": "fp32"})


def test_documents_cannot_be_masked_where_there_is_no_attention() -> None:
    mixed = dataclasses.replace(LOADED.shape, family="resonance", mixer=Resonators(4))
    config = changed(data={"mask_documents": True, "document_id": 0})
    assert check_shape(config, LOADED.shape) == []
    [misfit] = check_shape(config, mixed)
    assert misfit.key == "data.mask_documents"
    assert "(resonance) has no attention" in misfit.message
