"""Choose precision, ZeRO stage, offload and micro-batch; plan host memory; suggest what fits."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from refocused.config.deepspeed import idle_offloads
from refocused.config.load_run import LoadedRun
from refocused.config.optimization import BatchConfig, Dtype, ZeroConfig, ZeroSettings
from refocused.config.run_config import RunConfig, check_run
from refocused.estimate.flops import count_of_run
from refocused.estimate.memory import MemoryPlan, checkpoint_bytes, plan_memory
from refocused.system.errors import ConfigError, as_typed, counted
from refocused.system.hardware import BF16_FLAGS

BF16_CAPABILITY = (8, 0)  # Ampere; torch emulates bf16 on older GPUs, at a fraction of the speed
TIMED_ROUNDS, TIMED_SIZE = 5, (1024, 768)  # 0.1 s in all on one core of a Xeon
# If the types of the ranks differ, all take the last one in this order.
FASTEST_FIRST: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


@dataclasses.dataclass(frozen=True, slots=True)
class NativeDtype:
    """The fastest type of the hardware, and why."""

    dtype: Dtype
    reason: str


def native_dtype(
    *,
    capability: tuple[int, int] | None,
    cpu_flags: Collection[str] = (),
    cpu_gain: Callable[[], float] | None = None,
) -> NativeDtype:
    """Return the fastest type of a GPU or a processor.

    Args:
        capability: Compute capability of the GPU; None: the run trains on the CPU.
        cpu_flags: Instruction sets of the processor, as in /proc/cpuinfo.
        cpu_gain: Measures the gain of bf16; called if the flags have it, because on some virtual
            machines it is slower than float32. None: trust the flags.
    """
    if capability is not None:
        number = ".".join(str(part) for part in capability)
        if capability >= BF16_CAPABILITY:
            return NativeDtype("bf16", f"the GPU computes in it (compute capability {number})")
        return NativeDtype("fp16", f"the GPU has no bf16 (compute capability {number})")
    names = " or ".join(BF16_FLAGS.values())
    features = ", ".join(name for flag, name in BF16_FLAGS.items() if flag in cpu_flags)
    if not features:
        return NativeDtype("fp32", f"the processor has no bf16 instructions ({names})")
    if cpu_gain is not None and (gain := cpu_gain()) < 1:
        reason = f"a product in bf16 takes {1 / gain:.1f} times as long here, despite {features}"
        return NativeDtype("fp32", reason)
    return NativeDtype("bf16", f"the processor computes in it ({features})")


def cpu_bf16_gain() -> float:
    """Time a matrix product in float32 and bf16 alternately; return the speed-up of bf16."""
    import torch

    seconds = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(TIMED_ROUNDS):
        for dtype in seconds:
            rows, weight = (torch.ones(TIMED_SIZE, dtype=dtype) for _ in range(2))
            began = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - began)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def with_dtype(loaded: LoadedRun, dtype: Dtype) -> LoadedRun:
    """Return a run with `dtype` in place of `auto`; raise ConfigError if its fp8 needs bf16."""
    config = loaded.config
    if config.precision.fp8 != "none" and dtype != "bf16":
        raise ConfigError(
            f"precision.fp8={config.precision.fp8} needs bf16, and precision.dtype=auto is {dtype} "
            "here. Set precision.fp8=none."
        )
    precision = config.precision.model_copy(update={"dtype": dtype})
    return dataclasses.replace(loaded, config=config.model_copy(update={"precision": precision}))


Device = Literal["cuda", "cpu"]

# With so many tokens in a pass, a GPU computes longer than it waits for the host; assumed. A stage
# without room for them gives way to a higher one.
BUSY_TOKENS = 8192
MODEST_TOKENS = 4096  # of a pass of a CPU rank, which shares memory with everything else
TRIAL_PARAMETERS = 50_000_000  # a larger model on several CPU ranks is a mistake, not a trial

# Private memory of a rank without tensors: Python, torch, DeepSpeed (measured, see
# docs/decisions/engine.md), and the CUDA context (assumed).
RANK_BYTES = {"cpu": 0.4e9, "cuda": 1.5e9}
# DeepSpeed's launchers, the supervisor, the sampler and the mirror.
BESIDE_BYTES = 0.4e9
BUILT_BYTES = 4  # a parameter: each rank builds the whole model before it is partitioned
# Memory of a step's temporaries over their size, if freed memory is kept: glibc leaves holes.
# Measured: 2.0 to 2.9 (docs/decisions/engine.md).
KEPT_TIMES = 3

NO_OFFLOAD = {"offload_optimizer": "none", "offload_parameters": "none"}
RANKS = "RANKS"  # the environment variable for the number of ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """ZeRO stage and offloads, sequences of a pass, and the memory of a step."""

    zero: ZeroConfig
    micro_batch_size: int
    memory: MemoryPlan


def choose(
    loaded: LoadedRun, *, ranks: int, memory_bytes: float | None, ranks_here: int | None = None
) -> Choice:
    """Choose the fastest settings that fit for everything that is `auto`.

    Stage 0 is never chosen: it sums 16-bit gradients in 16 bits, and other stages cannot read its
    checkpoints. Stages 1 to 3 communicate increasingly more: gradients once a step, once a pass,
    and also parameters.

    Args:
        memory_bytes: Memory of the smallest GPU; None: no GPUs.
        ranks_here: Ranks of a node, if known, for `zero.partition: node`.

    Raises:
        ConfigError: The ranks cannot divide the batch, or something is `auto` and nothing fits.
    """
    config, length = loaded.config, loaded.config.model.slice_tokens
    sizes = _micro_batches_of(loaded, ranks=ranks, on_gpus=bool(memory_bytes))
    best: Choice | None = None
    for zero in _zero_candidates(config.zero):
        offloads = zero.offload_optimizer != "none" and config.zero.offload_optimizer == "auto"
        if best is not None and offloads:
            break  # it fits without
        for size in sizes:
            memory = plan_memory(
                loaded, micro_batch_size=size, zero=zero, ranks=ranks, ranks_here=ranks_here
            )
            choice = Choice(zero, size, memory)
            if memory_bytes is None or memory.fits(memory_bytes):
                if size * length >= BUSY_TOKENS or size == sizes[0]:
                    return choice
                if best is None or size > best.micro_batch_size:
                    best = choice
                break
    if best is not None:
        return best
    if config.zero.decided and config.batch.micro_batch_size != "auto":
        return choice  # as set; the plan may be off by a tenth
    assert memory_bytes is not None  # everything fits without one
    raise ConfigError(
        f"Nothing fits: with a micro-batch of {counted(size, 'sequence')}, "
        f"ZeRO-{zero.stage} and offload_optimizer={zero.offload_optimizer} a step needs "
        f"{memory.peak / 1e9:.1f} GB of a GPU's {memory_bytes / 1e9:.1f} GB. Set "
        "model.activation_checkpointing=true, lower model.sequence_length, or use more GPUs."
    )


def largest_micro(
    loaded: LoadedRun,
    choice: Choice,
    *,
    ranks: int,
    limit: float,
    measure: Callable[[int], tuple[int, int, int]],
) -> int:
    """Return the largest micro-batch that a measured step proves to fit into `limit` bytes.

    The step is measured with half of the planned micro-batch, because a rank that runs out of
    memory alone leaves the others inside a collective. A pass of k times as many sequences takes at
    most k times what this one took beyond the memory before it: what grows with the sequences grows
    in proportion, and the rest of it (gathered weights, gradients) does not grow at all.

    Args:
        measure: Makes a step with a micro-batch, and returns the bytes before its last pass, the
            most in that pass, and the most in the whole step, of the fullest rank; collective.
    """
    sizes, planned = _micro_batches_of(loaded, ranks=ranks, on_gpus=True), choice.micro_batch_size
    first = next((size for size in sizes if 2 * size <= planned), planned)
    for size in sizes[sizes.index(first) :]:
        before, in_pass, peak = measure(size)
        if peak <= limit:
            proved = size * (limit - before) / max(1, in_pass - before)
            return max([size, *(larger for larger in sizes if larger <= proved)])
    return size  # it made a step, if barely


def needless_offload(
    loaded: LoadedRun, choice: Choice, *, ranks: int, memory_bytes: float | None
) -> MemoryPlan | None:
    """Return the memory of a step without its offload if it would fit; else None."""
    zero = choice.zero.model_copy(update=NO_OFFLOAD)
    if memory_bytes is None or zero == choice.zero:
        return None
    memory = plan_memory(loaded, micro_batch_size=choice.micro_batch_size, zero=zero, ranks=ranks)
    return memory if memory.fits(memory_bytes) else None


def refuse_cpu(loaded: LoadedRun, *, ranks: int) -> None:
    """Raise ConfigError if `run.device: auto` found no GPU to train a large model on."""
    parameters = count_of_run(loaded).total
    if loaded.config.run.device == "auto" and ranks > 1 and parameters > TRIAL_PARAMETERS:
        raise ConfigError(
            f"run.device=auto found no GPU on this machine, and {ranks} ranks would train "
            f"{parameters / 1e6:,.0f} M parameters on the CPU. Find out why with "
            f"{as_typed('doctor')}, or set run.device=cpu if you want that."
        )


def _zero_candidates(zero: ZeroSettings) -> Iterator[ZeroConfig]:
    """Yield the stages and offloads that the settings allow, the fastest first."""
    both = ("none", "cpu")
    parameters = both if zero.offload_parameters == "auto" else (zero.offload_parameters,)
    optimizer = both if zero.offload_optimizer == "auto" else (zero.offload_optimizer,)
    stages = (1, 2, 3) if zero.stage == "auto" else (zero.stage,)
    for of_parameters, of_optimizer, stage in itertools.product(parameters, optimizer, stages):
        # Offloading parameters alone, or below stage 3, gains nothing.
        needs_3 = of_parameters != "none" or of_optimizer == "nvme"
        if (needs_3 and stage != 3) or (stage == 0 and of_optimizer != "none"):
            continue
        offloads = {"offload_optimizer": of_optimizer, "offload_parameters": of_parameters}
        yield ZeroConfig.model_validate(zero.model_dump() | {"stage": stage} | offloads)


def _micro_batches_of(loaded: LoadedRun, *, ranks: int, on_gpus: bool) -> list[int]:
    config, length = loaded.config, loaded.config.model.slice_tokens
    shares = max(1, ranks // config.model.sequence_parallel)
    return micro_batch_sizes(config.batch, ranks=shares, length=length, on_gpus=on_gpus)


def micro_batch_sizes(batch: BatchConfig, *, ranks: int, length: int, on_gpus: bool) -> list[int]:
    """Return the micro-batches to try, the largest first."""
    if batch.micro_batch_size != "auto":
        return [batch.micro_batch_size]
    assert batch.global_batch_size is not None  # required for auto
    each, rest = divmod(batch.global_batch_size, ranks)
    if rest:
        raise ConfigError(
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of "
            f"{counted(ranks, 'rank')}. Change it."
        )
    divisors = [size for size in range(each, 0, -1) if each % size == 0]
    modest = [size for size in divisors if size * length <= MODEST_TOKENS]
    return divisors if on_gpus else modest[:1] or divisors[-1:]


@dataclasses.dataclass(frozen=True, slots=True)
class HostPlan:
    """Memory of a run on one machine, in bytes."""

    building: int  # the whole model, which each rank builds before it is partitioned
    tensors: int  # of all ranks afterwards: offloaded states and gradients; on CPUs everything
    copies: int  # for saves in the background
    processes: int  # without tensors
    temporaries: int  # of all ranks, during a step

    @property
    def for_keeping(self) -> int:
        """Free memory that is needed once the states are built, to keep freed memory."""
        return self.copies + KEPT_TIMES * self.temporaries

    @property
    def total(self) -> int:
        """The peak; the memory for building is free again when training begins."""
        return max(self.building, self.tensors + self.copies) + self.processes


def plan_host(
    loaded: LoadedRun, choice: Choice, *, ranks: int, ranks_here: int, device: Device
) -> HostPlan:
    """Plan the memory of one machine with `ranks_here` of all `ranks`.

    Token files are not counted: the page cache that they are read through shrinks when needed.
    """
    memory, stage, copies = choice.memory, choice.zero.stage, 0
    if loaded.config.checkpoint.in_background:
        step = checkpoint_bytes(loaded.shape, loaded.config, stage=stage)
        copies = step * (ranks_here if stage else ranks) // ranks  # at stage 0 rank 0 saves all
    return HostPlan(
        building=ranks_here * BUILT_BYTES * count_of_run(loaded).allocated,
        tensors=ranks_here * (memory.host + (memory.peak if device == "cpu" else 0)),
        copies=copies,
        processes=process_bytes(device, ranks_here=ranks_here),
        # Assumed for an offloaded step: as large as its states.
        temporaries=ranks_here * (memory.peak - memory.states if device == "cpu" else memory.host),
    )


def process_bytes(device: Device, *, ranks_here: int) -> int:
    """Return the memory of a run's processes on one machine without tensors."""
    return int(ranks_here * RANK_BYTES[device] + BESIDE_BYTES)


def settings_that_fit(
    loaded: LoadedRun,
    *,
    micro_batch_size: int,
    ranks: int,
    fits: Callable[[LoadedRun, int], bool],
    fewer_ranks: bool = False,
) -> str | None:
    """Return overrides with which a run fits; None if no tried ones do.

    Tokens a step, model and learning rate stay. Changes are added in the order of their cost until
    the run fits; then those that are not needed are dropped.

    Args:
        micro_batch_size: Sequences of a pass, as set or chosen.
        fits: Returns whether a run fits on a number of ranks.
        fewer_ranks: Whether to try a single rank.
    """

    def typed(changes: list[Mapping[str, Any]]) -> str | None:
        """Return the overrides of all changes if a run fits with them."""
        settings = {key: value for change in changes for key, value in change.items()}
        new_ranks = settings.get(RANKS, ranks)
        accumulation = loaded.config.batch.gradient_accumulation_steps
        if accumulation is not None:  # a step keeps its sequences
            new_size = settings.get("batch.micro_batch_size", micro_batch_size)
            kept = micro_batch_size * accumulation * ranks // (new_size * new_ranks)
            if kept != accumulation:
                settings["batch.gradient_accumulation_steps"] = kept
        values = loaded.config.model_dump(by_alias=True)
        for section, _, name in (key.partition(".") for key in settings if key != RANKS):
            values[section][name] = settings[f"{section}.{name}"]
        with contextlib.suppress(ConfigError, ValueError):  # these settings do not go together
            config = RunConfig.model_validate(values)
            run = dataclasses.replace(loaded, config=config)
            is_odd = any(check_run(config)) or idle_offloads(loaded.fragment, zero=config.zero)
            if not is_odd and fits(run, new_ranks):
                return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())
        return None

    taken: list[Mapping[str, Any]] = []
    overrides: str | None = None
    for change in _changes(loaded.config, micro_batch_size, fewer_ranks=fewer_ranks):
        taken.append(change)
        if overrides := typed(taken):
            break
    for change in list(taken) if overrides else ():
        rest = [other for other in taken if other is not change]
        if without := typed(rest):
            taken, overrides = rest, without
    return overrides


def _changes(config: RunConfig, size: int, *, fewer_ranks: bool) -> Iterator[Mapping[str, Any]]:
    """Yield changes that may save memory, the cheapest first."""
    if config.checkpoint.in_background:
        yield {"checkpoint.async": False}
    while size > 1:
        size = size // 2 if size % 2 == 0 else 1
        yield {"batch.micro_batch_size": size}
    if config.zero.stage != 3:
        yield {"zero.stage": 3}
    if not config.model.activation_checkpointing:
        yield {"model.activation_checkpointing": True}
    if (config.zero.offload_optimizer, config.zero.offload_parameters) != ("none", "none"):
        yield {f"zero.{name}": value for name, value in NO_OFFLOAD.items()}
    else:
        yield {"zero.offload_optimizer": "cpu"}
        yield {"zero.offload_optimizer": "cpu", "zero.offload_parameters": "cpu"}
    if fewer_ranks:
        yield {RANKS: 1}
