from __future__ import annotations

from typing import Any

import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import find_config
from refocused.config.model_shape import load_shape
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import mfu_fraction
from refocused.estimate.step_time import StepTime, expected_step, step_at
from refocused.system.errors import ConfigError
from refocused.system.hardware import named_gpu

ONCE = {"zero_optimization": {"stage3_param_persistence_threshold": 200_000_000}}
H100 = named_gpu("H100 SXM")


def expected(
    preset: str = "gpt2_1b",
    *,
    zero: ZeroConfig | None = None,
    gpu: str = "H100 SXM",
    fragment: dict[str, Any] | None = None,
    micro: int = 4,
    accumulation: int = 16,
    ranks: int = 8,
    fp8: Any = "none",
    dtype: Any = "bf16",
    **of_model: Any,
) -> StepTime:
    length = of_model.pop("sequence_length", 2048)
    return expected_step(
        load_shape(find_config("models", preset)),
        model=ModelConfig(preset=preset, sequence_length=length, **of_model),
        precision=PrecisionConfig(dtype=dtype, fp8=fp8),
        plan=BatchPlan(micro, accumulation, ranks, length),
        zero=zero or ZeroConfig(stage=3),
        fragment=fragment or {},
        gpu=named_gpu(gpu),
    )


def test_the_share_of_the_peak_follows_from_the_parts() -> None:
    step = expected()
    assert step.seconds == sum(step.parts.values())
    tokens = 4 * 16 * 8 * 2048
    # 6 N + 12 L D T, with the preset's 50,000 ids
    flops = 6 * (24 * 12 * 1536**2 + 50_000 * 1536) + 12 * 24 * 1536 * 2048
    share = mfu_fraction(
        tokens / step.seconds, flops_per_token=flops, gpus=8, peak_flops=H100.bf16_flops
    )
    assert step.mfu_fraction == pytest.approx(share)


def test_each_setting_changes_the_parts_that_it_touches() -> None:
    plain = expected()

    def changed(step: StepTime) -> set[str]:
        later = {name for name in plain.parts if step.parts[name] > 1.0001 * plain.parts[name]}
        return later - {"idle"}  # a share of the others

    recomputed = expected(activation_checkpointing=True)
    assert changed(recomputed) == {"products", "mixing", "elementwise"}
    on_host = expected(zero=ZeroConfig(stage=3, offload_optimizer="cpu"))
    assert changed(on_host) == {"optimizer"}
    everything = ZeroConfig(stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert expected(zero=everything, activation_checkpointing=True).optimizer > on_host.optimizer
    assert changed(expected(compile="off")) == set()  # GPT-2 gains little: see `pass_work`
    assert expected("neox_1_2b", compile="off").elementwise > (
        1.2 * expected("neox_1_2b").elementwise
    )
    assert changed(expected(dtype="fp32")) >= {"products", "elementwise", "communication"}
    assert expected(fp8="rowwise").products < plain.products
    assert changed(expected(zero=ZeroConfig(stage=2))) >= {"communication"}
    assert expected(fragment=ONCE).communication < plain.communication
    assert changed(expected(ranks=16)) == {"communication"}
    slower = expected(gpu="H100 PCIe")
    assert changed(slower) == {*plain.parts} - {"idle"}
    assert expected(ranks=1).communication == 0


def test_families_without_attention_have_a_share_of_their_own() -> None:
    presets = ("gpt2_124m", "resonance_small", "ten_small_32k")
    steps = [expected(one, sequence_length=1024, micro=16) for one in presets]
    attention, resonance, ten = (one.mfu_fraction for one in steps)
    assert resonance < ten < attention
    assert len({round(one, 2) for one in (attention, resonance, ten)}) == 3


def test_a_pass_shorter_than_the_hosts_python_waits_for_it() -> None:
    short = expected(micro=1, sequence_length=256)
    assert short.idle > 0.8 * short.seconds
    assert expected().idle < 0.05 * expected().seconds


def test_a_named_share_of_the_peak_is_taken_and_the_impossible_refused() -> None:
    plan = BatchPlan(4, 16, 8, 2048)
    step = step_at(0.5, plan=plan, flops_per_token=5e9, gpu=H100)
    assert plan.tokens / step.seconds == pytest.approx(0.5 * 8 * 989.4e12 / 5e9)
    assert step.forward_tokens_per_second == pytest.approx(3 * plan.tokens / step.seconds)
    for share in (0.0, 0.61, 1.5):
        with pytest.raises(ConfigError, match="up to 60%"):
            step_at(share, plan=plan, flops_per_token=5e9, gpu=H100)
