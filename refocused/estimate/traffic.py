"""Bytes and seconds of a step's collectives, inside a machine and between machines (pure)."""

from __future__ import annotations

import dataclasses

from refocused.config.deepspeed import LIVE_PARAMETERS
from refocused.config.load_run import LoadedRun
from refocused.config.optimization import ZeroConfig
from refocused.estimate.flops import count_parameters
from refocused.system.hardware import GpuFacts

LINK_SHARE = 0.75  # of a link's rate in NCCL's collectives and in pinned copies: assumed
GPUS_A_MACHINE = 8
# Of one GPU to other machines, each way: a 400 Gbit/s card for each GPU, assumed.
NETWORK_BYTES_PER_SECOND = 50e9


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What each GPU sends in a step; it receives as much."""

    inside_bytes: float  # to GPUs of its machine
    between_bytes: float  # to other machines
    inside_seconds: float
    between_seconds: float
    copies_seconds: float  # of those inside: gathers from copies in the nodes
    seconds: float  # of all collectives, without overlap with computing


def step_traffic(
    parameters: int,
    *,
    zero: ZeroConfig,
    size: int,
    passes: int,
    gathers: int,
    ranks: int,
    gpu: GpuFacts,
) -> Traffic:
    """Return the traffic of rings over all ranks, and over those of a node with hpZ.

    A ring of R ranks passes (R - 1) / R of a tensor through each, an all-reduce twice (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce). NCCL makes as many rings as a machine has network
    cards, and each leaves the machine once, by another card: of what g GPUs pass on, each card
    carries 1 / g. A ring is as fast as its slowest link.

    With hpZ (Wang et al. 2023, ZeRO++, 3.2) the first gather after an update fills the copies
    inside the nodes, from which all others of the step are made, also in later forward passes
    (counted in `tests/engine/test_node_partition.py`).
    """
    here, whole = min(ranks, GPUS_A_MACHINE), size * parameters
    in_nodes = gathers - 1 if zero.partition == "node" else 0
    sent = collective_bytes(
        parameters, stage=zero.stage, size=size, accumulation=passes, gathers=gathers - in_nodes
    )
    once = sum(one * (2 if kind == "all_reduce" else 1) for kind, one in sent.items())
    passed_on = once * (ranks - 1) / ranks
    leaving = passed_on / here if ranks > here else 0.0
    kept, in_copies = passed_on - leaving, in_nodes * whole * (here - 1) / here
    link, card = LINK_SHARE * gpu.link_bytes_per_second, LINK_SHARE * NETWORK_BYTES_PER_SECOND
    return Traffic(
        inside_bytes=kept + in_copies,
        between_bytes=leaving,
        inside_seconds=(kept + in_copies) / link,
        between_seconds=leaving / card,
        copies_seconds=in_copies / link,
        seconds=max(kept / link, leaving / card) + in_copies / link,
    )


def even_network(world: Traffic, node: Traffic) -> float:
    """Return the network rate of a GPU, in bytes a second, below which hpZ is faster than none.

    There the gathers that it keeps inside the nodes take as long as between them: networks that
    slow bound all rings.
    """
    spared = world.between_bytes - node.between_bytes
    return spared / (LINK_SHARE * node.copies_seconds) if node.copies_seconds else 0.0


def collective_bytes(
    parameters: int, *, stage: int, size: int, accumulation: int, gathers: int
) -> dict[str, int]:
    """Return the bytes of the whole tensors in a step's collectives, by kind.

    As in DeepSpeed 0.19.8 (`tests/engine/test_traffic.py`): gradients in the precision of the
    passes, all-reduced once a step (stages 0 and 1) or once a pass (2), or reduce-scattered once a
    pass (3). Stages 1 and 2 gather the weights once a step, stage 3 `gathers` times. `size` is the
    bytes of an element in the passes.
    """
    whole = size * parameters
    if stage < 3:
        gathered = {"all_gather": whole} if stage else {}
        return {"all_reduce": whole * (accumulation if stage == 2 else 1), **gathered}
    return {"reduce_scatter": whole * accumulation, "all_gather": whole * gathers}


def gathers_a_step(loaded: LoadedRun, *, zero: ZeroConfig, passes: int) -> int:
    """Return how often ZeRO-3 gathers the whole model in a step.

    Once if weights stay until the next update (`gather_once_a_step`); once a pass if they stay from
    the forward to the backward pass; twice a pass if they are offloaded and exceed what DeepSpeed
    then keeps (`config/deepspeed.py`) or come from copies inside the nodes, and then once more if
    blocks are recomputed.
    """
    shape, settings = loaded.shape, loaded.fragment.get("zero_optimization", {})
    if settings.get("stage3_param_persistence_threshold", 0) >= shape.vocabulary * shape.width:
        return 1
    if zero.partition == "node":
        return passes * (3 if loaded.config.model.activation_checkpointing else 2)
    times = 3 if loaded.config.model.activation_checkpointing else 1
    between = count_parameters(shape).total * times
    keeps = zero.offload_parameters == "none" or between <= LIVE_PARAMETERS
    return passes * (1 if keeps else 2)
