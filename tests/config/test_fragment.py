from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refocused.config import fragment
from refocused.config.files import REPOSITORY_CONFIG
from refocused.config.optimization import ZeroConfig
from refocused.system.errors import ConfigError

OFFLOADED = ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu")


@pytest.mark.parametrize(
    ("content", "owner"),
    [
        ({"train_batch_size": 8}, "batch.windows"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "batch.micro"),
        ({"gradient_accumulation_steps": 1}, "batch.accumulation"),
        ({"gradient_clipping": 1.0}, "optimizer.clip"),
        ({"optimizer": {"type": "Adam"}}, "optimizer.lr"),
        ({"scheduler": {}}, "schedule.kind"),
        ({"fp16": {"enabled": True}}, "precision.dtype"),
        ({"bf16": {}}, "precision.dtype"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "precision.dtype"),
        ({"activation_checkpointing": {}}, "model.activation_checkpointing"),
        ({"zero_optimization": {"stage": 3}}, "zero.stage"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero.offload_optimizer"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero.offload_optimizer"),
        ({"zero_optimization": {"offload_param": {"nvme_path": "/x"}}}, "zero.nvme_path"),
    ],
)
def test_what_the_run_owns_is_refused_with_its_setting(content: dict[str, Any], owner: str) -> None:
    [problem] = fragment.fragment_problems(content)
    assert f"belongs to the run file: set {owner}" in problem


def test_what_the_trainer_fixes_is_refused() -> None:
    assert fragment.fragment_problems({"steps_per_print": 10}) == [
        "steps_per_print is set by the trainer itself. Leave it out."
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"comms_loger": {}}, "comms_loger is not taken here. Did you mean comms_logger?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com is not taken here. Did you mean overlap_comm?",
        ),
        (
            {"comms_logger": {"zzz": 1}},
            "comms_logger.zzz is not taken here. "
            "There are enabled, prof_all, prof_ops, verbose, debug.",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            'zero_optimization.reduce_bucket_size = "auto": a number is wanted',
        ),
        ({"aio": 7}, "aio = 7: a group of settings is wanted"),
        (
            {"communication_data_type": "fp8"},
            'communication_data_type = "fp8": one of fp32, fp16, bf16 is wanted',
        ),
    ],
)
def test_what_is_not_known_or_of_a_wrong_type_is_refused(
    content: dict[str, Any], message: str
) -> None:
    assert fragment.fragment_problems(content) == [message]


def test_everything_wrong_comes_at_once() -> None:
    content = {"bf16": {}, "zero_optimization": {"stage": 1, "nonsense": 2}}
    with pytest.raises(ConfigError) as failure:
        fragment.checked_fragment(content, zero=ZeroConfig())
    assert len(str(failure.value).splitlines()) == 3


def test_buffers_of_an_offload_need_the_offload() -> None:
    content = {"zero_optimization": {"offload_param": {"buffer_count": 5}}}
    [problem] = fragment.idle_offloads(content, zero=ZeroConfig())
    assert "zero.offload_parameters: cpu or nvme" in problem
    assert fragment.idle_offloads(content, zero=OFFLOADED) == []


def test_numbers_arrive_in_deepspeeds_types() -> None:
    content = {"zero_optimization": {"reduce_bucket_size": 5e8}, "aio": None}
    checked = fragment.checked_fragment(content, zero=ZeroConfig())
    assert checked == {"zero_optimization": {"reduce_bucket_size": 500_000_000}}
    assert type(checked["zero_optimization"]["reduce_bucket_size"]) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "an object of DeepSpeed settings is wanted"),
        ('{"aio": {}, "aio": {}}', "aio is set twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as failure:
        fragment.read_fragment(file)
    assert str(file) in str(failure.value)


@pytest.mark.parametrize("file", sorted((REPOSITORY_CONFIG / "deepspeed").iterdir()), ids=str)
def test_every_shipped_fragment_may_be_used(file: Path) -> None:
    assert fragment.fragment_problems(fragment.read_fragment(file)) == []
