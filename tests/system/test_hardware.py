from __future__ import annotations

from pathlib import Path

import pytest

from refocused.system import hardware
from refocused.system.errors import ConfigError
from refocused.system.hardware import cpu_flags, gpu_facts, named_gpu


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA B200", "B200"),
        ("h100 sxm", "H100 SXM"),
        ("rtx-4090", "RTX 4090"),
    ],
)
def test_a_known_name_gives_its_facts(name: str, short: str) -> None:
    facts = gpu_facts(name)
    assert facts is not None
    assert facts.name == short


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA GH200 480GB",
        "NVIDIA H20",
        "NVIDIA L40",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "H100",
        "NVIDIA A100-SXM-64GB",
        "AMD Instinct MI300X",
    ],
)
def test_an_unknown_name_is_none_and_not_a_neighbour(name: str) -> None:
    assert gpu_facts(name) is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("H100", "H100 SXM"),
        ("nvidia a100", "A100 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("rtx", "RTX 4090"),
        ("H200", "H200"),
    ],
)
def test_a_gpu_may_be_named_by_its_first_words(name: str, short: str) -> None:
    assert named_gpu(name).name == short


@pytest.mark.parametrize("name", ["", "H20", "L40", "A10", "RTX 5090"])
def test_a_name_never_stands_for_another_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a known GPU\. Choose one of: A100 40GB, A100"):
        named_gpu(name)


def test_peaks_are_dense() -> None:
    h100 = gpu_facts("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100.bf16_flops == 989.4e12  # the data sheet's 1,979 is with sparsity
    assert h100.memory_gib == 79.6


def test_the_flags_are_those_of_the_first_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "CPU_INFO", file)
    assert cpu_flags() == frozenset()  # there is no such file
    file.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 9354\nflags\t\t: fpu avx2 avx512_bf16\n"
        "bugs\t\t: spectre_v1\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert cpu_flags() == {"fpu", "avx2", "avx512_bf16"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")  # of ARM: bf16 was not tried
    assert cpu_flags() == frozenset()
