from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from end_to_end.tiny import tiny_run

from refocused.bucket.folder import DirectoryBucket
from refocused.config.load_run import LoadedRun, load_run
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.doctor.early import sources_of
from refocused.doctor.finding import Finding
from refocused.doctor.run_fits import (
    DiskNeed,
    disk_needs,
    host_shortage,
    judge_disk,
    judge_plan,
    judge_precision,
    needs_by_disk,
)
from refocused.doctor.storage import NAMED_PROBLEMS, judge_data
from refocused.estimate.flops import count_parameters
from refocused.estimate.memory import checkpoint_bytes
from refocused.estimate.memory_plan import Device, HostPlan, choose, plan_host
from refocused.estimate.precision import NativeDtype
from refocused.monitor.sampler.machine_readings import Memory
from refocused.prepare.inspect_data import DataReport, inspect_data
from refocused.system.hardware import named_gpu

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
        ("fp32", "ok", "fp32, as the run file says"),
    ],
)
def test_the_precision_and_its_reason(dtype: str, level: str, words: str) -> None:
    precision = load_run("demo", [f"precision.dtype={dtype}"]).config.precision
    finding = judge_precision(precision, NO_BF16)
    assert finding.level == level
    assert finding.text.startswith(words)


def fast(*settings: str) -> LoadedRun:
    return load_run("gpt2_1b_8xh100_fast", ["batch.micro=4", *settings])


def planned(
    loaded: LoadedRun, memory_bytes: float | None, *, gpu: str = "", ranks: int = 8
) -> Finding:
    choice = choose(loaded, ranks=8, memory_bytes=memory_bytes)
    facts = named_gpu(gpu) if gpu else None
    return judge_plan(loaded, choice, ranks=ranks, memory_bytes=memory_bytes, gpu=facts)


def test_the_plan_of_a_step() -> None:
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
    assert finding.level == "warn" and "the offload is not needed" in finding.text


def host(*settings: str, device: Device, ranks: int = 2) -> HostPlan:
    run = fast(*settings)
    choice = choose(run, ranks=ranks, memory_bytes=None)
    return plan_host(run, choice, ranks=ranks, ranks_here=ranks, device=device)


def test_the_host_holds_offloads_and_copies_of_all_its_ranks() -> None:
    bare = host("checkpoint.async=false", device="cuda", ranks=8)
    copied = host("checkpoint.async=true", device="cuda", ranks=8)
    offloaded = host("zero.offload_optimizer=cpu", device="cuda", ranks=8)
    parameters = 759_905_280 + 48 * 1536
    assert bare.building == 8 * 4 * parameters  # each rank builds the whole model
    assert (bare.tensors, bare.copies, copied.copies) == (0, 0, 12 * parameters)
    assert copied.total == bare.total  # no copy is made before the model is spread
    assert host("zero.offload_optimizer=cpu", device="cuda").tensors == 20 * parameters
    assert offloaded.tensors == 20 * parameters < offloaded.building
    assert bare.processes > 8 * 10**9


def test_a_cpu_computes_in_the_hosts_memory() -> None:
    memory = choose(fast(), ranks=2, memory_bytes=None).memory
    assert host(device="cpu").tensors == 2 * memory.peak
    assert host(device="cpu").temporaries == 2 * (memory.peak - memory.states)
    assert host(device="cuda").temporaries == 0
    assert host("zero.offload_optimizer=cpu", device="cpu").tensors > 20 * 759_905_280


def shortage(
    *settings: str,
    left: float,
    ranks: int = 2,
    device: Device = "cpu",
    gpu_bytes: float | None = None,
) -> Finding | None:
    return host_shortage(
        fast(*settings),
        ranks=ranks,
        ranks_here=ranks,
        device=device,
        gpu_bytes=gpu_bytes,
        memory=Memory(total=int(left), available=int(left), swap_used=0),
    )


@pytest.mark.parametrize("left", [16e9, 20e9, 24e9, 28e9, 32e9, 36e9])
def test_settings_that_are_named_fit(left: float) -> None:
    """0.76 B with CPU offload on two CPU ranks, which a kernel killed in the first step."""
    finding = shortage(*OFFLOADED, left=left)
    assert finding is not None and finding.level == "fail"
    assert f"{left / 1e9:.1f} GB of {left / 1e9:.1f} GB are left" in finding.text
    fix = str(finding.fix)
    if left < 20e9:
        assert fix.startswith("Take a machine with")
        return
    settings = fix.removeprefix("It fits with: ").split()
    ranks = 1 if "RANKS=1" in settings else 2
    settings = [one for one in settings if one != "RANKS=1"]
    assert shortage(*OFFLOADED, *settings, left=left, ranks=ranks) is None
    for part in {setting.partition("=")[0].partition("_")[0] for setting in settings}:
        fewer = [one for one in settings if not one.startswith(part)]  # each is needed
        assert shortage(*OFFLOADED, *fewer, left=left, ranks=ranks) is not None
    steps, before = (fast(*OFFLOADED, *more).config.batch for more in (settings, ()))
    if before.accumulation is not None:
        assert isinstance(before.micro, int) and isinstance(steps.micro, int)
        assert steps.accumulation is not None
        assert steps.micro * steps.accumulation * ranks == before.micro * before.accumulation * 2


def test_a_run_that_fits_to_the_byte_is_not_refused() -> None:
    total = host(device="cpu").total
    assert shortage(left=total) is None
    assert shortage(left=total - 1) is not None


@pytest.mark.parametrize(
    ("left", "gpu_bytes", "fix"),
    [
        (20e9, None, "It fits with: checkpoint.async=false"),
        (12e9, None, "Take a machine with"),  # an offload may be what makes it fit its GPUs
        (12e9, 80e9, "It fits with: checkpoint.async=false zero.offload_optimizer=none"),
        (12e9, 10e9, "Take a machine with"),
    ],
)
def test_gpus_that_are_not_known_yet_are_not_planned_for(
    left: float, gpu_bytes: float | None, fix: str
) -> None:
    settings = ("zero.offload_optimizer=cpu", "checkpoint.async=true")
    found = shortage(*settings, left=left, device="cuda", gpu_bytes=gpu_bytes)
    assert found is not None and str(found.fix).startswith(fix)


def test_what_lies_there_already_needs_no_room(tmp_path: Path) -> None:
    settings = (f"run.directory={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    loaded = load_run(tiny_run(tmp_path), settings)
    choice = choose(loaded, ranks=2, memory_bytes=None)
    parameters = count_parameters(loaded.shape, vocabulary_multiple=128).allocated
    step = checkpoint_bytes(parameters, stage=choice.zero.stage, dtype="fp32")

    def wanted(loaded: LoadedRun = loaded) -> list[int]:
        return [n.wanted_bytes for n in disk_needs(loaded, choice, ranks=2, tokens=10_000)]

    # Two saves in 20 steps and one at the end; the best, an interruption, the one being written.
    assert wanted() == [6 * step, 20_000]
    for name in ("runs/tiny/checkpoints/checkpoint_step_10/a", "cache/set/shards/b"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(1000))
    (tmp_path / "cache/set/linked").hardlink_to(file)  # takes no room of its own
    assert wanted() == [6 * step - 1000, 19_000]
    limited = load_run(loaded.file, (*settings, "data.disk_limit_gb=1e-5"))
    assert wanted(limited) == [6 * step - 1000, 9_000]


@pytest.mark.parametrize(
    ("free", "level"), [(9 * 10**9, "fail"), (20 * 10**9, "warn"), (31 * 10**9, "ok")]
)
def test_needs_of_one_disk_count_together(free: int, level: str) -> None:
    needs = (
        DiskNeed("of checkpoints", Path("runs/a"), wanted_bytes=20 * 10**9, least_bytes=10**10),
        DiskNeed("of shards", Path("cache"), wanted_bytes=10 * 10**9, least_bytes=0),
    )
    finding = judge_disk(needs, free=free)
    assert finding.level == level
    assert needs_by_disk(needs) == [list(needs)]
    assert "for runs/a, cache: 20.0 GB of checkpoints, 10.0 GB of shards" in finding.text


def looked_at(folder: Path, *, vocabulary: int = 512) -> tuple[list[Finding], DataReport]:
    data = load_run(folder / "tiny.yaml").config.data
    bucket = DirectoryBucket(folder / "tokens")
    report = inspect_data(bucket, data, sample_tokens=10_000, vocabulary=vocabulary)
    return list(judge_data(report, vocabulary=vocabulary, setting="data.source")), report


def test_ids_and_problems_of_the_data(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    for vocabulary, level in ((512, "ok"), (50_257, "warn")):
        (finding,), report = looked_at(tmp_path, vocabulary=vocabulary)
        assert finding.level == level
    bad = dataclasses.replace(report, problems=tuple(f"file {n} is torn" for n in range(9)))
    findings = list(judge_data(bad, vocabulary=512, setting="data.source"))
    assert [one.level for one in findings] == ["fail"] * (NAMED_PROBLEMS + 1)
    assert "and 6 more problems" in findings[-1].text


def test_files_that_the_manifest_does_not_list_are_a_warning(tmp_path: Path) -> None:
    data = load_run(tiny_run(tmp_path)).config.data
    bucket = DirectoryBucket(tmp_path / "tokens")
    write_manifest(bucket, build_manifest(bucket, data, cache_file=None))
    file = next((tmp_path / "tokens").glob("*.npy"))
    for number in range(3):
        (tmp_path / "tokens" / f"new_{number}.npy").write_bytes(file.read_bytes())
    (finding,), report = looked_at(tmp_path)
    assert finding.level == "warn"
    assert f"3 of {report.files} token files are not used" in finding.text
    assert f"manifest {bucket.url} --update" in str(finding.fix)


def test_sources_of_a_mixture(tmp_path: Path) -> None:
    file = tiny_run(tmp_path)
    mixture = "mixture: {a: {source: x, weight: 1}},"
    file.write_text(file.read_text().replace("source: tokens,", mixture))
    sources = sources_of(load_run(file).config.data)
    assert {key: one.source for key, one in sources.items()} == {"data.mixture.a": "x"}
