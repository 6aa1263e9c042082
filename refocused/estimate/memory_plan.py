"""What a run leaves to the plan: the ZeRO stage, the offload and the micro-batch that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import ModelShape
from refocused.config.optimization import BatchConfig, Dtype, ZeroConfig, ZeroSettings
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import count_parameters
from refocused.estimate.memory import MemoryPlan, plan_memory
from refocused.system.errors import ConfigError

# From this many tokens a pass a GPU computes more than it waits for the host, at these sizes;
# assumed. A stage that leaves room for fewer gives way to one that leaves more.
BUSY_TOKENS = 8192
# A pass of a CPU rank, where memory is shared with everything else.
MODEST_TOKENS = 4096
TRIAL_PARAMETERS = 50_000_000  # a larger model on several CPU ranks is an accident, not a trial


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        zero: Stage and offloads.
        micro: Windows of a pass.
        memory: What a step with them takes.
    """

    zero: ZeroConfig
    micro: int
    memory: MemoryPlan


def choose(
    shape: ModelShape,
    *,
    model: ModelConfig,
    batch: BatchConfig,
    zero: ZeroSettings,
    dtype: Dtype,
    ranks: int,
    memory_bytes: float | None,
    masked: bool = False,
    activation_factor: float = 1.0,
    most_micro: int | None = None,
) -> Choice:
    """Choose the fastest that fits for everything that is `auto`; what is given stays.

    Stage 0 is never chosen: in 16 bits it sums gradients in 16 bits, and its checkpoints cannot be
    read by the other stages. Of those, each exchanges more than the one before it: gradients once
    a step, once a pass, and parameters besides.

    Args:
        shape: The model.
        model: How it is computed.
        batch: The global batch, and the micro-batch or `auto`.
        zero: Stage and offloads, or `auto`.
        dtype: What the passes compute in.
        ranks: GPUs.
        memory_bytes: Of the smallest GPU; None: there are none.
        masked: Whether attention stays within documents.
        activation_factor: What was measured of a pass over what is computed for it.
        most_micro: Windows of the largest pass that may be chosen; None: as many as fit.

    Raises:
        ConfigError: Something is `auto`, and nothing fits.
    """
    micros = _micros(batch, ranks=ranks, length=model.sequence_length, on_gpus=bool(memory_bytes))
    if most_micro is not None:
        micros = [micro for micro in micros if micro <= most_micro] or micros[-1:]
    best: Choice | None = None
    for candidate in _candidates(zero):
        offloads = candidate.offload_optimizer != "none" and zero.offload_optimizer == "auto"
        if best is not None and offloads:
            break  # something fits without
        for micro in micros:
            memory = plan_memory(
                shape,
                model=model,
                micro=micro,
                zero=candidate,
                dtype=dtype,
                ranks=ranks,
                masked=masked,
                activation_factor=activation_factor,
            )
            choice = Choice(candidate, micro, memory)
            if memory_bytes is None or memory.fits(memory_bytes):
                if micro * model.sequence_length >= BUSY_TOKENS or micro == micros[0]:
                    return choice
                if best is None or micro > best.micro:
                    best = choice
                break
    if best is not None:
        return best
    if zero.decided and batch.micro != "auto":
        return choice  # what was asked for; the plan may be off by a tenth
    assert memory_bytes is not None  # everything fits without one
    raise ConfigError(
        f"Nothing fits: with a micro-batch of {choice.micro} windows, ZeRO-{choice.zero.stage} and "
        f"offload_optimizer={choice.zero.offload_optimizer} a step takes "
        f"{choice.memory.peak / 1e9:.1f} GB of a GPU's {memory_bytes / 1e9:.1f} GB. Set "
        "model.activation_checkpointing=true, lower model.sequence_length, or take more GPUs."
    )


def needless_offload(
    choice: Choice,
    shape: ModelShape,
    *,
    model: ModelConfig,
    dtype: Dtype,
    ranks: int,
    memory_bytes: float | None,
    masked: bool = False,
) -> MemoryPlan | None:
    """Return the memory without any offload, where there is one and it would fit without."""
    given = (choice.zero.offload_optimizer, choice.zero.offload_parameters)
    if memory_bytes is None or given == ("none", "none"):
        return None
    bare = choice.zero.model_copy(
        update={"offload_optimizer": "none", "offload_parameters": "none"}
    )
    memory = plan_memory(
        shape, model=model, micro=choice.micro, zero=bare, dtype=dtype, ranks=ranks, masked=masked
    )
    return memory if memory.fits(memory_bytes) else None


def refuse_cpu(loaded: LoadedRun, *, ranks: int) -> None:
    """Refuse to train a large model on several CPU ranks, unless the run file says so.

    Raises:
        ConfigError: `run.device: auto` found no GPU.
    """
    count = count_parameters(
        loaded.shape, vocabulary_multiple=loaded.config.model.vocabulary_multiple
    )
    if loaded.config.run.device == "auto" and ranks > 1 and count.total > TRIAL_PARAMETERS:
        raise ConfigError(
            f"run.device=auto found no GPU on this machine, and {ranks} ranks would train "
            f"{count.total / 1e6:,.0f} M parameters on the CPU. Find out why with "
            "launch/doctor.py, or set run.device=cpu to train on the CPU on purpose."
        )


def _candidates(zero: ZeroSettings) -> Iterator[ZeroConfig]:
    """Yield every stage with every offload that the settings allow, the fastest first."""
    stages = (1, 2, 3) if zero.stage == "auto" else (zero.stage,)
    optimizer = ("none", "cpu") if zero.offload_optimizer == "auto" else (zero.offload_optimizer,)
    parameters = (
        ("none", "cpu") if zero.offload_parameters == "auto" else (zero.offload_parameters,)
    )
    for of_parameters in parameters:
        for of_optimizer in optimizer:
            for stage in stages:
                # An offload of parameters alone, or of a stage that replicates them, is no gain.
                needs_3 = of_parameters != "none" or of_optimizer == "nvme"
                if (needs_3 and stage != 3) or (stage == 0 and of_optimizer != "none"):
                    continue
                yield ZeroConfig.model_validate(
                    zero.model_dump()
                    | {
                        "stage": stage,
                        "offload_optimizer": of_optimizer,
                        "offload_parameters": of_parameters,
                    }
                )


def _micros(batch: BatchConfig, *, ranks: int, length: int, on_gpus: bool) -> list[int]:
    """Return the micro-batches to try, the largest first.

    Raises:
        ConfigError: The global batch cannot be divided among the ranks.
    """
    if batch.micro != "auto":
        return [batch.micro]
    assert batch.windows is not None  # BatchConfig wants it for auto
    each, rest = divmod(batch.windows, ranks)
    if rest:
        raise ConfigError(
            f"batch.windows={batch.windows} is not a multiple of {ranks} ranks. Set it to one."
        )
    divisors = [micro for micro in range(each, 0, -1) if each % micro == 0]
    modest = [micro for micro in divisors if micro * length <= MODEST_TOKENS]
    return divisors if on_gpus else modest[:1] or divisors[-1:]
