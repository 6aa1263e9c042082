"""What a run leaves open is settled: its vocabulary, its precision, its memory."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.estimate.activations import activation_memory
from refocused.models.causal_lm import CausalLM
from refocused.system.errors import ConfigError
from refocused.system.world import World
from refocused.train.lifecycle import job
from refocused.train.lifecycle.job import settle
from refocused.train.lifecycle.open_data import build_data

END_OF_TEXT = 50_256
MILAN, GENOA = frozenset({"avx2"}), frozenset({"avx2", "avx512_bf16"})


def opened(name: str) -> DirectoryBucket:
    return DirectoryBucket(Path(name))


@pytest.mark.parametrize("run", ["gpt2_1b_8xh100", "gpt2_1b_8xh100_fast"])
def test_the_ids_of_gpt2_are_taken(tmp_path: Path, run: str) -> None:
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens" / "a.npy", np.full(500, END_OF_TEXT, np.uint16))
    places = [f"data.source={tmp_path / 'tokens'}", f"data.cache={tmp_path / 'cache'}"]
    settings = [*places, "run.device=cpu", "data.validation_fraction=0"]
    loaded, planned = settle(load_run(run, settings), World(), open_source=opened)
    assert loaded.config.model.vocabulary == loaded.shape.vocabulary == END_OF_TEXT + 1
    data = build_data(
        loaded.config.data,
        plan=BatchPlan(micro=2, accumulation=1, world_size=1, sequence_length=10),
        world=World(),
        vocabulary=loaded.shape.vocabulary,
        seed=1,
        steps=3,
        evaluation_windows=0,
        credentials_file=None,
        project=None,
    )
    stream = data.loader.batches_from(data.order.position_at(0))
    try:
        [batch] = stream.next_step()
    finally:
        stream.close()
        data.cache.close()
    assert int(batch.input_ids.max()) == END_OF_TEXT
    exact, fewer = (
        settle(load_run(run, [*settings, *more]), World(), open_source=opened)[1].choice.memory
        for more in (["model.vocabulary=50257"], ["model.vocabulary=9", "data.tokenizer=unknown"])
    )
    assert planned.choice.memory == exact
    assert exact.peak > fewer.peak


def test_a_number_below_the_tokenizers_is_refused_before_anything_is_built() -> None:
    settings = ["model.vocabulary=50256", "run.device=cpu"]
    with pytest.raises(ConfigError, match=r"50257 token ids.*Set model\.vocabulary=auto"):
        settle(load_run("gpt2_1b_8xh100_fast", settings), World(), open_source=opened)


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Stand GPUs of 80 GB in for those of this machine."""
    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )


@pytest.mark.parametrize(
    ("flags", "gain", "dtype"), [(MILAN, 2, "fp32"), (GENOA, 2, "bf16"), (GENOA, 0.5, "fp32")]
)
def test_auto_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], gain: float, dtype: str
) -> None:
    monkeypatch.setattr(job, "cpu_flags", lambda: flags)
    monkeypatch.setattr(job.precision, "cpu_bf16_gain", lambda: gain)
    loaded, plan = settle(load_run("demo"), World(), open_source=opened)
    assert loaded.config.precision.dtype == dtype
    assert plan.is_native_by_choice
    memory = settle(load_run("demo", [f"precision.dtype={dtype}"]), World(), open_source=opened)[
        1
    ].choice.memory
    assert plan.choice.memory == memory  # the plan is of that precision too


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "fp16"), ((9, 0), "bf16")])
def test_auto_follows_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    gpus(monkeypatch, capability)
    monkeypatch.setattr(job, "cpu_flags", lambda: GENOA)
    # The emulation of torch says yes on every GPU.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    loaded, _ = settle(
        load_run("gpt2_124m", ["batch.micro=2"]), World(device_kind="cuda"), open_source=opened
    )
    assert loaded.config.precision.dtype == dtype


def test_ranks_that_differ_take_what_all_of_them_compute_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, (9, 0), (7, 5))

    def settled(world: World) -> str:
        loaded = load_run("gpt2_124m", ["batch.micro=2"])
        return settle(loaded, dataclasses.replace(world, device_kind="cuda"), open_source=opened)[
            0
        ].config.precision.resolved

    assert results(on_two_ranks(settled)) == ["fp16", "fp16"]


def test_what_the_run_file_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "cpu_flags", lambda: MILAN)
    loaded, plan = settle(load_run("demo", ["precision.dtype=bf16"]), World(), open_source=opened)
    assert (loaded.config.precision.dtype, plan.is_native_by_choice) == ("bf16", False)
    assert plan.native.dtype == "fp32"


def test_a_large_model_on_several_cpu_ranks_is_refused() -> None:
    def settled(world: World) -> None:
        settle(load_run("gpt2_124m", ["run.device=auto"]), world, open_source=opened)

    for ended in on_two_ranks(settled):
        assert isinstance(ended.error, ConfigError)
        assert re.search(
            r"2 ranks .*124 M parameters on the CPU.*run\.device=cpu", str(ended.error)
        )


@pytest.mark.parametrize(
    ("run", "ranks", "device"),
    [("demo", 8, "auto"), ("gpt2_124m", 1, "auto"), ("gpt2_124m", 8, "cpu")],
)
def test_a_trial_on_the_cpu_is_not_refused(run: str, ranks: int, device: str) -> None:
    job.refuse_cpu(load_run(run, [f"run.device={device}"]), ranks=ranks)


@pytest.mark.parametrize(
    ("most", "factor", "most_micro"), [(2, 2.0, None), (1, 1.0, 1), (0, 1.0, 1)]
)
def test_a_micro_batch_that_lacks_memory_is_the_answer(
    most: int, factor: float, most_micro: int | None
) -> None:
    loaded = load_run("demo", ["precision.dtype=fp32", "batch.micro=1"])
    config = loaded.config

    def peak(model: CausalLM, ids: Tensor) -> int:
        if len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        expected = activation_memory(loaded.shape, model=config.model, micro=len(ids), dtype="fp32")
        return 10**9 + 2 * (expected.blocks + max(expected.head, expected.recomputed))

    found = job.measured_over_computed(loaded, World(), peak_of=peak)
    assert found == (pytest.approx(factor), most_micro)
