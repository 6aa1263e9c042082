from __future__ import annotations

import pytest

from refocused.config.load_run import load_run
from refocused.config.optimization import Dtype
from refocused.estimate.precision import cpu_bf16_gain, native_dtype, with_dtype
from refocused.system.errors import ConfigError


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 0), "fp16", "the GPU has no bf16 (compute capability 7.0)"),  # V100
        ((7, 5), "fp16", "the GPU has no bf16 (compute capability 7.5)"),  # T4
        ((8, 0), "bf16", "the GPU computes in it (compute capability 8.0)"),  # A100
        ((8, 9), "bf16", "the GPU computes in it (compute capability 8.9)"),  # L4, RTX 4090
        ((10, 0), "bf16", "the GPU computes in it (compute capability 10.0)"),  # B200
    ],
)
def test_a_gpu_computes_in_16_bits(capability: tuple[int, int], dtype: Dtype, reason: str) -> None:
    found = native_dtype(capability=capability)
    assert (found.dtype, found.reason) == (dtype, reason)


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        (set(), "fp32", "the processor has no bf16 instructions (AMX or AVX512-BF16)"),
        ({"avx2", "fma"}, "fp32", "the processor has no bf16 instructions"),  # EPYC Milan
        ({"avx512f", "avx512_vnni"}, "fp32", "the processor has no bf16"),  # Cascade Lake
        ({"avx512_bf16"}, "bf16", "the processor computes in it (AVX512-BF16)"),  # EPYC Genoa
        ({"avx512_bf16", "amx_bf16"}, "bf16", "the processor computes in it (AMX, AVX512-BF16)"),
    ],
)
def test_a_processor_computes_in_bf16_where_it_has_the_instructions(
    flags: set[str], dtype: Dtype, reason: str
) -> None:
    found = native_dtype(capability=None, cpu_flags=flags)
    assert found.dtype == dtype
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("gain", "dtype", "reason"),
    [
        (0.5, "fp32", "a product in bf16 takes 2.0 times as long here, in spite of AVX512-BF16"),
        (1.7, "bf16", "the processor computes in it (AVX512-BF16)"),
    ],
)
def test_a_processor_whose_instructions_are_slow_stays_in_float32(
    gain: float, dtype: Dtype, reason: str
) -> None:
    found = native_dtype(capability=None, cpu_flags={"avx512_bf16"}, cpu_gain=lambda: gain)
    assert (found.dtype, found.reason) == (dtype, reason)


def test_what_a_product_gains_is_timed() -> None:
    assert 0 < cpu_bf16_gain() < 100


def test_the_flags_of_the_host_do_not_matter_beside_a_gpu() -> None:
    assert native_dtype(capability=(7, 5), cpu_flags={"amx_bf16"}).dtype == "fp16"


def test_8_bits_need_bf16_whatever_auto_is() -> None:
    loaded = load_run("demo", ["precision.fp8=tensorwise"])
    assert with_dtype(loaded, "bf16").config.precision.resolved == "bf16"
    with pytest.raises(
        ConfigError, match=r"precision\.dtype=auto is fp16 here.*precision\.fp8=none"
    ):
        with_dtype(loaded, "fp16")


def test_the_demonstration_leaves_the_precision_to_the_machine() -> None:
    assert load_run("demo").config.precision.dtype == "auto"
    assert load_run("gpt2_124m").config.precision.dtype == "auto"  # as every file that names none
    assert load_run("gpt2_1b_8xh100_fast").config.precision.dtype == "bf16"  # for named GPUs
