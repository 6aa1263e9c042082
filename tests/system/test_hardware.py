from pathlib import Path

import pytest

from refocused.system import hardware
from refocused.system.errors import ConfigError
from refocused.system.hardware import cpu_flags, cpu_name, gpu_spec, named_gpu

KNOWN = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA B200": "B200",
    "h100 sxm": "H100 SXM",
    "rtx-4090": "RTX 4090",
}


def test_a_gpu_is_known_by_its_whole_name_and_never_as_its_neighbour() -> None:
    assert {name: facts.name for name in KNOWN if (facts := gpu_spec(name))} == KNOWN
    unknown = ["", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA L40", "H100", "NVIDIA A100-SXM-64GB"]
    unknown += ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"]
    assert [gpu_spec(name) for name in unknown] == [None] * len(unknown)


def test_an_option_may_name_a_gpu_by_its_first_words() -> None:
    short = {"H100": "H100 SXM", "nvidia a100": "A100 80GB", "NVIDIA H100 PCIe": "H100 PCIe"}
    short |= {"rtx": "RTX 4090", "H200": "H200"}
    assert {name: named_gpu(name).name for name in short} == short
    for name in ("", "H20", "L40", "A10", "RTX 5090"):
        with pytest.raises(ConfigError, match=r"is not a known GPU\. Choose one of: A100 40GB, A1"):
            named_gpu(name)


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


def test_a_processor_is_named_where_the_kernel_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "CPU_INFO", file)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert cpu_name() == "CPU"
    file.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\nmodel name\t: x\n")
    assert cpu_name() == "AMD EPYC 9654 (64 cores)"
    file.write_text("processor\t: 0\nCPU part\t: 0xd40\n")  # an ARM processor
    assert cpu_name() == "CPU"
