"""Compiles every Triton kernel for GPUs that need not be here: `pytest -s -m slow` prints a table.

It needs Triton alone (`pip install triton`), whose wheel carries NVIDIA's assembler.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from triton_interpreter import INTERPRETED, IS_OLD

import refocused

triton = pytest.importorskip("triton", reason="needs Triton: pip install triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="needs TRITON_INTERPRET unset"),
]
# By `file:kernel` of refocused/models: what is not a pointer to float32. The integers that Triton
# knows as i64 are those of more than 2^31.
SCAN = dict.fromkeys(("modes", "rows", "length", "plane", "tiles"), "i32")
MEMORY = {"KEY": 64, "WIDTH": 65, "KEYS": 64, "VALUES": 64, "CHUNK": 16}
MEMORY |= dict.fromkeys(("length", "chunks"), "i32")
LOSSES = {"labels": "*i64", "columns": "i32", "softcap": "fp32", "z_loss": "fp32"}
LOSSES["HAS_CAP"] = False
OF_TOKENS = ("query", "key", "value", "out", "states", "gradient")
SHORT = dict.fromkeys((*OF_TOKENS, "into_query", "into_key", "into_value"), "*bf16")
SHORT = {**MEMORY, **SHORT, "CHUNK": 64}
CASES = {
    "values": ("scan_kernel:_scan_tiles", {**SCAN, "WHOLE": False}),
    "whole": ("scan_kernel:_scan_tiles", {**SCAN, "WHOLE": True}),
    "large": ("scan_kernel:_scan_tiles", {**SCAN, "WHOLE": True, "plane": "i64"}),
    "read": ("memory_kernel:_read_chunks", MEMORY),
    "read16": ("memory_kernel:_read_chunks", SHORT),
    "back": ("memory_kernel:_write_gradients", MEMORY),
    "back16": ("memory_kernel:_write_gradients", SHORT),
    "float32": ("head_kernel:_row_losses", LOSSES),
    "bf16": ("head_kernel:_row_losses", {**LOSSES, "logits": "*bf16", "gradients": "*bf16"}),
    "capped": ("head_kernel:_row_losses", {**LOSSES, "HAS_CAP": True}),
    "fp16": ("head_kernel:_row_losses", {**LOSSES, "logits": "*fp16", "gradients": "*fp16"}),
}
MAX_SPILLED = 1024  # bytes a thread; the scan's 8-warp programs spill 250 to 400
TOO_LARGE = {("back", 80), ("back16", 80)}  # spill 12 kB or more; chunks should win there


def test_every_kernel_is_compiled():
    models = Path(refocused.__file__).parent / "models"
    kernels = [
        f"{'.'.join(path.relative_to(models).with_suffix('').parts)}:{name}"
        for path in models.rglob("*.py")
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", path.read_text(), re.MULTILINE)
    ]
    assert sorted(kernels) == sorted({kernel for kernel, _ in CASES.values()})


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_compiles_within_its_registers(case, capability, tmp_path, monkeypatch, capsys):
    if IS_OLD and (case, capability) == ("read16", 80):
        pytest.skip("Triton 3.6 spills 5,644 bytes for sm80")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    built = compiled(case, capability)
    said = capsys.readouterr().out
    registers = int(re.findall(r"Used (\d+) registers", said)[0])
    spilled = [int(size) for size in re.findall(r"(\d+) bytes spill", said)]
    with capsys.disabled():
        print(
            f"\n{CASES[case][0]} {case:7} sm{capability:<4} {registers:4} registers, "
            f"{max(spilled):5} bytes spilled, {built.metadata.shared:6} bytes shared, "
            f"{built.metadata.num_warps} warps",
            end=" ",
        )
    assert max(spilled) <= MAX_SPILLED or (case, capability) in TOO_LARGE
    for name, kind in CASES[case][1].items():
        if kind in ("i32", "i64"):
            seen = re.search(rf"%{name}\w*: (i\d+)", built.asm["ttir"])
            assert seen is not None and seen[1] == kind


def compiled(case, capability):
    """Compile a kernel as its launch would."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file, _, name = CASES[case][0].partition(":")
    module = importlib.import_module(f"refocused.models.{file}")
    kernel = getattr(module, name)
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {name for name in names if name.isupper()}
    named = {name: getattr(module, name, None) for name in constants} | CASES[case][1]
    types = dict.fromkeys(names, "*fp32") | CASES[case][1] | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in names}
    pointers = [place for place, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): named[name] for name in constants},
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": module.WARPS}
    )
