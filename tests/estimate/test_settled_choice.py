from __future__ import annotations

from typing import Any

import pytest

from refocused.config.load_run import find_config
from refocused.config.model_shape import ModelShape, load_shape
from refocused.config.optimization import BatchConfig, ZeroSettings
from refocused.config.run_config import ModelConfig
from refocused.estimate.memory_plan import BUSY_TOKENS, Choice, choose, needless_offload
from refocused.system.errors import ConfigError

AUTO = ZeroSettings(stage="auto", offload_optimizer="auto", offload_parameters="auto")
MODEL = ModelConfig(preset="gpt2_1b", sequence_length=2048)
EIGHTY_GB, GB = 85e9, 1e9


def shape(name: str = "gpt2_1b") -> ModelShape:
    return load_shape(find_config("models", name))


def chosen(
    *,
    memory_gb: float | None,
    micro: Any = "auto",
    windows: int = 512,
    zero: ZeroSettings = AUTO,
    ranks: int = 8,
    of: ModelShape | None = None,
    factor: float = 1.0,
    most_micro: int | None = None,
) -> Choice:
    return choose(
        of or shape(),
        model=MODEL,
        batch=BatchConfig(micro=micro, windows=windows),
        zero=zero,
        dtype="bf16",
        ranks=ranks,
        memory_bytes=None if memory_gb is None else memory_gb * GB,
        activation_factor=factor,
        most_micro=most_micro,
    )


def test_much_memory_takes_the_stage_that_exchanges_least() -> None:
    choice = chosen(memory_gb=140)
    assert choice.zero.stage == 1
    assert choice.zero.offload_optimizer == choice.zero.offload_parameters == "none"
    assert choice.micro * 2048 >= BUSY_TOKENS


def test_the_micro_batch_is_the_largest_divisor_that_fits() -> None:
    choice = chosen(memory_gb=85)
    assert 64 % choice.micro == 0
    assert choice.memory.fits(85 * GB)
    with pytest.raises(ConfigError, match="Nothing fits"):
        chosen(memory_gb=3)
    larger = choose(
        shape(),
        model=MODEL,
        batch=BatchConfig(micro=2 * choice.micro, windows=512),
        zero=choice.zero,
        dtype="bf16",
        ranks=8,
        memory_bytes=85 * GB,
    )
    assert not larger.memory.fits(85 * GB)


def test_no_larger_micro_batch_is_chosen_than_the_trial_allows() -> None:
    assert chosen(memory_gb=85).micro > 1
    assert chosen(memory_gb=85, most_micro=1).micro == 1


def test_less_memory_spreads_more_before_it_offloads() -> None:
    for size, stage, offload in ((40, 1, "none"), (10, 2, "none"), (8, 2, "cpu")):
        zero = chosen(memory_gb=size, micro=1).zero
        assert (zero.stage, zero.offload_optimizer) == (stage, offload)


def test_an_offload_is_taken_only_when_nothing_else_fits() -> None:
    alone = chosen(memory_gb=18, micro=1, windows=64, ranks=1)
    assert alone.zero.offload_optimizer == "cpu"
    never = AUTO.model_copy(update={"offload_optimizer": "none", "offload_parameters": "none"})
    with pytest.raises(ConfigError, match=r"Nothing fits: .*activation_checkpointing=true"):
        chosen(memory_gb=18, micro=1, windows=64, ranks=1, zero=never)


def test_what_is_given_stays() -> None:
    choice = chosen(memory_gb=85, micro=2, zero=ZeroSettings(stage=2))
    assert (choice.micro, choice.zero.stage) == (2, 2)
    too_much = chosen(memory_gb=5, micro=64, zero=ZeroSettings(stage=0))
    assert (too_much.micro, too_much.zero.stage) == (64, 0)
    assert not too_much.memory.fits(5 * GB)


def test_a_pass_that_was_measured_larger_leaves_room_for_fewer_windows() -> None:
    assert chosen(memory_gb=60, factor=2.0).micro < chosen(memory_gb=60).micro


def test_without_a_gpu_the_micro_batch_is_modest() -> None:
    choice = chosen(memory_gb=None, ranks=2)
    assert (choice.micro, choice.zero.stage) == (2, 1)


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch.windows=510 is not a multiple of 8 ranks"):
        chosen(memory_gb=85, windows=510)


@pytest.mark.parametrize("name", ["gpt2_1b", "resonance_large", "ten_large_32k"])
def test_the_micro_batch_of_every_family_grows_with_the_memory(name: str) -> None:
    small, large = (chosen(memory_gb=gb, of=shape(name)) for gb in (30, 140))
    assert small.micro < large.micro
    assert large.memory.fits(140 * GB) and not large.memory.fits(30 * GB)


@pytest.mark.parametrize(("memory_gb", "needless"), [(80, True), (10, False), (None, False)])
def test_an_offload_that_is_not_needed_is_seen(memory_gb: float | None, needless: bool) -> None:
    both = ZeroSettings(offload_optimizer="cpu", offload_parameters="cpu")
    choice = chosen(memory_gb=memory_gb, micro=2, zero=both)
    bare = needless_offload(
        choice,
        shape(),
        model=MODEL,
        dtype="bf16",
        ranks=8,
        memory_bytes=None if memory_gb is None else memory_gb * GB,
    )
    assert (bare is not None) is needless
