"""What the doctor says of a run: its plan, memory, disks and data, its ranks and first step."""

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from end_to_end.tiny import tiny_run
from ranks import ROOT, carrying, until

from refocused.bucket.folder import DirectoryBucket
from refocused.config.cadence import times_left
from refocused.config.load_run import load_run
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.doctor import run_fits
from refocused.doctor.examination import (
    RanksOutcome,
    judge_allreduce,
    judge_plan,
    judge_precision,
    judge_step,
    start_ranks,
)
from refocused.doctor.run_fits import host_shortage
from refocused.doctor.storage import NAMED_PROBLEMS, judge_data
from refocused.estimate.memory import checkpoint_bytes
from refocused.estimate.memory_plan import NativeDtype, choose, plan_host
from refocused.prepare.inspect_data import inspect_data
from refocused.system.hardware import FreeMemory, named_gpu

NO_BF16 = NativeDtype("fp32", "the processor has no bf16 instructions")
OFFLOADED = (
    *("zero.offload_optimizer=cpu", "zero.offload_parameters=cpu"),
    *("precision.dtype=bf16", "checkpoint.async=true"),
)


@pytest.mark.parametrize(
    ("dtype", "level", "words"),
    [
        ("auto", "ok", "fp32 (precision.dtype=auto): the processor has no bf16 instructions"),
        ("bf16", "warn", "bf16 is slow here: the processor has no bf16 instructions"),
        ("fp32", "ok", "fp32, set by the run"),
    ],
)
def test_the_precision_and_its_reason(dtype, level, words):
    precision = load_run("demo", [f"precision.dtype={dtype}"]).config.precision
    finding = judge_precision(precision, NO_BF16)
    assert finding.level == level
    assert finding.text.startswith(words)


def fast(*settings):
    return load_run("gpt2_1b_8xh100_fast", ["batch.micro_batch_size=4", *settings])


def planned(loaded, memory_bytes, *, gpu="", ranks=8):
    choice = choose(loaded, ranks=8, memory_bytes=memory_bytes)
    facts = named_gpu(gpu) if gpu else None
    return judge_plan(loaded, choice, ranks=ranks, memory_bytes=memory_bytes, gpu=facts)


def test_the_plan_of_a_step():
    loaded = fast()
    found = planned(loaded, 80e9, gpu="H100 SXM")
    assert re.search(r"; expected: 1\.\d+ s a step, [\d,]+ tokens/s, MFU 4\d%", found.text)
    found = planned(loaded, 80e9, gpu="H100 SXM", ranks=3)
    assert found.level == "fail" and "not a multiple" in found.text
    needed = choose(loaded, ranks=8, memory_bytes=80e9).memory.peak
    assert planned(loaded, 80e9).level == planned(loaded, None).level == "ok"
    assert "expected" not in planned(loaded, 80e9).text
    assert planned(loaded, needed * 1.02).level == "warn"
    finding = planned(loaded, needed * 0.9)
    assert finding.level == "fail"
    settings = str(finding.fix).removeprefix("It fits with: ").split()
    assert planned(fast(*settings), needed * 0.9).level != "fail"
    finding = planned(load_run("gpt2_1b_8xh100"), 80e9)
    assert finding.level == "warn" and "fit without the offload" in finding.text


def host(*settings, device, ranks=2):
    run = fast(*settings)
    choice = choose(run, ranks=ranks, memory_bytes=None)
    return plan_host(run, choice, ranks=ranks, ranks_here=ranks, device=device)


def test_the_host_holds_offloads_and_copies_of_all_its_ranks():
    bare = host("checkpoint.async=false", device="cuda", ranks=8)
    copied = host("checkpoint.async=true", device="cuda", ranks=8)
    offloaded = host("zero.offload_optimizer=cpu", device="cuda", ranks=8)
    parameters = 759_905_280 + 48 * 1536
    assert bare.building == 8 * 4 * parameters  # each rank builds the whole model
    assert (bare.tensors, bare.temporaries, bare.copies) == (0, 0, 0)
    assert copied.copies == 12 * parameters
    assert copied.total == bare.total  # no copy is made before the model is spread
    assert offloaded.tensors == 20 * parameters < offloaded.building
    assert bare.processes > 8 * 10**9
    memory, on_cpu = choose(fast(), ranks=2, memory_bytes=None).memory, host(device="cpu")
    assert on_cpu.tensors == 2 * memory.peak
    assert on_cpu.temporaries == 2 * (memory.peak - memory.states)


def shortage(*settings, left, ranks=2, device="cpu", gpu_bytes=None):
    return host_shortage(
        fast(*settings),
        ranks=ranks,
        ranks_here=ranks,
        device=device,
        gpu_bytes=gpu_bytes,
        memory=FreeMemory(total=int(left), available=int(left), swap_used=0),
    )


@pytest.mark.parametrize("left", [16e9, 20e9, 28e9, 36e9])
def test_settings_that_are_named_fit(left):
    """0.76 B with CPU offload on two CPU ranks, which a kernel killed in the first step."""
    total = host(*OFFLOADED, device="cpu").total
    assert shortage(*OFFLOADED, left=total) is None
    finding = shortage(*OFFLOADED, left=left)
    assert finding is not None and finding.level == "fail"
    assert f"{left / 1e9:.1f} GB of {left / 1e9:.1f} GB are free" in finding.text
    fix = str(finding.fix)
    if left < 20e9:
        assert fix.startswith("Use a machine with")
        return
    settings = fix.removeprefix("It fits with: ").split()
    ranks = 1 if "RANKS=1" in settings else 2
    settings = [one for one in settings if one != "RANKS=1"]
    assert shortage(*OFFLOADED, *settings, left=left, ranks=ranks) is None
    for part in {setting.partition("=")[0].partition("_")[0] for setting in settings}:
        fewer = [one for one in settings if not one.startswith(part)]  # each is needed
        assert shortage(*OFFLOADED, *fewer, left=left, ranks=ranks) is not None
    steps, before = (fast(*OFFLOADED, *more).config.batch for more in (settings, ()))
    if before.gradient_accumulation_steps is not None:
        assert isinstance(before.micro_batch_size, int) and isinstance(steps.micro_batch_size, int)
        assert steps.gradient_accumulation_steps is not None
        assert (
            steps.micro_batch_size * steps.gradient_accumulation_steps * ranks
            == before.micro_batch_size * before.gradient_accumulation_steps * 2
        )


@pytest.mark.parametrize(
    ("left", "gpu_bytes", "fix"),
    [
        (20e9, None, "It fits with: checkpoint.async=false"),
        (12e9, None, "Use a machine with"),  # an offload may be what makes it fit its GPUs
        (12e9, 80e9, "It fits with: checkpoint.async=false zero.offload_optimizer=none"),
        (12e9, 10e9, "Use a machine with"),
    ],
)
def test_gpus_that_are_not_known_yet_are_not_planned_for(left, gpu_bytes, fix):
    settings = ("zero.offload_optimizer=cpu", "checkpoint.async=true")
    found = shortage(*settings, left=left, device="cuda", gpu_bytes=gpu_bytes)
    assert found is not None and str(found.fix).startswith(fix)


def test_a_disk_has_room_for_all_that_comes_on_it(tmp_path, monkeypatch):
    settings = (f"run.directory={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    loaded = load_run(tiny_run(tmp_path), settings)
    choice = choose(loaded, ranks=2, memory_bytes=None)
    step = checkpoint_bytes(loaded.shape, loaded.config, stage=choice.zero.stage)

    def level(free, loaded=loaded):
        monkeypatch.setattr(run_fits, "free_bytes", lambda _: free)
        needs = run_fits.disk_needs(loaded, choice, ranks=2, tokens=10_000)
        (finding,) = run_fits.check_disks(needs)
        assert f"tiny, {tmp_path / 'cache'}: " in finding.text
        return finding.level

    saves = times_left(0, loaded.config.run.steps, loaded.config.checkpoint.interval)
    assert saves == 2 < loaded.config.checkpoint.keep + 3  # `run_cost` tests what exceeds that
    most = saves * step + 20_000
    assert [level(most), level(most - 1), level(2 * step - 1)] == ["ok", "warn", "fail"]
    for name in ("runs/tiny/checkpoints/checkpoint_step_10/a", "cache/set/shards/b"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(1000))
    (tmp_path / "cache/set/linked").hardlink_to(file)  # takes no room of its own
    assert [level(most - 2000), level(most - 2001)] == ["ok", "warn"]
    limited = load_run(loaded.file, (*settings, "data.disk_limit_gb=1e-5"))
    assert [level(most - 12_000, limited), level(most - 12_001, limited)] == ["ok", "warn"]


def looked_at(folder, *, vocabulary=512):
    data = load_run(folder / "tiny.yaml").config.data
    bucket = DirectoryBucket(folder / "tokens")
    report = inspect_data(bucket, data, 10_000, vocabulary, shows_text=False)
    return list(judge_data(report, vocabulary=vocabulary, setting="data.source")), report


def test_ids_and_problems_of_the_data(tmp_path):
    tiny_run(tmp_path)
    for vocabulary, level in ((512, "ok"), (50_257, "warn")):
        (finding,), report = looked_at(tmp_path, vocabulary=vocabulary)
        assert finding.level == level
    bad = dataclasses.replace(report, problems=tuple(f"file {n} is torn" for n in range(9)))
    findings = list(judge_data(bad, vocabulary=512, setting="data.source"))
    assert [one.level for one in findings] == ["fail"] * (NAMED_PROBLEMS + 1)
    assert "and 6 more problems" in findings[-1].text


def test_files_that_the_manifest_does_not_list_are_a_warning(tmp_path):
    data = load_run(tiny_run(tmp_path)).config.data
    bucket = DirectoryBucket(tmp_path / "tokens")
    write_manifest(bucket, build_manifest(bucket, data))
    file = next((tmp_path / "tokens").glob("*.npy"))
    for number in range(3):
        (tmp_path / "tokens" / f"new_{number}.npy").write_bytes(file.read_bytes())
    (finding,), report = looked_at(tmp_path)
    assert finding.level == "warn"
    assert f"3 of {report.files} token files are not used" in finding.text
    assert f"manifest {bucket.url} --update" in str(finding.fix)


STEP = {
    "step": 1,
    "untrained_loss": 10.8,
    "loss": 10.7,
    "tokens": 524_288,
    "seconds": 1.5,
    "start_seconds": 40.0,
    "micro_batch_size": 4,
    "zero_stage": 3,
    "compute": "sdpa, 24 blocks compiled",
    "planned_bytes": 20 * 10**9,
    "peak_bytes": 21 * 10**9,
    "gpu_bytes": 85 * 10**9,
}


def summed(bus_gb_per_second, *, is_right=True):
    facts = {"is_right": is_right, "payload_bytes": 2**28, "seconds": 1e-3}
    facts["bus_bytes_per_second"] = bus_gb_per_second * 1e9
    return RanksOutcome(8, {"allreduce": facts})


@pytest.mark.parametrize(
    ("outcome", "device", "nvlinks", "level", "words"),
    [
        (summed(370), "cuda", 18, "ok", "NCCL, 8 ranks: 370.00 GB/s bus bandwidth (256 MiB in"),
        (summed(90), "cuda", 18, "warn", "at least 180 are usual"),
        (summed(20), "cuda", 0, "ok", "20.00 GB/s"),
        (summed(0.5), "cuda", None, "warn", "at least 2 are usual"),
        (summed(0.1), "cpu", None, "ok", "gloo"),
        (summed(370, is_right=False), "cuda", 18, "fail", "returns wrong sums"),
        (
            RanksOutcome(8, {}, "allreduce", "no port"),
            "cuda",
            18,
            "fail",
            "cannot communicate over NCCL: no p",
        ),
        (RanksOutcome(1, {}, "step", "no data"), "cuda", 18, "ok", "not needed by a single rank"),
    ],
)
def test_allreduce(outcome, device, nvlinks, level, words):
    finding = judge_allreduce(outcome, device=device, nvlinks=nvlinks)
    assert finding.level == level
    assert words in finding.text


def test_step():
    finding = judge_step(RanksOutcome(8, {"step": STEP}))
    assert finding.level == "ok"
    assert "21.0 GB of 85.0 GB a GPU (planned 20.0 GB)" in finding.text
    without: dict[str, Any] = {**STEP, "peak_bytes": None, "gpu_bytes": None}
    assert "a GPU" not in judge_step(RanksOutcome(8, {"step": without})).text
    finished = judge_step(RanksOutcome(8, {"step": {}}))
    assert (finished.level, "the run is finished" in finished.text) == ("ok", True)
    failed = judge_step(RanksOutcome(8, {}, "step", "Out of GPU memory on rank 3"))
    assert (failed.level, failed.text) == ("fail", "failed: Out of GPU memory on rank 3")


@pytest.mark.slow
def test_why_real_ranks_do_not_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}.items():  # a batch script's
        monkeypatch.setenv(name, value)
    refused = start_ranks(["--config", "no_such_run"], ranks=2)
    assert (refused.doing, refused.results) == ("step", {})
    assert str(refused.failure).startswith("no file no_such_run.yaml. There are demo, ")
    tiny = ["--config", "tiny.yaml", "run.device=cpu"]
    broken = start_ranks([*tiny, "model.start_from=gone"], ranks=2)
    assert broken.doing == "step" and broken.results["allreduce"]["is_right"]
    text = "model.start_from = 'gone' is neither a folder with a config.json or a manifest.json, "
    assert broken.failure is not None and broken.failure.startswith(text)
    assert broken.failure.endswith("RUN[:STEP].")
    monkeypatch.setattr("refocused.doctor.examination.LONGEST_SECONDS", 0.3)
    late = start_ranks(tiny, ranks=2)
    assert late.failure is not None and late.failure.startswith("no result before the time-out")
    assert not list(tmp_path.glob("refocused*"))


@pytest.mark.slow
def test_the_ranks_end_with_the_doctor_that_started_them(tmp_path):
    tiny_run(tmp_path)
    doctor = subprocess.Popen(
        [sys.executable, ROOT / "launch" / "doctor.py", "--config", "tiny.yaml", "run.device=cpu"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )

    def left():
        return [one.pid for one in carrying("TMPDIR", str(tmp_path)) if one.pid != doctor.pid]

    until(lambda: len(left()) > 3)
    doctor.kill()
    doctor.communicate()
    until(lambda: not left())
