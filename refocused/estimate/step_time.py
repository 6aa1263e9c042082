"""Estimate the time of a training step by a roofline of computing, memory and traffic (pure).

Shares of the data sheets' peaks are assumptions until a report of `benchmarks/certify_gpu.py`
replaces them. The work is counted (`tests/estimate/test_pass_work.py`): the FLOPs of every matrix
product, with recomputation, and the bytes that every other operation reads and writes. MFU has its
own convention (`estimate/flops.py`).
"""

from __future__ import annotations

import dataclasses

from refocused.config.batch_plan import BatchPlan, plan_batch
from refocused.config.deepspeed import LIVE_PARAMETERS
from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import Attention, ModelShape, Recall, Resonators
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.config.run_config import ModelConfig
from refocused.estimate.flops import (
    block_elements,
    count_of_run,
    count_parameters,
    flops_per_token,
    modes_a_token,
    recall_cost,
)
from refocused.estimate.memory import DEFAULT_CHUNK
from refocused.estimate.memory_plan import Choice
from refocused.system.errors import ConfigError
from refocused.system.hardware import GpuSpec

LINK_SHARE = 0.75  # of a link's rate in NCCL's collectives and in pinned copies: assumed
GPUS_A_MACHINE = 8
# Of one GPU to other machines, each way: a 400 Gbit/s card for each GPU, assumed.
NETWORK_BYTES_PER_SECOND = 50e9


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What each GPU sends in a step; it receives as much."""

    gathers: int  # of the whole model, from all ranks
    inside_bytes: float  # to GPUs of its machine
    between_bytes: float  # to other machines
    inside_seconds: float
    between_seconds: float
    copies_seconds: float  # of those inside: gathers from copies in the nodes
    seconds: float  # of all collectives, without overlap with computing


def step_traffic(
    loaded: LoadedRun, *, zero: ZeroConfig, size: int, plan: BatchPlan, gpu: GpuSpec
) -> Traffic:
    """Return the traffic of a step in rings; `size` is the bytes of an element in the passes.

    A ring of R ranks passes (R - 1) / R of a tensor through each, an all-reduce twice (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce). NCCL makes as many rings as a machine has network
    cards, and each leaves the machine once, by another card: of what g GPUs pass on, each card
    carries 1 / g. A ring is as fast as its slowest link.
    """
    ranks, micro_batches = plan.world_size, plan.gradient_accumulation_steps
    parameters = count_of_run(loaded).allocated
    gathers, in_nodes = gathers_a_step(loaded, zero=zero, micro_batches=micro_batches)
    sent = collective_bytes(
        parameters, stage=zero.stage, size=size, micro_batches=micro_batches, gathers=gathers
    )
    here = min(ranks, GPUS_A_MACHINE)
    passed_on = sum(whole * (2 if kind == "all_reduce" else 1) for kind, whole in sent.items())
    leaving = passed_on * (ranks - 1) / ranks / here if ranks > here else 0.0
    kept = passed_on * (ranks - 1) / ranks - leaving
    copies = in_nodes * size * parameters * (here - 1) / here
    exchanged = exchanged_bytes(loaded, plan=plan, size=size)
    link, card = LINK_SHARE * gpu.link_bytes_per_second, LINK_SHARE * NETWORK_BYTES_PER_SECOND
    return Traffic(
        gathers=gathers,
        inside_bytes=kept + copies + exchanged,
        between_bytes=leaving,
        inside_seconds=(kept + copies + exchanged) / link,
        between_seconds=leaving / card,
        copies_seconds=copies / link,
        seconds=max(kept / link, leaving / card) + (copies + exchanged) / link,
    )


def exchanged_bytes(loaded: LoadedRun, *, plan: BatchPlan, size: int) -> float:
    """Return what a rank sends in a step to those that share its sequences, in one machine.

    Queries, keys and values before attention, the output after it, and their gradients on the way
    back (Jacobs et al. 2023, DeepSpeed Ulysses, 3.2).
    """
    mixer, ranks = loaded.shape.mixer, plan.sequence_parallel
    if ranks == 1 or not isinstance(mixer, Attention):
        return 0.0
    a_token = 2 * size * (mixer.query_width + mixer.key_width)
    ways = 3 if loaded.config.model.activation_checkpointing else 2
    tokens = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.sequence_length / ranks
    return ways * loaded.shape.layers * tokens * a_token * (ranks - 1) / ranks


def collective_bytes(
    parameters: int, *, stage: int, size: int, micro_batches: int, gathers: int
) -> dict[str, int]:
    """Return the bytes of the whole tensors in a step's collectives, by kind.

    As in DeepSpeed 0.19.8 (`tests/engine/test_traffic.py`): gradients in the precision of the
    micro-batches, all-reduced once a step (stages 0 and 1) or once a pass (2), or reduce-scattered
    once a pass (3). Stages 1 and 2 gather the weights once a step, stage 3 `gathers` times. `size`
    is the bytes of an element in the passes.
    """
    whole = size * parameters
    if stage < 3:
        reduced = {"all_reduce": whole * (micro_batches if stage == 2 else 1)}
        return reduced | ({"all_gather": whole} if stage else {})
    return {"reduce_scatter": whole * micro_batches, "all_gather": whole * gathers}


def gathers_a_step(loaded: LoadedRun, *, zero: ZeroConfig, micro_batches: int) -> tuple[int, int]:
    """Return how often ZeRO-3 gathers the whole model in a step: from all ranks, inside nodes.

    Once if weights stay until the next update (`gather_once_a_step`); once a pass if they stay from
    the forward to the backward pass; twice a pass if they are offloaded and exceed what DeepSpeed
    then keeps (`config/deepspeed.py`). With hpZ (Wang et al. 2023, ZeRO++) the first of a step
    fills the nodes' copies, which serve all others (`tests/engine/test_node_partition.py`).
    """
    shape, settings = loaded.shape, loaded.fragment.get("zero_optimization", {})
    if settings.get("stage3_param_persistence_threshold", 0) >= shape.vocabulary * shape.width:
        return 1, 0
    if zero.partition == "node":
        return 1, 2 * micro_batches - 1
    times = 3 if loaded.config.model.activation_checkpointing else 1
    between = count_parameters(shape).total * times
    keeps = zero.offload_parameters == "none" or between <= LIVE_PARAMETERS
    return micro_batches * (1 if keeps else 2), 0


# Share of the peak that a model's products reach: 600 of an H100's 989 TFLOP/s, assumed.
PRODUCT_SHARE = 0.61
# Share of fused attention kernels, by FLOPs of the causal half: assumed from FlashAttention-3's
# figures for heads of 64 over 2,048 tokens (Shah et al. 2024, figures 5 and 6).
ATTENTION_SHARE = 0.35
MEMORY_SHARE = 0.8  # of the memory bandwidth, in kernels that only move data: assumed
# 8-bit products have twice the peak; scales and casts cost some of it: assumed.
FP8_GAIN = 1.5
TF32_GAIN = 0.5  # TF32's peak over bf16's on every GPU of `refocused/system/hardware.py`
FLOAT32_GAIN = 1 / 16  # float32 without tensor cores: A100 1/16, H100 1/15; others have more
# Share of ZeRO-3's traffic that overlaps with computing; below stage 3 `overlap_comm` is off.
# Assumed.
HIDDEN_SHARE = 0.7
IDLE_SHARE = 0.03  # gaps between kernels, and the start of a step: assumed
HOST_MEMORY_BYTES_PER_SECOND = 200e9  # of a machine, in an optimizer step on its CPUs: assumed
NVME_BYTES_PER_SECOND = 5e9  # of a machine, each way: assumed
# Moved by the optimizer for each element: AdamW reads gradient, master and two moments and writes
# three (28), computes the norm (4), copies the sum (8) and writes the pass's weight (2).
OPTIMIZER_BYTES = 42
# Moved by a pass for each element: its gradient is copied into a bucket and added to the sum.
GRADIENT_BYTES = 14
# Time of DeepSpeed's Python for each layer of a pass, by ZeRO stage: measured with 24 layers,
# blocks as leaves, against a bare loop. A shorter pass waits for the host.
HOST_SECONDS_A_LAYER = {0: 0.2e-3, 1: 0.8e-3, 2: 0.8e-3, 3: 1.7e-3}
# A Fourier transform that exceeds a GPU's shared memory reads its points twice: assumed.
_TRANSFORM_SWEEPS = 2
_BYTES_A_LOGIT = {2: 26, 4: 16}  # of the chunked loss: largest logit, softmax, gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """FLOPs computed and bytes moved."""

    products: float = 0.0  # FLOPs of the blocks' products, in the precision of the passes
    head: float = 0.0  # FLOPs of the head's
    exact: float = 0.0  # FLOPs of products that stay in float32: the scan's
    attention: float = 0.0  # FLOPs of attention over earlier positions alone
    mixing: float = 0.0  # bytes moved by mixers without attention
    elementwise: float = 0.0  # bytes moved by everything else

    def __add__(self, other: Work) -> Work:
        """Return the sum."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(mine + its for mine, its in pairs))

    def times(self, factor: float) -> Work:
        """Return the work repeated `factor` times."""
        return Work(*(factor * part for part in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of one step, by part."""

    products: float  # matrix products of blocks and head
    mixing: float  # attention, convolution or scan
    elementwise: float  # everything else of the passes, by the bytes moved
    communication: float  # between GPUs, without what overlaps with computing
    optimizer: float  # sums of gradients and the update, with the copies of an offload
    idle: float  # gaps, and waits for Python on the host
    forward_tokens_per_second: float  # of all GPUs in passes without a gradient
    mfu_fraction: float  # the resulting share of the GPUs' peak
    traffic: Traffic | None = None  # with what overlaps; None: unknown

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the step, by name."""
        names = ("products", "mixing", "elementwise", "communication", "optimizer", "idle")
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    def as_text(self, tokens: int) -> str:
        """Return one line about a step of so many tokens."""
        longest = max(self.parts, key=self.parts.__getitem__)
        return (
            f"{self.seconds:.3g} s a step, {tokens / self.seconds:,.0f} tokens/s, MFU "
            f"{self.mfu_fraction:.0%}, {self.parts[longest] / self.seconds:.0%} of it {longest} "
            "(from data sheets, not measured)"
        )


def expected_step(
    loaded: LoadedRun, *, plan: BatchPlan, zero: ZeroConfig, gpu: GpuSpec
) -> StepTime:
    """Return the expected time of a run's step."""
    shape, model, precision = loaded.shape, loaded.config.model, loaded.config.precision
    size = 4 if precision.resolved == "fp32" else 2
    parameters, ranks = count_of_run(loaded).allocated, plan.world_size
    micro_batches, micro_batch_size = plan.gradient_accumulation_steps, plan.micro_batch_size
    forward, backward = pass_work(shape, model=model, micro_batch_size=micro_batch_size, size=size)
    products, mixing, elementwise = _seconds_of(forward + backward, precision=precision, gpu=gpu)
    computing = products + mixing + elementwise
    python = shape.layers * HOST_SECONDS_A_LAYER[zero.stage]
    moving = MEMORY_SHARE * gpu.memory_bytes_per_second
    summed = parameters / (ranks if zero.stage >= 2 else 1)
    moved = GRADIENT_BYTES * summed / moving
    traffic = step_traffic(loaded, zero=zero, size=size, plan=plan, gpu=gpu)
    hidden = HIDDEN_SHARE if zero.stage == 3 else 0.0
    share = parameters / ranks if zero.stage else parameters
    link = LINK_SHARE * gpu.host_bytes_per_second
    update = 0.0
    if zero.offload_parameters != "none":  # a rank's share, for each gather
        update += traffic.gathers * size * share / link
    if zero.offload_optimizer == "none":
        update += OPTIMIZER_BYTES * share / moving
    else:  # sums of gradients go to the host, new weights come back
        here = share * min(ranks, GPUS_A_MACHINE)
        update += (4 + size) * share / link + OPTIMIZER_BYTES * here / HOST_MEMORY_BYTES_PER_SECOND
        if zero.offload_optimizer == "nvme":  # master and moments, there and back
            update += 2 * 12 * here / NVME_BYTES_PER_SECOND
    # Without a gradient the head does one of its three products, and the host a third of its work.
    look = dataclasses.replace(forward, head=forward.head / 3)
    in_16_bits = precision.model_copy(update={"fp8": "none"})
    looking = max(sum(_seconds_of(look, precision=in_16_bits, gpu=gpu)), python / 3)
    step = StepTime(
        products=micro_batches * products,
        mixing=micro_batches * mixing,
        elementwise=micro_batches * elementwise,
        communication=(1 - hidden) * traffic.seconds,
        optimizer=micro_batches * moved + update,
        idle=micro_batches * (max(0.0, python - computing) + IDLE_SHARE * computing),
        forward_tokens_per_second=plan.tokens / micro_batches / looking,
        mfu_fraction=0.0,
        traffic=traffic,
    )
    flops = flops_per_token(shape, sequence_length=plan.sequence_length)
    mfu_fraction = plan.tokens * flops / step.seconds / (ranks * gpu.bf16_flops)
    return dataclasses.replace(step, mfu_fraction=mfu_fraction)


def step_of_run(
    loaded: LoadedRun, choice: Choice, *, ranks: int, gpu: GpuSpec
) -> tuple[BatchPlan, StepTime]:
    """Return a step's batch and expected time; raise ConfigError if ranks cannot divide it."""
    config = loaded.config
    batch = config.batch.model_copy(update={"micro_batch_size": choice.micro_batch_size})
    plan = plan_batch(batch, world_size=ranks, **config.model.sequence)
    return plan, expected_step(loaded, plan=plan, zero=choice.zero, gpu=gpu)


def step_at(
    mfu_fraction: float, *, plan: BatchPlan, flops_per_token: float, gpu: GpuSpec
) -> StepTime:
    """Return a step at a share of the peak; raise ConfigError if it is none."""
    if not 0 < mfu_fraction <= 1:
        raise ConfigError(
            f"Model FLOPs utilization {mfu_fraction:.1%}: give a share of the peak, such as 0.4, "
            "or leave it out for an estimate."
        )
    speed = mfu_fraction * plan.world_size * gpu.bf16_flops / flops_per_token
    return StepTime(plan.tokens / speed, 0, 0, 0, 0, 0, 3 * speed, mfu_fraction)


def _seconds_of(
    work: Work, *, precision: PrecisionConfig, gpu: GpuSpec
) -> tuple[float, float, float]:
    """Return the seconds of products, of mixers, and of everything else."""
    gain = 1.0
    if precision.resolved == "fp32":
        gain = TF32_GAIN if precision.tf32 else FLOAT32_GAIN
    in_blocks = FP8_GAIN if precision.fp8 != "none" else gain
    rate = PRODUCT_SHARE * gpu.bf16_flops
    moving = MEMORY_SHARE * gpu.memory_bytes_per_second
    products = (work.products / in_blocks + work.head / gain) / rate
    mixing = work.attention / (ATTENTION_SHARE * gain * gpu.bf16_flops)
    mixing += work.exact / (FLOAT32_GAIN * rate) + work.mixing / moving
    return products, mixing, work.elementwise / moving


def pass_work(
    shape: ModelShape, *, model: ModelConfig, micro_batch_size: int, size: int
) -> tuple[Work, Work]:
    """Return the forward work and the backward work, with recomputation, of a training pass.

    The pass has `micro_batch_size` sequences and elements of `size` bytes.
    """
    tokens, chunk = micro_batch_size * model.slice_tokens, model.head_chunk_tokens
    rows = shape.padded_vocabulary(model.vocabulary_multiple)
    weight = rows * shape.width
    # The head's gradients are computed in the forward pass. Chunks add to the weight's in float32;
    # it is scaled and cast at the end.
    summed = weight * ((8 + size) * (-(-tokens // chunk) - 1) + 12 + 2 * size)
    moved = _BYTES_A_LOGIT[size] * tokens * rows + summed
    forward, backward = Work(head=6.0 * tokens * weight, elementwise=moved), Work()
    for kind in shape.kinds:
        mixing = _mixing_work(kind, size=size, rows=micro_batch_size, length=model.sequence_length)
        ahead, back = (work.times(1 / model.sequence_parallel) for work in mixing)
        products = 2.0 * tokens * block_elements(kind)
        ways = kind.record.moved["eager" if model.compile == "off" else "compiled"]
        by_way = {
            way: tokens * kind.bytes_a_token(amounts, size=size) for way, amounts in ways.items()
        }
        ahead += Work(products, elementwise=by_way["forward"])
        back += Work(2 * products, elementwise=by_way["backward"])
        if model.activation_checkpointing:
            back += ahead
            if model.compile == "off":  # torch stops before the last product, which is not kept
                back += Work(-2.0 * tokens * kind.width * kind.ffn_width)
        forward += ahead.times(kind.layers)
        backward += back.times(kind.layers)
    return forward, backward


def _mixing_work(shape: ModelShape, *, size: int, rows: int, length: int) -> tuple[Work, Work]:
    """Return the work of a block's mixer, forward and backward."""
    tokens, width, mixer = rows * length, shape.width, shape.mixer
    if isinstance(mixer, Attention):
        # Two products forward and five backward (Dao 2023, FlashAttention-2), their causal half.
        flops = 2.0 * tokens * length * mixer.query_width
        return Work(attention=flops), Work(attention=2.5 * flops)
    if mixer.recall != Recall():
        plain = dataclasses.replace(shape, mixer=dataclasses.replace(mixer, recall=Recall()))
        forward, backward = _mixing_work(plain, size=size, rows=rows, length=length)
        cost = recall_cost(mixer.recall, width=width, size=size, rows=rows, length=length)
        forward += Work(cost.products, exact=cost.exact, mixing=cost.forward_bytes)
        backward += Work(2 * cost.products, exact=2 * cost.exact, mixing=cost.backward_bytes)
        return forward, backward
    if isinstance(mixer, Resonators):  # a convolution; all sequences share kernel and powers
        products = 4.0 * mixer.count * width * length  # the kernel from cosines and sines
        moved: float = tokens * width * (2 * size + 32 + 28 * _TRANSFORM_SWEEPS)
        moved += length * (width * (8 + 12 * _TRANSFORM_SWEEPS) + 56 * mixer.count)
        back: float = tokens * width * (3 * size + 84 + 40 * _TRANSFORM_SWEEPS)
        back += length * (width * (29 + 28 * _TRANSFORM_SWEEPS) + 178 * mixer.count)
        return Work(products, mixing=moved), Work(2 * products, mixing=back)
    # A chunked scan; all sequences share its Toeplitz matrices. The Triton kernel of `model.scan`
    # moves less.
    chunk = min(shape.settings.get("chunk_size", DEFAULT_CHUNK), length)
    modes, matrices = modes_a_token(mixer), modes_a_token(mixer, averaged=False)
    flops = tokens * modes * (4.0 * (chunk + 1) + 4)
    casts = 18 if size == 2 else 0
    coarse = sum(1 for scale in mixer.scales if scale > 1)  # averages, and their repetition
    moved = tokens * (modes * (36 + casts) + coarse * width * (5 * size + 7))
    moved += matrices * (64 * chunk * (chunk + 1) + 44 * width)
    back = tokens * (modes * (105 + casts) + coarse * width * (3 * size + 22))
    back += matrices * (74 * chunk * (chunk + 1) + 100 * width)
    return Work(exact=flops, mixing=moved), Work(exact=2 * flops, mixing=back)
