"""What `auto` becomes: the type of the passes, the ZeRO stage, the offload and the micro-batch."""

import pytest

from refocused.config.load_run import LoadedRun, load_run
from refocused.estimate.memory_plan import (
    BUSY_TOKENS,
    Choice,
    choose,
    native_dtype,
    needless_offload,
    with_dtype,
)
from refocused.system.errors import ConfigError

NO_BF16 = "the GPU has no bf16 (compute capability {})"
BF16 = "the GPU computes in it (compute capability {})"
SLOW = "a product in bf16 takes 2.0 times as long here, despite AVX512-BF16"
GB = 1e9
NO_OFFLOAD = "zero.offload_optimizer=none zero.offload_parameters=none"
ONE, SMALL = "batch.micro_batch_size=1", "batch.micro_batch_size=1 batch.global_batch_size=64"


@pytest.mark.parametrize(
    ("capability", "flags", "gain", "dtype", "reason"),
    [
        ((7, 0), "amx_bf16", 1.0, "fp16", NO_BF16.format("7.0")),  # V100; the host does not matter
        ((8, 0), "", 1.0, "bf16", BF16.format("8.0")),  # A100
        ((10, 0), "", 1.0, "bf16", BF16.format("10.0")),  # B200
        (None, "", 1.0, "fp32", "the processor has no bf16 instructions (AMX or AVX512-BF16)"),
        (None, "avx512f avx512_vnni", 1.0, "fp32", "the processor has no bf16"),  # Cascade Lake
        (None, "avx512_bf16", 1.7, "bf16", "the processor computes in it (AVX512-BF16)"),  # Genoa
        (None, "avx512_bf16 amx_bf16", 1.0, "bf16", "the processor computes in it (AMX, AVX512-"),
        (None, "avx512_bf16", 0.5, "fp32", SLOW),
    ],
)
def test_what_the_hardware_computes_fastest_in(
    capability: tuple[int, int] | None, flags: str, gain: float, dtype: str, reason: str
) -> None:
    found = native_dtype(capability=capability, cpu_flags=set(flags.split()), cpu_gain=lambda: gain)
    assert found.dtype == dtype
    assert found.reason.startswith(reason)


def test_8_bits_need_bf16_whatever_auto_is() -> None:
    loaded = load_run("demo", ["precision.fp8=tensorwise"])
    assert with_dtype(loaded, "bf16").config.precision.resolved == "bf16"
    with pytest.raises(
        ConfigError, match=r"precision\.dtype=auto is fp16 here.*precision\.fp8=none"
    ):
        with_dtype(loaded, "fp16")


def run_of(settings: str) -> LoadedRun:
    """Return a run of 512 sequences of a 0.76 B model that leaves all else to choose."""
    zero = "zero.stage=auto zero.offload_optimizer=auto zero.offload_parameters=auto"
    model = "model.preset=gpt2_1b model.sequence_length=2048 precision.dtype=bf16 run.steps=1000"
    batch = "batch.micro_batch_size=auto batch.global_batch_size=512"
    return load_run("gpt2_124m", f"{zero} {model} {batch} {settings}".split())


def chosen(settings: str, *, memory_gb: float | None, ranks: int = 8) -> Choice:
    memory_bytes = None if memory_gb is None else memory_gb * GB
    return choose(run_of(settings), ranks=ranks, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    ("settings", "memory_gb", "ranks", "stage", "offload", "sequences"),
    [
        ("", 140, 8, 1, "none", 32),  # of the stages that fit, the one that exchanges least
        ("", 85, 8, 1, "none", 16),
        (ONE, 40, 8, 1, "none", 1),
        (ONE, 10, 8, 2, "none", 1),
        (ONE, 8, 8, 2, "cpu", 1),  # only if nothing else fits
        (SMALL, 18, 1, 1, "cpu", 1),
        ("zero.stage=2 batch.micro_batch_size=2", 85, 8, 2, "none", 2),  # what is given stays
        (f"zero.stage=0 batch.micro_batch_size=64 {NO_OFFLOAD}", 5, 8, 0, "none", 64),
        ("", None, 2, 1, "none", 2),  # modest without GPUs
    ],
)
def test_the_fastest_choice_that_fits_is_taken(
    settings: str, memory_gb: float | None, ranks: int, stage: int, offload: str, sequences: int
) -> None:
    choice = chosen(settings, memory_gb=memory_gb, ranks=ranks)
    assert (choice.zero.stage, choice.zero.offload_optimizer) == (stage, offload)
    assert choice.micro_batch_size == sequences
    if memory_gb is not None:
        assert choice.memory.fits(memory_gb * GB) == (stage != 0)
    if not settings and memory_gb:
        assert sequences * 2048 >= BUSY_TOKENS
        twice = f"zero.stage={stage} batch.micro_batch_size={2 * sequences} {NO_OFFLOAD}"
        assert not chosen(twice, memory_gb=memory_gb).memory.fits(memory_gb * GB)


@pytest.mark.parametrize(
    ("settings", "memory_gb", "ranks", "message"),
    [
        ("", 3, 8, "Nothing fits"),
        (f"{SMALL} {NO_OFFLOAD}", 18, 1, r"Nothing fits: .*activation_checkpointing=true"),
        ("batch.global_batch_size=510", 85, 8, r"batch_size=510 is not a multiple of 8 ranks"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    settings: str, memory_gb: float, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(settings, memory_gb=memory_gb, ranks=ranks)


@pytest.mark.parametrize(("memory_gb", "needless"), [(80, True), (10, False), (None, False)])
def test_an_offload_that_is_not_needed_is_seen(memory_gb: float | None, needless: bool) -> None:
    both = "zero.offload_optimizer=cpu zero.offload_parameters=cpu batch.micro_batch_size=2"
    run, memory_bytes = run_of(f"{both} zero.stage=3"), memory_gb and memory_gb * GB
    choice = choose(run, ranks=8, memory_bytes=memory_bytes)
    bare = needless_offload(run, choice, ranks=8, memory_bytes=memory_bytes)
    assert (bare is not None) is needless
