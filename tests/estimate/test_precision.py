"""What `precision.dtype: auto` becomes."""

import pytest

from refocused.config.load_run import load_run
from refocused.estimate.memory_plan import native_dtype, with_dtype
from refocused.system.errors import ConfigError

NO_BF16 = "the GPU has no bf16 (compute capability {})"
BF16 = "the GPU computes in it (compute capability {})"
SLOW = "a product in bf16 takes 2.0 times as long here, despite AVX512-BF16"


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
