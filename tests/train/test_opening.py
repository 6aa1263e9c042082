from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.load_run import load_run
from refocused.config.optimization import PrecisionConfig
from refocused.engine.compiled import Compilation
from refocused.estimate.memory_plan import choose
from refocused.estimate.precision import NativeDtype, with_dtype
from refocused.models.fp8 import VALUES, in_8_bits, scale_of
from refocused.system.world import World
from refocused.train.lifecycle.banner import (
    EAGER_BYTES_TO_8_BITS,
    opening_lines,
    tokenizer_lines,
    uncompiled_fp8,
)
from refocused.train.lifecycle.job import Plan


def test_a_tokenizer_that_is_named_and_not_held_is_said_before_training() -> None:
    (line,) = tokenizer_lines(DataConfig(source="tokens", tokenizer="gpt2"))
    assert "final_model/ will hold no tokenizer" in line
    assert "Set data.bpe_folder" in line


def test_nothing_is_said_where_it_travels_or_is_not_named() -> None:
    for settings in ({"bpe_folder": "bpe", "tokenizer": "gpt2"}, {"tokenizer": "bytes"}, {}):
        assert tokenizer_lines(DataConfig(source="tokens", **settings)) == []


def dtype_lines(given: str, native: NativeDtype) -> list[str]:
    """Return the lines about the precision among the first ones of the demonstration."""
    loaded = load_run("demo", [f"precision.dtype={given}"])
    config = with_dtype(loaded, native.dtype).config if given == "auto" else loaded.config
    choice = choose(
        loaded.shape,
        model=config.model,
        batch=config.batch,
        zero=config.zero,
        dtype=config.precision.resolved,
        ranks=2,
        memory_bytes=None,
    )
    loaded = dataclasses.replace(loaded, config=config, changes=())
    plan = BatchPlan(micro=4, accumulation=1, world_size=2, sequence_length=256)
    planned = Plan(choice, plan, None, None, native, given == "auto")
    found = opening_lines(loaded, planned, World(world_size=2))
    assert f"ZeRO-3, {config.precision.dtype}, CPU" in found[3]
    return found[4:]


def test_the_precision_of_auto_is_said_with_its_reason() -> None:
    native = NativeDtype("fp32", "the processor has no bf16 instructions")
    assert dtype_lines("auto", native) == [
        "  dtype    fp32 (precision.dtype=auto): the processor has no bf16 instructions"
    ]


def test_a_precision_that_is_slow_here_is_a_warning() -> None:
    native = NativeDtype("fp32", "the processor has no bf16 instructions")
    (line,) = dtype_lines("bf16", native)
    assert line.startswith(
        "  WARN     precision.dtype=bf16 is slow here: the processor has no bf16"
    )
    assert "precision.dtype=fp32" in line
    assert dtype_lines("fp32", native) == []
    assert dtype_lines("bf16", NativeDtype("bf16", "")) == []


def test_8_bits_without_compiled_blocks_are_told_with_their_cost() -> None:
    in_8, in_16 = PrecisionConfig(dtype="bf16", fp8="tensorwise"), PrecisionConfig(dtype="bf16")
    written, compiled = Compilation(False, "as written"), Compilation(True, "compiled")
    line = uncompiled_fp8(in_8, written)
    assert line is not None
    assert f"moves {EAGER_BYTES_TO_8_BITS} bytes" in line and "model.compile=auto" in line
    assert uncompiled_fp8(in_8, compiled) is uncompiled_fp8(in_16, written) is None


class BytesMoved(TorchDispatchMode):
    """Counts what operations read and write of tensors with more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (*args, made):
            if isinstance(tensor, Tensor) and tensor.numel() > 1:
                self.bytes += tensor.numel() * tensor.element_size()
        return made


def test_the_bytes_that_are_told_are_those_that_an_element_moves() -> None:
    matrix = torch.randn(16, 64).bfloat16()
    with BytesMoved() as moved:
        in_8_bits(matrix, scale_of(matrix, VALUES, by_rows=False), VALUES)
    assert moved.bytes == EAGER_BYTES_TO_8_BITS * matrix.numel()


def test_a_known_gpu_gives_what_a_step_should_take(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_dtype(load_run("gpt2_124m", []), "bf16")
    config = loaded.config
    choice = choose(
        loaded.shape,
        model=config.model,
        batch=config.batch,
        zero=config.zero,
        dtype="bf16",
        ranks=8,
        memory_bytes=85e9,
    )
    plan = BatchPlan(micro=4, accumulation=1, world_size=8, sequence_length=1024)
    planned = Plan(choice, plan, 85e9, None, NativeDtype("bf16", ""), False)

    def said(name: str, kind: Literal["cpu", "cuda"] = "cuda") -> list[str]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        lines = opening_lines(loaded, planned, World(world_size=8, device_kind=kind))
        return [line for line in lines if line.startswith("  expect")]

    assert said("", "cpu") == said("NVIDIA H900") == []
    (line,) = said("NVIDIA H100 80GB HBM3")
    assert re.search(r"^  expect   0\.\d+ s a step, [\d,]+ tokens/s, MFU [34]\d%, ", line)
    assert "of it products (from data sheets, not measured)" in line
