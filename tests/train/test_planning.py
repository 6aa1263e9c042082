"""Decisions before training: vocabulary, precision, memory; and their log lines."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_memory import LiveMemory
from ranks import on_ranks
from thread_ranks import on_two_ranks, results

from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.config.load_run import find_config, load_run
from refocused.data.loader.open_data import build_data
from refocused.estimate.memory_plan import largest_micro, refuse_cpu
from refocused.system.errors import ConfigError, TrainingError
from refocused.system.world import World
from refocused.train.lifecycle import banner, trainer
from refocused.train.lifecycle.banner import data_lines, opening_lines, tokenizer_lines

MILAN, GENOA = frozenset({"avx2"}), frozenset({"avx2", "avx512_bf16"})
ALONE, ONE_GPU = World(), World(device_kind="cuda")


def folder_at(name):
    return DirectoryBucket(Path(name))


def settled(run, *settings, world=ALONE):
    loaded = load_run(run, list(settings))
    return trainer.settle(loaded, world, open_source=folder_at)


def test_the_plan_uses_the_tokenizers_vocabulary():
    run = ("gpt2_1b_8xh100_fast", "run.device=cpu")
    loaded, planned = settled(*run)
    assert loaded.config.model.vocabulary == loaded.shape.vocabulary == 50_257
    exact, fewer = (
        settled(*run, *more)[1].choice.memory
        for more in (["model.vocabulary=50257"], ["model.vocabulary=9", "data.tokenizer=unknown"])
    )
    assert planned.choice.memory == exact
    assert exact.peak > fewer.peak


def gpus(monkeypatch, *capabilities, name=""):
    """Fake GPUs of 80 GB."""
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    # torch's emulation reports support on every GPU.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def dtype_lines(loaded, planned):
    """Return what the opening lines say of the precision."""
    lines = opening_lines(dataclasses.replace(loaded, changes=()), planned, ALONE)
    assert f"ZeRO-3, {loaded.config.precision.dtype}, CPU" in lines[3]
    return lines[4:]


@pytest.mark.parametrize(("flags", "dtype"), [(MILAN, "fp32"), (GENOA, "bf16")])
def test_auto_follows_the_processor(monkeypatch, flags, dtype):
    monkeypatch.setattr(trainer, "cpu_flags", lambda: flags)
    monkeypatch.setattr(trainer.memory_plan, "cpu_bf16_gain", lambda: 2.0)
    loaded, plan = settled("demo")
    assert loaded.config.precision.dtype == dtype
    assert plan.is_native_by_choice
    memory = settled("demo", f"precision.dtype={dtype}")[1].choice.memory
    assert plan.choice.memory == memory  # the plan is of that precision too
    said = [f"  dtype    {dtype} (precision.dtype=auto): {plan.native.reason}"]
    assert dtype_lines(loaded, plan) == said


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_explicit_precision_is_kept_with_a_warning_if_slow(monkeypatch, dtype):
    monkeypatch.setattr(trainer, "cpu_flags", lambda: MILAN)
    loaded, plan = settled("demo", f"precision.dtype={dtype}")
    assert (loaded.config.precision.dtype, plan.is_native_by_choice) == (dtype, False)
    assert plan.native.dtype == "fp32"
    warning = (
        f"  warning  precision.dtype=bf16 is slow here: {plan.native.reason}. precision.dtype="
    )
    lines = dtype_lines(loaded, plan)
    assert [line.startswith(f"{warning}fp32") for line in lines] == [True] * (dtype == "bf16")


def test_different_ranks_use_a_precision_they_all_support(monkeypatch):
    gpus(monkeypatch, (9, 0), (7, 5))

    def action(world):
        on_gpus = dataclasses.replace(world, device_kind="cuda")
        loaded, _ = settled("gpt2_124m", "batch.micro_batch_size=2", world=on_gpus)
        return loaded.config.precision.resolved

    assert results(on_two_ranks(action)) == ["fp16", "fp16"]


def test_a_known_gpu_has_an_expected_step_time(monkeypatch):
    def said(name):
        gpus(monkeypatch, (9, 0), name=name)
        loaded, planned = settled("gpt2_124m", "batch.micro_batch_size=16", world=ONE_GPU)
        lines = opening_lines(loaded, planned, ONE_GPU)
        return [line for line in lines if line.startswith("  expect")]

    assert said("NVIDIA H900") == []
    (line,) = said("NVIDIA H100 80GB HBM3")
    assert re.search(r"^  expect   [\d.]+ s a step, [\d,]+ tokens/s, MFU \d\d%, ", line)
    assert "of it products (from data sheets, not measured)" in line


def test_a_run_that_ends_within_a_cycle_of_its_rate_is_warned_of():
    settings = ("precision.dtype=fp32", "schedule.kind=warm_restarts", "schedule.warmup_steps=0")
    for steps, warnings in ((500, 0), (501, 1)):
        loaded, planned = settled(
            "demo", *settings, "schedule.cycle_steps=500", f"run.steps={steps}"
        )
        lines = [line for line in opening_lines(loaded, planned, ALONE) if "warning" in line]
        assert ["ends at step 1,000" in line for line in lines] == [True] * warnings


def test_the_data_lines_tell_what_is_in_no_sequence_and_what_leaks(tmp_path, monkeypatch):
    for name in ("a", "val"):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16))
    folders = [f"data.source={tmp_path}", f"data.cache={tmp_path}/cache"]
    patterns = ["data.validation_files=[]", "data.validation_fraction=0.1"]
    lengths = ["model.sequence_length=32", "evaluation.sequences=1", "precision.dtype=fp32"]
    loaded = load_run("demo", [*folders, *patterns, *lengths])
    run = loaded.config
    plan, steps = BatchPlan(1, 1, 1, 32), run.run.steps
    given = {"vocabulary": 257, "seed": 1, "steps": steps, "evaluation_sequences": 1}
    data = build_data(run.data, plan=plan, world=ALONE, **given)
    try:
        first, *others = data_lines(data, loaded, plan)
        record = {"curve": [[500_000_000, 4.0], [2_000_000_000, 3.0]]}
        monkeypatch.setattr(banner, "expected_loss", lambda *given: record)
        *_, fitted = data_lines(data, loaded, plan)
    finally:
        data.cache.close()
    assert (
        fitted == "  expect   by a published fit a loss of 2.70 to 3.30 at 2.00 B tokens, the end"
    )
    assert not any(line.startswith("  expect") for line in others)  # no fit holds
    unused = "34.00% of the tokens are unused, at the ends of shards"
    assert f"1 sequence to train and 1 to validate ({unused})" in first
    said = [line for line in others if line.startswith("  warning  ")]
    assert "34.0% of the tokens of" in said[0]
    assert "1 training files have the bytes of a validation file (a.npy those of val" in said[1]


def test_a_large_model_on_several_cpu_ranks_is_rejected():
    for ended in on_two_ranks(lambda world: settled("gpt2_124m", "run.device=auto", world=world)):
        assert isinstance(ended.error, ConfigError)
        assert re.search(
            r"2 ranks .*124 M parameters on the CPU.*run\.device=cpu", str(ended.error)
        )
    trials = [("demo", 8, "auto"), ("gpt2_124m", 1, "auto"), ("gpt2_124m", 8, "cpu")]
    for run, ranks, device in trials:
        refuse_cpu(load_run(run, [f"run.device={device}"]), ranks=ranks)


class BesideRank0(World):
    """Rank 1, whose clock is some seconds ahead of that of rank 0."""

    ahead = 0.0

    def gather(self, value):
        return [("host0", value[1] - self.ahead, ""), value] if value else [None]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-301.0, "5 minutes behind that"), (-299.0, ""), (299.0, ""), (301.0, "5 minutes ahead of")],
)
def test_a_clock_that_a_bucket_would_refuse_is_named(seconds, text, monkeypatch):
    monkeypatch.setattr(BesideRank0, "ahead", seconds)
    loaded = load_run("demo", [])
    if not text:
        banner.require_equal_settings(loaded, BesideRank0())
        return
    with pytest.raises(ConfigError, match=f"The clock of .* is {text}.* of host0"):
        banner.require_equal_settings(loaded, BesideRank0())


SMALL = {
    "vocab_size": 3136,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 352,
    "max_position_embeddings": 512,
}
WINDOWS = 64  # of a rank in a step
MICROS = (32, 16, 8, 4, 2, 1)
# A sequence is shorter than the model is wide, and its pass peaks when all gradients exist; or
# blocks are recomputed.
CASES = [(32, False), (128, True)]


class Device:
    """Stands for the memory of `torch.cuda`: counts the tensors that live."""

    def __init__(self, memory):
        self._memory = memory

    def memory_allocated(self, device):
        return self._memory.bytes

    def max_memory_allocated(self, device):
        return self._memory.peak

    def reset_peak_memory_stats(self, device):
        self._memory.peak = self._memory.bytes


def micro_batches(world):
    """Return for each case the peaks of steps, what is chosen for each, and what is not freed."""
    preset = Path.cwd() / f"llama_{world.rank}.json"
    llama = json.loads(find_config("models", "llama_1b").read_text())
    preset.write_text(json.dumps(llama | SMALL))
    with LiveMemory() as memory:
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            setattr(torch.cuda, name, getattr(Device(memory), name))
        return [_choices(world, preset, *case) | {"left": memory.bytes} for case in CASES]


def _choices(world, preset, length, recomputes):
    settings = [
        *(f"model.preset={preset}", f"model.sequence_length={length}", "model.vocabulary=3136"),
        *(f"model.activation_checkpointing={str(recomputes).lower()}", "data.tokenizer=unknown"),
        *("model.head_chunk_tokens=64", "precision.dtype=fp32", "zero.stage=2"),
        *("batch.micro_batch_size=auto", f"batch.global_batch_size={WINDOWS * world.world_size}"),
        "evaluation.sample_prompt=null",
    ]
    loaded = load_run("demo", settings)
    run, planned = trainer.settle(
        loaded, world, open_source=lambda name: DirectoryBucket(Path(name))
    )

    @functools.cache
    def step(micro_batch_size):
        batch = dataclasses.replace(
            planned.batch,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=WINDOWS // micro_batch_size,
        )
        choice = dataclasses.replace(planned.choice, micro_batch_size=micro_batch_size)
        return trainer.memory_of_a_step(
            run, dataclasses.replace(planned, choice=choice, batch=batch), world
        )

    def chosen(limit, formula):
        choice = dataclasses.replace(planned.choice, micro_batch_size=formula)
        return largest_micro(loaded, choice, ranks=world.world_size, limit=limit, measure=step)

    peaks = {micro_batch_size: step(micro_batch_size)[2] for micro_batch_size in MICROS}
    # The formula is right, or says that everything fits.
    return {
        "peaks": peaks,
        "chosen": [
            (peak, chosen(peak, formula))
            for micro_batch_size, peak in peaks.items()
            for formula in (micro_batch_size, MICROS[0])
        ],
    }


@pytest.mark.slow
def test_an_automatic_micro_batch_fits_and_is_no_less_than_half_of_the_largest(tmp_path):
    (cases,) = on_ranks(micro_batches, folder=tmp_path, ranks=1)
    for case in cases:
        peaks = case["peaks"]
        assert peaks[32] > 1.5 * peaks[4]  # activations count
        for limit, micro_batch_size in case["chosen"]:
            largest = max(number for number, peak in peaks.items() if peak <= limit)
            assert peaks[micro_batch_size] <= limit
            assert micro_batch_size >= largest // 2
        assert case["left"] < 0.01 * peaks[1]  # nothing stays of these engines


class MeasuredEngine:
    """Notes what a measured step does, on a GPU with room for 4 sequences."""

    def __init__(self, calls, micro_batch_size, error=None):
        self.calls, self.micro_batch_size, self.error = calls, micro_batch_size, error

    def begin_step(self, passes):
        self.calls.append(f"{passes} passes of {self.micro_batch_size}")

    def accumulate(self, *tokens):
        if self.error is not None:
            raise self.error
        if self.micro_batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def update(self, learning_rate): ...

    def close(self): ...


@pytest.fixture
def measured_steps(monkeypatch):
    """Fake GPUs of 80 GB; a first entry is the error of their passes."""
    calls: list[Any] = []
    gpus(monkeypatch, (9, 0), (9, 0))

    def assemble(loaded, planned, world, model):
        error = calls[0] if calls and isinstance(calls[0], Exception) else None
        return MeasuredEngine(calls, planned.batch.micro_batch_size, error)

    monkeypatch.setattr(trainer, "assemble_model", lambda *given: (None, "", None))
    monkeypatch.setattr(trainer, "assemble_engine", assemble)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: len(name) * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 2**30))
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("forget graphs"))
    return calls


AUTO_MICRO = [
    "batch.micro_batch_size=auto",
    "batch.global_batch_size=64",
    "batch.gradient_accumulation_steps=null",
    "zero.stage=1",
]


def test_a_rank_that_lacks_memory_measures_a_smaller_micro_batch(measured_steps):
    _, planned = settled("gpt2_124m", *AUTO_MICRO, world=ONE_GPU)
    micro_batch_sizes = [32, 16, 8, 4]
    steps = [
        f"2 passes of {micro_batch_size}"
        for micro_batch_size in micro_batch_sizes
        for _ in range(2 if micro_batch_size == 4 else 1)
    ]
    # The graphs of the last one are kept for the run.
    assert [call for call in measured_steps if call != "forget graphs"] == steps
    assert measured_steps[-3:] == ["forget graphs", steps[-1], steps[-1]]
    assert planned.batch.micro_batch_size >= 4


def test_several_ranks_that_lack_memory_end_the_start(measured_steps):
    def action(world):
        on_gpus = dataclasses.replace(world, device_kind="cuda")
        return settled("gpt2_124m", *AUTO_MICRO, world=on_gpus)[1]

    for ended in on_two_ranks(action):
        assert re.search(
            r"^Out of GPU memory on rank \d .*Try batch.micro_batch_size=8 ", str(ended.error)
        )


def test_another_failure_of_the_measured_step_is_named(measured_steps):
    measured_steps.append(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))
    with pytest.raises(TrainingError) as raised:
        settled("gpt2_124m", *AUTO_MICRO, world=ONE_GPU)
    assert str(raised.value) == (
        "batch.micro_batch_size=auto makes a step to measure its memory, which failed: "
        "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED. Set batch.micro_batch_size to "
        "a number to see where."
    )


def test_a_missing_tokenizer_is_reported_before_training():
    (line,) = tokenizer_lines(DataConfig(source="tokens", tokenizer="gpt2"))
    assert "final_model/ will hold no tokenizer" in line and "Set data.bpe_folder" in line
    for settings in ({"bpe_folder": "bpe", "tokenizer": "gpt2"}, {"tokenizer": "bytes"}, {}):
        assert tokenizer_lines(DataConfig(source="tokens", **settings)) == []
