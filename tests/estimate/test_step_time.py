"""What a step is expected to take, and what each setting changes of it."""

import dataclasses
from typing import Any

import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.config.optimization import ZeroConfig
from refocused.estimate.flops import count_of_run, mfu_fraction
from refocused.estimate.memory import activation_memory
from refocused.estimate.step_time import (
    StepTime,
    Traffic,
    exchanged_bytes,
    expected_step,
    pass_work,
    step_at,
    step_traffic,
)
from refocused.system.errors import ConfigError
from refocused.system.hardware import named_gpu

ONCE = {"zero_optimization": {"stage3_param_persistence_threshold": 200_000_000}}
H100 = named_gpu("H100 SXM")


def expected(
    *settings: str,
    preset: str = "gpt2_1b",
    length: int = 2048,
    zero: ZeroConfig | None = None,
    gpu: str = "H100 SXM",
    fragment: dict[str, Any] | None = None,
    micro_batch_size: int = 4,
    ranks: int = 8,
) -> StepTime:
    model = [f"model.preset={preset}", f"model.sequence_length={length}", "precision.dtype=bf16"]
    loaded = load_run("gpt2_124m", [*model, *settings])
    return expected_step(
        dataclasses.replace(loaded, fragment=fragment or {}),
        plan=BatchPlan(micro_batch_size, 16, ranks, length),
        zero=zero or ZeroConfig(stage=3),
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

    recomputed = expected("model.activation_checkpointing=true")
    assert changed(recomputed) == {"products", "mixing", "elementwise"}
    on_host = expected(zero=ZeroConfig(stage=3, offload_optimizer="cpu"))
    assert changed(on_host) == {"optimizer"}
    everything = ZeroConfig(stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert (
        expected("model.activation_checkpointing=true", zero=everything).optimizer
        > on_host.optimizer
    )
    assert changed(expected("model.compile=off")) == set()  # GPT-2 gains little: see `pass_work`
    eager = expected("model.compile=off", preset="neox_1_2b")
    assert eager.elementwise > 1.2 * expected(preset="neox_1_2b").elementwise
    assert changed(expected("precision.dtype=fp32")) >= {"products", "elementwise", "communication"}
    assert expected("precision.fp8=rowwise").products < plain.products
    assert changed(expected(zero=ZeroConfig(stage=2))) >= {"communication"}
    assert expected(fragment=ONCE).communication < plain.communication
    assert changed(expected(ranks=16)) == {"communication"}
    slower = expected(gpu="H100 PCIe")
    assert changed(slower) == {*plain.parts} - {"idle"}
    assert expected(ranks=1).communication == 0


def test_rings_leave_a_machine_once_and_hpz_gathers_between_machines_once_a_step() -> None:
    loaded, whole = load_run("gpt2_124m", []), 2 * count_of_run(load_run("gpt2_124m", [])).allocated

    def traffic(ranks: int, zero: ZeroConfig) -> Traffic:
        plan = BatchPlan(4, 4, ranks, 2048)
        return step_traffic(loaded, zero=zero, size=2, plan=plan, gpu=H100)

    alone = traffic(8, ZeroConfig(stage=1))  # an all-reduce and a gather
    assert (alone.inside_bytes, alone.between_bytes) == (3 * whole * 7 / 8, 0)
    assert alone.seconds == alone.inside_seconds
    two = traffic(16, ZeroConfig(stage=3))  # eight cards of a machine share what leaves it
    assert (two.gathers, two.between_bytes) == (4, 8 * whole * 15 / 16 / 8)
    assert two.inside_bytes == 7 * two.between_bytes
    node = traffic(16, ZeroConfig(stage=3, partition="node"))
    assert (node.gathers, node.between_bytes) == (1, 5 * whole * 15 / 16 / 8)
    assert node.inside_bytes == 7 * node.between_bytes + 7 * whole * 7 / 8
    assert node.seconds == node.between_seconds + node.copies_seconds


def test_ranks_that_share_sequences_divide_the_tokens_and_exchange_them_in_each_block() -> None:
    whole, shared = (
        load_run("gpt2_124m", ["precision.dtype=bf16", f"model.sequence_parallel={ranks}"])
        for ranks in (1, 4)
    )
    plan = BatchPlan(4, 4, 8, 2048, sequence_parallel=4)
    assert (plan.global_batch_size, plan.tokens) == (4 * 4 * 2, 4 * 4 * 2 * 2048)
    works = [
        pass_work(one.shape, model=one.config.model, micro_batch_size=4, size=2)
        for one in (whole, shared)
    ]
    (forward, backward), (own_forward, own_backward) = works
    assert own_forward.attention == forward.attention / 4
    assert own_backward.products == backward.products / 4
    width, layers, tokens = 768, 12, 4 * 4 * 2048 / 4
    assert exchanged_bytes(shared, plan=plan, size=2) == pytest.approx(
        2 * layers * tokens * 4 * width * 2 * 3 / 4
    )
    memory = [activation_memory(run, micro_batch_size=4).blocks for run in (whole, shared)]
    assert memory[1] == memory[0] // 4


def test_a_pass_shorter_than_the_hosts_python_waits_for_it() -> None:
    short = expected(micro_batch_size=1, length=256)
    assert short.idle > 0.8 * short.seconds
    assert expected().idle < 0.05 * expected().seconds


def test_a_named_share_of_the_peak_is_taken_and_the_impossible_refused() -> None:
    plan = BatchPlan(4, 16, 8, 2048)
    step = step_at(0.5, plan=plan, flops_per_token=5e9, gpu=H100)
    assert plan.tokens / step.seconds == pytest.approx(0.5 * 8 * 989.4e12 / 5e9)
    assert step.forward_tokens_per_second == pytest.approx(3 * plan.tokens / step.seconds)
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="give a share of the peak"):
            step_at(share, plan=plan, flops_per_token=5e9, gpu=H100)
