"""Decisions before training: vocabulary, precision, memory; and their log lines."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from end_to_end.forked import measured
from thread_ranks import on_two_ranks, results

from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.load_run import LoadedRun, load_run
from refocused.config.optimization import PrecisionConfig
from refocused.data.loader.open_data import build_data
from refocused.engine.compiled import Compilation
from refocused.estimate.memory_plan import refuse_cpu
from refocused.system.errors import ConfigError
from refocused.system.world import World
from refocused.train.lifecycle import job
from refocused.train.lifecycle.banner import (
    data_lines,
    opening_lines,
    tokenizer_lines,
    uncompiled_fp8,
)
from refocused.train.lifecycle.job import Plan

END_OF_TEXT = 50_256
MILAN, GENOA = frozenset({"avx2"}), frozenset({"avx2", "avx512_bf16"})
ALONE, ONE_GPU = World(), World(device_kind="cuda")


def settled(run: str, *settings: str, world: World = ALONE) -> tuple[LoadedRun, Plan]:
    loaded = load_run(run, list(settings))
    return job.settle(loaded, world, open_source=lambda name: DirectoryBucket(Path(name)))


def test_the_plan_uses_the_tokenizers_vocabulary() -> None:
    run = ("gpt2_1b_8xh100_fast", "run.device=cpu")
    loaded, planned = settled(*run)
    assert loaded.config.model.vocabulary == loaded.shape.vocabulary == 50_257
    exact, fewer = (
        settled(*run, *more)[1].choice.memory
        for more in (["model.vocabulary=50257"], ["model.vocabulary=9", "data.tokenizer=unknown"])
    )
    assert planned.choice.memory == exact
    assert exact.peak > fewer.peak


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], name: str = "") -> None:
    """Fake GPUs of 80 GB."""
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    # torch's emulation reports support on every GPU.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def dtype_lines(loaded: LoadedRun, planned: Plan) -> list[str]:
    """Return what the opening lines say of the precision."""
    lines = opening_lines(dataclasses.replace(loaded, changes=()), planned, ALONE)
    assert f"ZeRO-3, {loaded.config.precision.dtype}, CPU" in lines[3]
    return lines[4:]


@pytest.mark.parametrize(("flags", "dtype"), [(MILAN, "fp32"), (GENOA, "bf16")])
def test_auto_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], dtype: str
) -> None:
    monkeypatch.setattr(job, "cpu_flags", lambda: flags)
    monkeypatch.setattr(job.precision, "cpu_bf16_gain", lambda: 2.0)
    loaded, plan = settled("demo")
    assert loaded.config.precision.dtype == dtype
    assert plan.is_native_by_choice
    memory = settled("demo", f"precision.dtype={dtype}")[1].choice.memory
    assert plan.choice.memory == memory  # the plan is of that precision too
    said = [f"  dtype    {dtype} (precision.dtype=auto): {plan.native.reason}"]
    assert dtype_lines(loaded, plan) == said


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_explicit_precision_is_kept_with_a_warning_if_slow(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(job, "cpu_flags", lambda: MILAN)
    loaded, plan = settled("demo", f"precision.dtype={dtype}")
    assert (loaded.config.precision.dtype, plan.is_native_by_choice) == (dtype, False)
    assert plan.native.dtype == "fp32"
    warning = (
        f"  WARN     precision.dtype=bf16 is slow here: {plan.native.reason}. precision.dtype="
    )
    lines = dtype_lines(loaded, plan)
    assert [line.startswith(f"{warning}fp32") for line in lines] == [True] * (dtype == "bf16")


def test_different_ranks_use_a_precision_they_all_support(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (9, 0), (7, 5))

    def action(world: World) -> str:
        on_gpus = dataclasses.replace(world, device_kind="cuda")
        loaded, _ = settled("gpt2_124m", "batch.micro=2", world=on_gpus)
        return loaded.config.precision.resolved

    assert results(on_two_ranks(action)) == ["fp16", "fp16"]


def test_a_known_gpu_has_an_expected_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str) -> list[str]:
        gpus(monkeypatch, (9, 0), name=name)
        loaded, planned = settled("gpt2_124m", "batch.micro=16", world=ONE_GPU)
        lines = opening_lines(loaded, planned, ONE_GPU)
        return [line for line in lines if line.startswith("  expect")]

    assert said("NVIDIA H900") == []
    (line,) = said("NVIDIA H100 80GB HBM3")
    assert re.search(r"^  expect   [\d.]+ s a step, [\d,]+ tokens/s, MFU \d\d%, ", line)
    assert "of it products (from data sheets, not measured)" in line


def test_a_run_that_ends_within_a_cycle_of_its_rate_is_warned_of() -> None:
    settings = ("precision.dtype=fp32", "schedule.kind=warm_restarts", "schedule.warmup_steps=0")
    for steps, warnings in ((500, 0), (501, 1)):
        loaded, planned = settled(
            "demo", *settings, "schedule.cycle_steps=500", f"run.steps={steps}"
        )
        lines = [line for line in opening_lines(loaded, planned, ALONE) if "WARN" in line]
        assert ["ends at step 1,000" in line for line in lines] == [True] * warnings


def test_the_data_lines_tell_what_is_in_no_window_and_what_leaks(tmp_path: Path) -> None:
    for name in ("a", "val"):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16))
    folders = [f"data.source={tmp_path}", f"data.cache={tmp_path}/cache"]
    patterns = ["data.validation_files=[]", "data.validation_fraction=0.1"]
    lengths = ["model.sequence_length=32", "evaluation.windows=1", "precision.dtype=fp32"]
    run = load_run("demo", [*folders, *patterns, *lengths]).config
    plan, steps = BatchPlan(1, 1, 1, 32), run.run.steps
    given = {"vocabulary": 257, "seed": 1, "steps": steps, "evaluation_windows": 1}
    data = build_data(run.data, plan=plan, world=ALONE, **given)
    try:
        first, *others = data_lines(data, run, plan)
    finally:
        data.cache.close()
    assert "1 window to train and 1 to validate (34.00% of the tokens in none)" in first
    said = [line for line in others if line.startswith("  WARN     ")]
    assert "34.0% of the tokens of" in said[0]
    assert "1 training files have the bytes of a validation file (a.npy those of val" in said[1]


def test_a_large_model_on_several_cpu_ranks_is_rejected() -> None:
    for ended in on_two_ranks(lambda world: settled("gpt2_124m", "run.device=auto", world=world)):
        assert isinstance(ended.error, ConfigError)
        assert re.search(
            r"2 ranks .*124 M parameters on the CPU.*run\.device=cpu", str(ended.error)
        )
    trials = [("demo", 8, "auto"), ("gpt2_124m", 1, "auto"), ("gpt2_124m", 8, "cpu")]
    for run, ranks, device in trials:
        refuse_cpu(load_run(run, [f"run.device={device}"]), ranks=ranks)


def test_an_automatic_micro_batch_fits_and_is_no_less_than_half_of_the_largest(
    tmp_path: Path,
) -> None:
    (cases,), _ = measured("micro_ranks", tmp_path, ranks=1)
    for case in cases:
        peaks = {int(micro): peak for micro, peak in case["peaks"].items()}
        assert peaks[32] > 1.5 * peaks[4]  # activations count
        for limit, micro in case["chosen"]:
            largest = max(number for number, peak in peaks.items() if peak <= limit)
            assert peaks[micro] <= limit
            assert micro >= largest // 2
        assert case["left"] < 0.01 * peaks[1]  # nothing stays of these engines


def test_a_missing_tokenizer_is_reported_before_training() -> None:
    (line,) = tokenizer_lines(DataConfig(source="tokens", tokenizer="gpt2"))
    assert "final_model/ will hold no tokenizer" in line and "Set data.bpe_folder" in line
    for settings in ({"bpe_folder": "bpe", "tokenizer": "gpt2"}, {"tokenizer": "bytes"}, {}):
        assert tokenizer_lines(DataConfig(source="tokens", **settings)) == []


def test_fp8_without_compiled_blocks_is_reported_with_its_cost() -> None:
    in_8, in_16 = PrecisionConfig(dtype="bf16", fp8="tensorwise"), PrecisionConfig(dtype="bf16")
    written, compiled = Compilation(False, "as written"), Compilation(True, "compiled")
    line = uncompiled_fp8(in_8, written)
    assert line is not None
    assert "moves 33 bytes" in line and "model.compile=auto" in line
    assert uncompiled_fp8(in_8, compiled) is uncompiled_fp8(in_16, written) is None
