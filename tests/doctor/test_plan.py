import dataclasses
import re
from pathlib import Path

import pytest
from end_to_end.tiny import tiny_run

from refocused.bucket.folder import DirectoryBucket
from refocused.config.cadence import times_left
from refocused.config.load_run import LoadedRun, load_run
from refocused.data.manifest.shard_manifest import build_manifest, write_manifest
from refocused.doctor import run_fits
from refocused.doctor.examination import judge_plan, judge_precision
from refocused.doctor.finding import Finding
from refocused.doctor.run_fits import host_shortage
from refocused.doctor.storage import NAMED_PROBLEMS, judge_data
from refocused.estimate.memory import checkpoint_bytes
from refocused.estimate.memory_plan import Device, HostPlan, NativeDtype, choose, plan_host
from refocused.monitor.sampler.machine_readings import FreeMemory
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
        ("fp32", "ok", "fp32, set by the run"),
    ],
)
def test_the_precision_and_its_reason(dtype: str, level: str, words: str) -> None:
    precision = load_run("demo", [f"precision.dtype={dtype}"]).config.precision
    finding = judge_precision(precision, NO_BF16)
    assert finding.level == level
    assert finding.text.startswith(words)


def fast(*settings: str) -> LoadedRun:
    return load_run("gpt2_1b_8xh100_fast", ["batch.micro_batch_size=4", *settings])


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
    assert finding.level == "warn" and "fit without the offload" in finding.text


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
    assert (bare.tensors, bare.temporaries, bare.copies) == (0, 0, 0)
    assert copied.copies == 12 * parameters
    assert copied.total == bare.total  # no copy is made before the model is spread
    assert offloaded.tensors == 20 * parameters < offloaded.building
    assert bare.processes > 8 * 10**9
    memory, on_cpu = choose(fast(), ranks=2, memory_bytes=None).memory, host(device="cpu")
    assert on_cpu.tensors == 2 * memory.peak
    assert on_cpu.temporaries == 2 * (memory.peak - memory.states)


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
        memory=FreeMemory(total=int(left), available=int(left), swap_used=0),
    )


@pytest.mark.parametrize("left", [16e9, 20e9, 28e9, 36e9])
def test_settings_that_are_named_fit(left: float) -> None:
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
def test_gpus_that_are_not_known_yet_are_not_planned_for(
    left: float, gpu_bytes: float | None, fix: str
) -> None:
    settings = ("zero.offload_optimizer=cpu", "checkpoint.async=true")
    found = shortage(*settings, left=left, device="cuda", gpu_bytes=gpu_bytes)
    assert found is not None and str(found.fix).startswith(fix)


def test_a_disk_has_room_for_all_that_comes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"run.directory={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    loaded = load_run(tiny_run(tmp_path), settings)
    choice = choose(loaded, ranks=2, memory_bytes=None)
    step = checkpoint_bytes(loaded.shape, loaded.config, stage=choice.zero.stage)

    def level(free: int, loaded: LoadedRun = loaded) -> str:
        monkeypatch.setattr(run_fits, "free_bytes", lambda _: free)
        (finding,) = run_fits.check_disks(loaded, choice, ranks=2, tokens=10_000)
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


def looked_at(folder: Path, *, vocabulary: int = 512) -> tuple[list[Finding], DataReport]:
    data = load_run(folder / "tiny.yaml").config.data
    bucket = DirectoryBucket(folder / "tokens")
    report = inspect_data(bucket, data, 10_000, vocabulary, shows_text=False)
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
    write_manifest(bucket, build_manifest(bucket, data))
    file = next((tmp_path / "tokens").glob("*.npy"))
    for number in range(3):
        (tmp_path / "tokens" / f"new_{number}.npy").write_bytes(file.read_bytes())
    (finding,), report = looked_at(tmp_path)
    assert finding.level == "warn"
    assert f"3 of {report.files} token files are not used" in finding.text
    assert f"manifest {bucket.url} --update" in str(finding.fix)
