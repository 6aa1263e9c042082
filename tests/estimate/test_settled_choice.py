"""Which ZeRO stage, offload and micro-batch are chosen, by the memory that they take."""

import pytest

from refocused.config.load_run import LoadedRun, load_run
from refocused.estimate.memory_plan import BUSY_TOKENS, Choice, choose, needless_offload
from refocused.system.errors import ConfigError

GB = 1e9
NO_OFFLOAD = ("zero.offload_optimizer=none", "zero.offload_parameters=none")


def run_of(*settings: str, preset: str = "gpt2_1b", stage: str = "auto") -> LoadedRun:
    """Return a run of 512 sequences that leaves all else to choose."""
    zero = [f"zero.stage={stage}", "zero.offload_optimizer=auto", "zero.offload_parameters=auto"]
    model = [f"model.preset={preset}", "model.sequence_length=2048", "precision.dtype=bf16"]
    batch = ["batch.micro_batch_size=auto", "batch.global_batch_size=512", "run.steps=1000"]
    return load_run("gpt2_124m", [*model, *batch, *zero, *settings])


def chosen(
    *settings: str,
    memory_gb: float | None,
    ranks: int = 8,
    preset: str = "gpt2_1b",
    stage: str = "auto",
) -> Choice:
    return choose(
        run_of(*settings, preset=preset, stage=stage),
        ranks=ranks,
        memory_bytes=None if memory_gb is None else memory_gb * GB,
    )


def test_much_memory_takes_the_stage_that_exchanges_least() -> None:
    choice = chosen(memory_gb=140)
    assert choice.zero.stage == 1
    assert choice.zero.offload_optimizer == choice.zero.offload_parameters == "none"
    assert choice.micro_batch_size * 2048 >= BUSY_TOKENS


def test_the_micro_batch_is_the_largest_divisor_that_fits() -> None:
    choice = chosen(memory_gb=85)
    assert 64 % choice.micro_batch_size == 0
    assert choice.memory.fits(85 * GB)
    with pytest.raises(ConfigError, match="Nothing fits"):
        chosen(memory_gb=3)
    stage, twice = str(choice.zero.stage), f"batch.micro_batch_size={2 * choice.micro_batch_size}"
    larger = chosen(twice, *NO_OFFLOAD, memory_gb=85, stage=stage)
    assert not larger.memory.fits(85 * GB)


def test_less_memory_spreads_more_before_it_offloads() -> None:
    for size, stage, offload in ((40, 1, "none"), (10, 2, "none"), (8, 2, "cpu")):
        zero = chosen("batch.micro_batch_size=1", memory_gb=size).zero
        assert (zero.stage, zero.offload_optimizer) == (stage, offload)


def test_an_offload_is_taken_only_when_nothing_else_fits() -> None:
    small = ("batch.micro_batch_size=1", "batch.global_batch_size=64")
    assert chosen(*small, memory_gb=18, ranks=1).zero.offload_optimizer == "cpu"
    with pytest.raises(ConfigError, match=r"Nothing fits: .*activation_checkpointing=true"):
        chosen(*small, *NO_OFFLOAD, memory_gb=18, ranks=1)


def test_what_is_given_stays() -> None:
    choice = chosen("batch.micro_batch_size=2", memory_gb=85, stage="2")
    assert (choice.micro_batch_size, choice.zero.stage) == (2, 2)
    too_much = chosen("batch.micro_batch_size=64", *NO_OFFLOAD, memory_gb=5, stage="0")
    assert (too_much.micro_batch_size, too_much.zero.stage) == (64, 0)
    assert not too_much.memory.fits(5 * GB)


def test_without_a_gpu_the_micro_batch_is_modest() -> None:
    choice = chosen(memory_gb=None, ranks=2)
    assert (choice.micro_batch_size, choice.zero.stage) == (2, 1)


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"batch.global_batch_size=510 is not a multiple of 8 ranks"
    ):
        chosen("batch.global_batch_size=510", memory_gb=85)


@pytest.mark.parametrize(("memory_gb", "needless"), [(80, True), (10, False), (None, False)])
def test_an_offload_that_is_not_needed_is_seen(memory_gb: float | None, needless: bool) -> None:
    both = ("zero.offload_optimizer=cpu", "zero.offload_parameters=cpu", "batch.micro_batch_size=2")
    run, memory_bytes = run_of(*both, stage="3"), None if memory_gb is None else memory_gb * GB
    choice = choose(run, ranks=8, memory_bytes=memory_bytes)
    bare = needless_offload(run, choice, ranks=8, memory_bytes=memory_bytes)
    assert (bare is not None) is needless
