"""Bytes and seconds of a step's collectives, inside a machine and between machines (pure)."""

import dataclasses

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import LIVE_PARAMETERS
from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import Attention
from refocused.config.optimization import ZeroConfig
from refocused.estimate.flops import count_of_run, count_parameters
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
    ranks, micro_batches, parameters = (
        plan.world_size,
        plan.gradient_accumulation_steps,
        count_of_run(loaded).allocated,
    )
    gathers, in_nodes = gathers_a_step(loaded, zero=zero, micro_batches=micro_batches)
    sent = collective_bytes(
        parameters,
        stage=zero.stage,
        size=size,
        gradient_accumulation_steps=micro_batches,
        gathers=gathers,
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
    parameters: int, *, stage: int, size: int, gradient_accumulation_steps: int, gathers: int
) -> dict[str, int]:
    """Return the bytes of the whole tensors in a step's collectives, by kind.

    As in DeepSpeed 0.19.8 (`tests/engine/test_traffic.py`): gradients in the precision of the
    micro_batches, all-reduced once a step (stages 0 and 1) or once a pass (2), or reduce-scattered
    once a pass (3). Stages 1 and 2 gather the weights once a step, stage 3 `gathers` times. `size`
    is the bytes of an element in the passes.
    """
    whole = size * parameters
    if stage < 3:
        gathered = {"all_gather": whole} if stage else {}
        return {
            "all_reduce": whole * (gradient_accumulation_steps if stage == 2 else 1),
            **gathered,
        }
    return {"reduce_scatter": whole * gradient_accumulation_steps, "all_gather": whole * gathers}


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
