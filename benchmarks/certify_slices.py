"""The slices of a GPU's certificate; `certify_gpu.py` starts each in processes of its own."""

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import kernel_forms
import torch
from certify_report import RESULT
from kernel_forms import timed_ms
from measuring import ROOT, Record, lines_of, machine
from step_contenders import Clock, Setup, Step, bare_deepspeed, bare_torch, ours, trainer
from torch._C._autograd import DeviceType

from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import LoadedRun, load_run
from refocused.config.model_shape import shape_from
from refocused.estimate.flops import flops_per_token, mfu_fraction
from refocused.estimate.memory import plan_memory
from refocused.estimate.step_time import expected_step
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.run_time import PERFORMANCE_FILE
from refocused.monitor.sampler.gpu_reader import GpuReader
from refocused.system.hardware import gpu_spec
from refocused.system.world import World, join_world
from refocused.train.step.profile import idle_share

WARM_STEPS, FIRST_STEPS, LEAST_ROUNDS, MOST_ROUNDS = 3, 4, 2, 30
ROUNDS_SECONDS = 5.0  # of each contender, when they take turns
LOOK_SECONDS = 15.0  # kept for counting waits and for a profile
MEMORY_GIB = 79  # of the GPU that micro-batches are meant for
SMALL = {  # sizes of a tiny model
    **{"vocab_size": 512, "n_positions": 64, "max_position_embeddings": 64, "chunk_size": 8},
    **{"n_embd": 64, "hidden_size": 64, "n_layer": 2, "num_hidden_layers": 2, "n_inner": 192},
    **{"intermediate_size": 192, "n_head": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_eigenstates": 8, "num_resonators": 8},
}
# [M, K] by [K, N]: square, MLPs of 0.76 B and 124 M, the head of 0.76 B
PRODUCTS = ((8192,) * 3, (16384, 6144, 1536), (16384, 3072, 768), (2048, 50304, 1536))
KINDS_OF_KERNELS = {  # by the first pattern that a kernel's name has
    **{"copies": "Memcpy|Memset", "NCCL": "nccl", "attention": "flash|fmha|attn|attention|sdpa"},
    **{"products": "gemm|cutlass|nvjet|wgrad|dgrad|xmma", "compiled elementwise": "triton_"},
    **{"optimizer": "multi_tensor|adam|foreach", "other": ""},
}


OURS = "ours"  # with the settings that a run takes by itself; otherwise `ours, SETTING`
COMPILE_OFF, RECOMPUTED = "ours, model.compile=off", "ours, model.activation_checkpointing=true"
OFFLOADED = "ours, zero.offload_optimizer=cpu"
IN_8_BITS = ("ours, precision.fp8=tensorwise", "ours, precision.fp8=rowwise")
NANOGPT, TORCH, DEEPSPEED = "nanoGPT's loop", "torch loop", "DeepSpeed's loop"


class Here:
    """This rank of a slice: its time, its device, and where its results go."""

    def __init__(self, *, seconds: float, tiny: bool) -> None:
        """Begin a slice of so many seconds."""
        self.tiny, self.on_gpu = tiny, torch.cuda.is_available()
        place = f"cuda:{os.environ['LOCAL_RANK']}" if self.on_gpu else "cpu"
        self.device, self._ends = torch.device(place), time.monotonic() + seconds

    @functools.cached_property
    def world(self) -> World:
        """All ranks of the slice, which join when this is first read."""
        return join_world(self.device.type)

    def left(self) -> float:
        """Return the seconds that are left, the same on all ranks. Collective."""
        left = self._ends - time.monotonic()
        return left if os.environ["WORLD_SIZE"] == "1" else self.world.broadcast(left)

    def tell(self, what: str, **facts: Any) -> None:
        """Print a result on rank 0; `certify_gpu.py` keeps it at once."""
        if os.environ["RANK"] == "0":
            print(RESULT + json.dumps({"what": what, **facts}, default=str), flush=True)

    @contextlib.contextmanager
    def guarded(self, what: str, **facts: Any) -> Iterator[None]:
        """Report a failure with the end of its traceback; the slice goes on."""
        try:
            yield
        except Exception as error:
            said, trace = f"{type(error).__name__}: {error}"[:600], traceback.format_exc()
            print(trace, flush=True)
            self.tell(what, **facts, error=said, trace=trace.splitlines()[-12:])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, and the contenders that make its steps."""

    model: str  # a shape in `config/models`
    length: int  # tokens of a sequence
    micro_batch_size: int  # sequences of a pass on a GPU of `MEMORY_GIB`
    gradient_accumulation_steps: int
    contenders: Sequence[str] = (OURS,)

    def plan(self, here: Here) -> BatchPlan:
        """Return the batch: the same tokens in smaller micro-batches on smaller GPUs."""
        if here.tiny:
            return BatchPlan(2, 2, here.world.world_size, 32)
        micro_batch_size, gib = (
            self.micro_batch_size,
            torch.cuda.get_device_properties(0).total_memory / 2**30,
        )
        while (
            micro_batch_size > 1
            and gib < 0.9 * MEMORY_GIB * micro_batch_size / self.micro_batch_size
        ):
            micro_batch_size //= 2
        micro_batches = self.gradient_accumulation_steps * self.micro_batch_size // micro_batch_size
        return BatchPlan(micro_batch_size, micro_batches, here.world.world_size, self.length)

    def run(self, contender: str, here: Here) -> LoadedRun:
        """Return the settings of a contender, in the size of this machine."""
        settings = [f"model.preset={self.model}", "precision.dtype=bf16", "zero.stage=1"]
        settings += [f"model.head_chunk_tokens={64 if here.tiny else 2048}"]
        run = load_run("gpt2_124m", [*settings, *contender.split(", ")[1:]])
        length = {"sequence_length": self.plan(here).sequence_length}  # of any preset
        config = run.config.model_copy(update={"model": run.config.model.model_copy(update=length)})
        shape = run.shape
        if here.tiny:
            small = {name: SMALL.get(name, value) for name, value in shape.settings.items()}
            shape = shape_from(small, where=self.model)
        return dataclasses.replace(run, config=config, shape=shape)


def machine_facts(here: Here) -> None:
    """Tell versions, what the driver says, and what the device reaches at most."""
    packages = {one.name: one.version for one in importlib.metadata.distributions()}
    names = ("torch", "triton", "deepspeed", "transformers", "accelerate", "numpy")
    versions: Record = {name: packages.get(name) for name in names}
    versions["date"] = datetime.datetime.now(datetime.UTC).date()
    of_torch = re.compile("ALLOC_CONF|INDUCTOR|TRITON|CUDA|NCCL|OMP|^DS_")
    versions["environment"] = {k: v for k, v in os.environ.items() if of_torch.search(k)}
    here.tell("machine", **machine(), **versions, cuda=torch.version.cuda)
    if not here.on_gpu:
        return
    with here.guarded("nvml"):
        here.tell("nvml", samples=list(map(str, GpuReader(host="here", ranks=1).samples())))
    name, (free, total) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    here.tell("device", name=name, facts=gpu_spec(name), gib=total / 2**30, free=free / 2**30)
    with here.guarded("products and copies"):
        for m, n, k in PRODUCTS if not here.tiny else ():
            draw = functools.partial(torch.randn, device=here.device, dtype=torch.bfloat16)
            ms = timed_ms(functools.partial(torch.mm, draw(m, k), draw(k, n)), here.device)
            here.tell("product", shape=(m, n, k), tflops=2 * m * n * k / ms / 1e9)
        size = 2**20 if here.tiny else 2**30
        left, right = (torch.empty(size, dtype=torch.uint8, device=here.device) for _ in range(2))
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for name, to, source in (("on", left, right), ("to", left, pinned), ("from", pinned, left)):
            ms = timed_ms(functools.partial(to.copy_, source, non_blocking=True), here.device)
            here.tell(f"copy {name} the GPU", gb_per_second=size / ms / 1e6)


def run_command(command: Sequence[str], here: Here, *, folder: Path, what: str) -> list[str]:
    """Run a command as one types it, and tell how it ended; return its output, also in the log."""
    began, names = time.monotonic(), re.compile("RANK|WORLD_SIZE|MASTER_")
    alone = {name: value for name, value in os.environ.items() if not names.search(name)}
    given: Record = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=alone, **given) as run:
        timer = threading.Timer(max(1, here.left() - 3), run.kill)
        timer.start()
        for line in run.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.strip())
        timer.cancel()
    code = run.returncode
    failed = {"error": f"exit code {code}", "trace": lines[-40:]} if code else {}
    here.tell(what, seconds=round(time.monotonic() - began, 1), last=lines[-1:], **failed)
    return lines


@contextlib.contextmanager
def demonstration(here: Here, *more: str) -> Iterator[tuple[Path, Callable[..., None]]]:
    """Give the folder of a run of `demo`, and what runs a command on it."""
    settings = ["--config=demo", "--run=first", "schedule.kind=constant", "schedule.warmup_steps=2"]
    settings += ["log.interval=1", "checkpoint.interval=10", "evaluation.interval=10", *more]
    settings += ["evaluation.sequences=16", *(["model.sequence_length=64"] if here.tiny else [])]

    def run(command: str, *arguments: str) -> None:
        if command in ("train", "doctor"):
            arguments = (*settings, *arguments)
        if command == "train" and torch.cuda.device_count() > 1:
            command = "launch"  # on all of them
        what = " ".join((command, *(one for one in arguments if one not in settings)))
        run_command(["refocused", command, *arguments], here, folder=Path(folder), what=what)

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "runs" / "first", run


def train(here: Here) -> None:
    """Train the demonstration, resume, validate, save; verify, export, generate, examine."""
    with demonstration(here) as (folder, run):
        run("train", "run.steps=10")
        run("train", "run.steps=20")
        steps_taken = [row for row in lines_of(folder / METRICS_FILE) if row["kind"] == "step"]
        saves = [
            row for row in lines_of(folder / PERFORMANCE_FILE) if row.get("save_write_seconds")
        ]
        here.tell("last step and save", step=steps_taken[-1], save=saves[-1:])
        of_run = (f"--run={folder}", "--local")
        run("checkpoints", "verify", "all", "--deep", *of_run)
        run("checkpoints", "export", "latest", "model", *of_run)
        run("generate", "latest", "def ", "--tokens=20", *of_run)
        run("doctor")


def exact(here: Here) -> None:
    """Compare a deterministic run with the same in two sessions, to the last bit."""
    sizes = () if here.tiny else ("model.preset=gpt2_124m", "model.sequence_length=1024")
    losses, files = [], []
    for sessions in ((20,), (10, 20)):
        with demonstration(here, "run.deterministic=true", *sizes) as (folder, run):
            for steps in sessions:
                run("train", f"run.steps={steps}")
            rows = lines_of(folder / METRICS_FILE)
            losses.append({row["step"]: row["loss"] for row in rows if row["kind"] == "step"})
            (manifest,) = folder.glob("checkpoints/checkpoint_step_*20/manifest.json")
            listed = json.loads(manifest.read_text())["files"]
            files.append({file: of["crc32c"] for file, of in listed.items() if ".pt" in file})
    same = {"losses": losses[0] == losses[1] != {}, "checkpoint": files[0] == files[1] != {}}
    failed = {} if all(same.values()) else {"error": "the resumed run differs", "losses": losses}
    here.tell("equal to the last bit after a resume", **same | failed)


def tests(here: Here) -> None:
    """Run the tests marked gpu: the files that have some, so that other packages may be missing."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    marked = [str(file) for file in files if "mark.gpu" in file.read_text()]
    command = ["pytest", "-m", "gpu", "-rfEs", "--tb=short", *marked]
    lines = run_command(command, here, folder=ROOT, what="tests marked gpu")
    listed = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    here.tell("tests that failed or were skipped", listed=listed)


def compare(here: Here, case: Case) -> None:
    """Measure steps of contenders, first each alone, then in turns; look closely at ours."""
    plan, world, clock = case.plan(here), here.world, Clock(here.device)
    title = f"{case.model}, {plan.text}"
    steps: dict[str, Step] = {}
    facts: dict[str, Record] = {}
    for name in case.contenders:
        place: Record = {"case": title, "form": name}
        if name in (NANOGPT, TORCH) and world.world_size > 1:
            here.tell("step", **place, left_out="only on one GPU, as CUDA_VISIBLE_DEVICES=0")
        elif "rowwise" in name and not here.on_gpu and torch.__version__.startswith("2.11"):
            here.tell("step", **place, left_out="torch 2.11 has no such products on a CPU")
        elif here.left() < 1.5 * LOOK_SECONDS:
            here.tell("step", **place, left_out="no time was left")
        else:
            with here.guarded("step", **place):
                began, said, run, before = time.monotonic(), list[str](), case.run(name, here), 0
                if here.on_gpu:
                    gc.collect()  # what compiling leaves in cycles would be freed during this one
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                step = _step_of(name, _setup(run, plan), here, said, run=run)
                for _ in range(WARM_STEPS):
                    step()
                known = {**place, "default": name == OURS, "computed": "; ".join(said)}
                known["ready_seconds"] = time.monotonic() - began
                first = [clock.timed_ms(step) for _ in range(FIRST_STEPS)]
                if here.on_gpu:
                    known["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
                if name.startswith(OURS):
                    known |= {"instead": name.partition(", ")[2], **_expected(run, plan, here)}
                here.tell("step", **known, **_speed(first, run, plan, world))
                steps[name], facts[name] = step, known
    times: dict[str, list[float]] = {name: [] for name in steps}
    ends = time.monotonic() + min(ROUNDS_SECONDS * len(steps), here.left() - LOOK_SECONDS)
    for number in range(LEAST_ROUNDS if here.tiny else MOST_ROUNDS):
        if number >= LEAST_ROUNDS and world.broadcast(time.monotonic() > ends):
            break
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(clock.timed_ms(steps[name]))
    for name, of_rounds in times.items():
        here.tell("step", **facts[name], **_speed(of_rounds, case.run(OURS, here), plan, world))
    for name, step in steps.items():
        for what, look in (("waits", host_waits), ("profile", profile)):
            if here.on_gpu and name.startswith(OURS) and here.left() > LOOK_SECONDS / 2:
                with here.guarded(what, case=title, form=name):
                    here.tell(what, case=title, form=name, **look(step))


def _setup(run: LoadedRun, plan: BatchPlan) -> Setup:
    return Setup(
        layers=run.shape.layers,
        width=run.shape.width,
        vocabulary=run.shape.padded_vocabulary(128),
        length=plan.sequence_length,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        given=run.shape.settings,
        precision=run.config.precision,
        checkpointing=run.config.model.activation_checkpointing,
        offload="cpu" if run.config.zero.offload_optimizer == "cpu" else "none",
        chunk_tokens=run.config.model.head_chunk_tokens,
    )


def _step_of(name: str, setup: Setup, here: Here, said: list[str], *, run: LoadedRun) -> Step:
    if name in (NANOGPT, TORCH):  # compiling 24 blocks as a whole takes minutes
        compiled: Literal["whole", "blocks"] = "whole" if name == NANOGPT else "blocks"
        how = compiled if here.on_gpu else "no"
        return bare_torch(setup, compiled=how, all_logits=True, device=here.device)
    if name == DEEPSPEED:
        return bare_deepspeed(setup, 1, here.world)
    choice, stage = run.config.model.compile if here.on_gpu else "off", run.config.zero.stage
    assert stage != "auto"
    return ours(setup, stage, here.world, compiled=choice, told=said)


def _speed(times: Sequence[float], run: LoadedRun, plan: BatchPlan, world: World) -> Record:
    ms, gpu = statistics.median(times), gpu_spec(world.device_name)
    speed = plan.tokens / ms * 1000
    mfu = mfu_fraction(
        speed,
        flops_per_token=flops_per_token(run.shape, sequence_length=plan.sequence_length),
        gpus=world.world_size,
        peak_flops=gpu.bf16_flops if gpu else None,
    )
    return {"ms": ms, "tokens_per_second": speed, "mfu": mfu, "steps": len(times)}


def _expected(run: LoadedRun, plan: BatchPlan, here: Here) -> Record:
    """Return what our step should take of memory, and of time on a GPU that is known."""
    gpu = gpu_spec(here.world.device_name)
    zero: Any = run.config.zero  # without `auto`
    memory = plan_memory(
        run, micro_batch_size=plan.micro_batch_size, zero=zero, ranks=plan.world_size
    )
    step = None if gpu is None else expected_step(run, plan=plan, zero=zero, gpu=gpu)
    return {"plan_gib": memory.peak / 2**30, "expected_mfu": step and step.mfu_fraction}


def host_waits(step: Step, *, count: int = 3) -> Record:
    """Count where the host waits for the device, and how far ahead of it the host is."""
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = traceback.extract_stack()[-6:-2]  # without those of `warnings`
            names = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames]
            places[" < ".join(reversed(names))] += 1

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(count):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    shares = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        shares.append(queued / (time.perf_counter() - began))
    listed = {place: times / count for place, times in places.most_common(10)}
    return {"waits": places.total() / count, "places": listed, "host_share": min(shares)}


def profile(step: Step, *, count: int = 2) -> Record:
    """Trace steps: the idle share, what the kernels' time goes to, the largest of them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as tracer:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    kinds, kernels = dict.fromkeys(KINDS_OF_KERNELS, 0.0), {}
    for event in sorted(tracer.key_averages(), key=lambda one: -one.self_device_time_total):
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            ms = kernels[event.key[:90]] = event.self_device_time_total / 1000 / count
            kinds[next(k for k, p in KINDS_OF_KERNELS.items() if re.search(p, event.key))] += ms
    largest = dict(itertools.islice(kernels.items(), 12))
    return {"idle": idle_share(tracer, seconds), "kinds_ms": kinds, "kernels_ms": largest}


def against_trainer(here: Here, case: Case) -> None:
    """Let transformers' Trainer make steps; after each, ours makes one."""
    if importlib.util.find_spec("accelerate") is None:
        here.tell("step", form="Trainer", left_out="accelerate is not installed")
        return
    plan, run, clock = case.plan(here), case.run(OURS, here), Clock(here.device)
    title, setup = f"{case.model}, {plan.micro_batch_size} sequences, in turns", _setup(run, plan)
    step = _step_of(OURS, setup, here, [], run=run)
    rounds: list[tuple[float, float]] = []
    for name, compiled in (("Trainer, compiled", True), ("Trainer", False)):
        rounds.clear()
        with here.guarded("step", case=title, form=name), tempfile.TemporaryDirectory() as folder:
            trainer(
                setup,
                1,
                steps=WARM_STEPS + (LEAST_ROUNDS if here.tiny else MOST_ROUNDS // 2),
                folder=Path(folder),
                clock=Clock(here.device),
                after_step=lambda ms: rounds.append((ms, clock.timed_ms(step))),
                compiled=compiled and here.on_gpu,
            )
            forms = (name, f"ours, beside the {name}")
            for form, times in zip(forms, zip(*rounds[WARM_STEPS:], strict=True), strict=True):
                here.tell("step", case=title, form=form, **_speed(times, run, plan, here.world))


STEPS: Mapping[str, Sequence[Case]] = {
    # nanoGPT's loop last: it is compiled as a whole, up to a minute.
    "124M": [Case("gpt2_124m", 1024, 32, 2, (OURS, DEEPSPEED, COMPILE_OFF, NANOGPT))],
    "waits": [
        Case("gpt2_124m", 1024, 32, 1, (OURS, "ours, zero.stage=2", "ours, zero.stage=3")),
        Case("llama_121m", 1024, 16, 1, ("ours, zero.stage=3",)),  # many graphs in torch 2.11?
    ],
    "0.76B": [Case("gpt2_1b", 2048, 4, 4, (OURS, TORCH, DEEPSPEED, COMPILE_OFF))],
    "memory-1.41B": [Case("neox_1_2b", 2048, 4, 4)],
    "memory-recomputed": [Case("gpt2_1b", 2048, 16, 2, (OURS, RECOMPUTED))],
    "memory-offloaded": [Case("gpt2_124m", 1024, 16, 2, (OURS, OFFLOADED))],
    "profile": [Case("gpt2_1b", 2048, 8, 4, (OURS, "ours, zero.stage=3"))],
    "fp8": [Case("gpt2_1b", 2048, 4, 4, (OURS, *IN_8_BITS))],
    "long-ten": [Case("ten_small_32k", 32768, 1, 1)],
    "long-resonance": [Case("resonance_small", 32768, 1, 1)],
    "long-llama": [Case("llama_121m", 32768, 1, 1)],
}
OTHERS: Mapping[str, Callable[[Here], None]] = {
    "machine": machine_facts,
    "train": train,
    "exact": exact,
    "tests": tests,
    "kernels": lambda here: kernel_forms.measure(here.device, tiny=here.tiny, tell=here.tell),
    "trainer": lambda here: against_trainer(here, STEPS["124M"][0]),
}


def run_slice(name: str, *, seconds: float, tiny: bool) -> None:
    """Run a slice in this process, one of its ranks."""
    here = Here(seconds=seconds, tiny=tiny)
    if name in OTHERS:
        with here.guarded(name):
            OTHERS[name](here)
    for case in STEPS.get(name, ()):
        with here.guarded(case.model):
            compare(here, case)
        gc.collect()  # the next case has the memory to itself
