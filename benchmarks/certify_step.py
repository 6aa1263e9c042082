"""Measure the steps of one contender, or the links between GPUs, for a certificate."""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from measuring import Record
from step_contenders import Clock, Setup, bare_deepspeed, bare_torch, ours, trainer

from refocused.config import shipped_files
from refocused.config.batch_plan import BatchPlan
from refocused.config.load_run import load_run
from refocused.config.model_shape import ModelShape, load_shape
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import flops_per_token, mfu_fraction
from refocused.estimate.memory import plan_memory
from refocused.estimate.step_time import StepTime, expected_step
from refocused.system.hardware import GpuFacts, gpu_facts
from refocused.system.world import World
from refocused.train.step.profile import idle_share

WARM_STEPS, STEPS, PROFILED_STEPS = 3, 7, 2
STEP_TOKENS = 2**17  # of one rank and step, as in a run: passes of 16 windows of 2,048 are four
PRODUCT_SIDE = 8192


@dataclasses.dataclass(frozen=True)
class Contest:
    """A contender and its settings."""

    who: Literal["ours", "torch", "deepspeed", "trainer"] = "ours"
    stage: Literal[0, 1, 2, 3] = 1
    compiled: bool = True
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    recomputes: bool = False
    offload: Literal["none", "cpu"] = "none"


def measured_step(
    contest: Contest, model: str, *, length: int, micro: int, world: World, tiny: bool
) -> Record:
    """Measure a contender's steps in this process, one of the ranks."""
    shape = load_shape(shipped_files() / "models" / f"{model}.json")
    accumulation = 2 if tiny else max(1, STEP_TOKENS // (micro * length))
    setup = Setup(
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.padded_vocabulary(128),
        length=length,
        micro=micro,
        accumulation=accumulation,
        given=shape.settings,
        precision=PrecisionConfig(dtype="fp32" if tiny else "bf16", fp8=contest.fp8),
        checkpointing=contest.recomputes,
        offload=contest.offload,
        chunk_tokens=64 if tiny else 2048,
    )
    products = product_flops(world, side=256 if tiny else PRODUCT_SIDE)
    told: list[str] = []
    times, idle = step_times(setup, contest, world, told=told)
    step_ms, on_gpu = statistics.median(times), world.device_kind == "cuda"
    tokens = micro * length * accumulation * world.world_size
    speed, flops = tokens / step_ms * 1000, flops_per_token(shape, sequence_length=length)
    facts = gpu_facts(world.device_name) if on_gpu else None
    expected: float | None = None
    if facts is not None and contest.who == "ours":
        expected = expected_of(
            contest,
            model,
            length=length,
            micro=micro,
            accumulation=accumulation,
            ranks=world.world_size,
            gpu=facts,
        ).mfu_fraction
    return {
        "step_ms": step_ms,
        "tokens_per_second": speed,
        "mfu": mfu_fraction(
            speed,
            flops_per_token=flops,
            gpus=world.world_size,
            peak_flops=facts.bf16_flops if facts else None,
        ),
        "expected_mfu": expected,
        "of_products": speed * flops / products / world.world_size,
        "idle": idle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "plan_gib": planned_gib(shape, setup, contest, world) if contest.who == "ours" else None,
        "micro": micro,
        "accumulation": accumulation,
        "computed": "; ".join(told),
        "all_ms": times,
    }


def expected_of(
    contest: Contest,
    model: str,
    *,
    length: int,
    micro: int,
    accumulation: int,
    ranks: int,
    gpu: GpuFacts,
) -> StepTime:
    """Return the expected time of our step: the roofline of `estimate/step_time.py`."""
    loaded = load_run("gpt2_124m", [f"model.preset={model}", "precision.dtype=bf16"])
    settings = {
        "sequence_length": length,  # may exceed the preset's
        "activation_checkpointing": contest.recomputes,
        "compile": "auto" if contest.compiled else "off",
    }
    config = loaded.config
    sections = {
        "model": config.model.model_copy(update=settings),
        "precision": config.precision.model_copy(update={"fp8": contest.fp8}),
    }
    return expected_step(
        dataclasses.replace(loaded, config=config.model_copy(update=sections)),
        plan=BatchPlan(micro, accumulation, ranks, length),
        zero=ZeroConfig(stage=contest.stage, offload_optimizer=contest.offload),
        gpu=gpu,
    )


def step_times(
    setup: Setup, contest: Contest, world: World, *, told: list[str]
) -> tuple[list[float], float | None]:
    """Return the milliseconds of steps after the warm-up, and the GPU's idle share."""
    clock = Clock(world.device)
    is_compiled = contest.compiled and world.device_kind == "cuda"
    if contest.who == "trainer":
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer(
                setup,
                contest.stage,
                steps=WARM_STEPS + STEPS,
                folder=Path(folder),
                clock=clock,
                after_step=times.append,
                compiled=is_compiled,
            )
        return times[WARM_STEPS:], None
    if contest.who == "torch":
        step = bare_torch(setup, compiled=is_compiled, device=world.device)
    elif contest.who == "deepspeed":
        step = bare_deepspeed(setup, contest.stage, world)
    else:
        step = ours(setup, contest.stage, world, compiled="on" if is_compiled else "off", told=told)
    for _ in range(WARM_STEPS):
        step()
    times = [clock.timed_ms(step) for _ in range(STEPS)]
    return times, profiled_idle(step) if world.device_kind == "cuda" else None


def profiled_idle(step: Callable[[], Any]) -> float:
    """Return the share of some steps in which no kernel ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return idle_share(profiler, seconds)


def planned_gib(shape: ModelShape, setup: Setup, contest: Contest, world: World) -> float:
    """Return the planned peak memory of a GPU."""
    planned = plan_memory(
        shape,
        model=ModelConfig(
            preset="certified",
            sequence_length=setup.length,
            vocabulary_multiple=128,
            activation_checkpointing=setup.checkpointing,
            head_chunk_tokens=setup.chunk_tokens,
        ),
        micro=setup.micro,
        zero=ZeroConfig(stage=contest.stage, offload_optimizer=contest.offload),
        dtype=setup.precision.resolved,
        ranks=world.world_size,
    )
    return planned.peak / 2**30


def product_flops(world: World, *, side: int) -> float:
    """Return the FLOP/s of square bf16 products, the median of twenty."""
    left, right = (
        torch.randn(side, side, device=world.device, dtype=torch.bfloat16) for _ in range(2)
    )
    clock = Clock(world.device)
    times = [clock.timed_ms(lambda: left @ right) for _ in range(25)][5:]
    return 2.0 * side**3 / statistics.median(times) * 1000


def link_speeds(world: World, *, size: int) -> Record:
    """Return the GB/s between each pair of GPUs, and of an all-reduce over all; all ranks call."""
    data = torch.zeros(size, dtype=torch.uint8, device=world.device)
    found: Record = {}
    for first in range(world.world_size):
        for second in range(first + 1, world.world_size):
            pair = dist.new_group([first, second])
            if world.rank in (first, second):
                seconds = _fastest(functools.partial(dist.all_reduce, data, group=pair))
                found[f"{first}-{second}"] = size / seconds / 1e9
            world.barrier()
    seconds = _fastest(lambda: dist.all_reduce(data))
    share = 2 * (world.world_size - 1) / world.world_size
    found["all-reduce, bus"] = share * size / seconds / 1e9
    return {name: speed for of_rank in world.gather(found) for name, speed in of_rank.items()}


def _fastest(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
