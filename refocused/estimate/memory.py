"""Memory of a training step on one GPU: states, gathered weights, activations.

Activations are the tensors that autograd keeps in eager mode, each once. Most grow with the tokens
of a micro-batch; kernels and tables of powers are shared by its sequences.
"""

import dataclasses
import math
from typing import NamedTuple

from refocused.config.deepspeed import reduce_bucket_elements
from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import Attention, Eigenstates, ModelShape, Recall, Resonators
from refocused.config.optimization import Dtype, OptimizerKind, ZeroConfig
from refocused.config.outputs import CheckpointConfig
from refocused.config.run_config import RunConfig
from refocused.estimate.flops import (
    CELLS,
    ParameterCount,
    count_of_run,
    count_parameters,
    recall_cost,
)

DEFAULT_CHUNK = 64  # of the ten family, unless the shape has its own
FINE = 256  # powers of a resonator come from tables of so many fine and T / 256 coarse ones
TABLE_BYTES = 40  # kept of such a table's element: angle, size, cosine, sine in float64, and both
SPECTRUM_BYTES = 2**28  # of one spectrum: more channels are transformed in turns
SPECTRA = 5  # that live at once while a convolution is differentiated (of several sequences, 4)
_KEPT_BY_ACTIVATION = 2  # of the inner width, in blocks without attention: input and output
_STATISTICS = 16  # of two norms, for each token: mean and deviation in float32
# Memory outside tensors (CUDA context, NCCL's buffers, cuBLAS's workspace), and the share that
# torch's allocator loses to fragmentation. Assumed, not measured here.
CONTEXT_BYTES = 1.5 * 2**30
LOST_SHARE = 0.05
_CAPPED_COLUMNS = 4096  # logits of a row whose cap is differentiated at once (`head_loss.py`)
_MASK_BLOCK = 128  # tokens on a side of a block of FlexAttention's mask (`models/attention.py`)
KEPT_BESIDE = 2  # the best step and the last one of an interruption
BEING_WRITTEN = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StateMemory:
    """Memory of the training state on one rank, in bytes, without activations."""

    gpu: int  # during the optimizer's step
    in_pass: int  # on the device at the start of a step's last pass
    gathered: int  # additional, while ZeRO-3 has gathered all parameters
    host: int
    nvme: int
    buckets: int  # of DeepSpeed, during a pass


def state_memory(
    parameters: int,
    *,
    zero: ZeroConfig,
    dtype: Dtype,
    ranks: int,
    ranks_here: int | None = None,
    matrices: int = 0,
) -> StateMemory:
    """Return the memory of parameters, gradients and optimizer states on one rank.

    Bytes per element: 2 (16-bit runs) or 4 for parameters; 4 for the sum of gradients (2 in a
    16-bit run without ZeRO); 8 for AdamW's moments, 4 for Muon's of its `matrices`, which it
    updates one by one; 4 for the float32 master copy, which ZeRO also keeps in float32 runs; and 4
    for a copy of the gradient during the step of a 16-bit run
    (Rajbhandari et al. 2020, ZeRO, 3.1, with float32 sums, plus that last copy). Stage 1 partitions
    the optimizer states, 2 also the gradients, 3 also the parameters. Below stage 2 every rank has
    all gradients of a pass, in 16-bit runs twice: the last pass's and the float32 sum. DeepSpeed
    0.19.8's copies and buckets were counted on one and two ranks (`tests/estimate/test_memory.py`).
    """
    size, stage = 4 if dtype == "fp32" else 2, zero.stage
    share = -(-parameters // ranks)
    weights = size * (share if stage == 3 else parameters)
    if zero.partition == "node":  # the second copy; an unknown node has two ranks at least
        weights += size * -(-parameters // (ranks_here or 2))
    gradients = (4 if stage else size) * (share if stage >= 2 else parameters)
    offloads = zero.offload_optimizer != "none"
    step_copy = 4 if size == 2 or (offloads and stage >= 2) else 0
    spread, moved = (share, -(-matrices // ranks)) if stage else (parameters, matrices)
    optimizer = (8 + (4 if size == 2 or stage else 0)) * spread - 4 * moved
    at = {"none": 0, "cpu": 0, "nvme": 0}
    at[zero.offload_parameters] += weights
    at[zero.offload_optimizer] += optimizer + step_copy * spread
    in_pass, buffer = {
        0: (size * parameters, 0),
        1: ((4 + size) * parameters if size == 2 else 4 * parameters, 0 if size == 2 else 8),
        2: (4 * share, size if size == 2 else 2 * size),
        3: (4 * share, size),
    }[stage]
    # Partitioned gradients are in host memory if the optimizer is. Below stage 3 DeepSpeed also
    # keeps copies of gradients and new weights in the type of the passes.
    if offloads and stage == 2:
        gradients = (4 + size) * share
    elif offloads and stage == 1 and size == 2:
        at["cpu"] += size * (parameters + share)
    at["cpu" if offloads and stage >= 2 else "none"] += gradients
    if offloads:
        in_pass = in_pass if stage < 2 else 0
    else:
        in_pass += optimizer
    return StateMemory(
        gpu=at["none"],
        in_pass=in_pass + (weights if zero.offload_parameters == "none" else 0),
        gathered=size * parameters if stage == 3 else 0,
        host=at["cpu"],
        nvme=at["nvme"],
        buckets=buffer * reduce_bucket_elements(parameters),
    )


def checkpoint_bytes(shape: ModelShape, config: RunConfig, *, stage: int) -> int:
    """Return the bytes of a checkpoint without its small files.

    Float32 masters and two moments, of Muon's matrices one; below ZeRO-3 also the weights of the
    passes, which at stage 0 in float32 are the masters.
    """
    count = count_parameters(shape, vocabulary_multiple=config.model.vocabulary_multiple)
    is_exact = config.precision.resolved == "fp32"
    weights = {0: 0 if is_exact else 2, 3: 0}.get(stage, 4 if is_exact else 2)
    moments = 8 * count.allocated - 4 * _muons(count, config.optimizer.kind)
    return (4 + weights) * count.allocated + moments


def checkpoints_on_disk(saves: int, checkpoint: CheckpointConfig) -> int:
    """Return how many checkpoints of a run of so many saves the disk holds, the last one begun."""
    return min(saves, checkpoint.keep + KEPT_BESIDE + BEING_WRITTEN)


def _muons(count: ParameterCount, kind: OptimizerKind) -> int:
    """Return the parameters that Muon updates."""
    return count.matrices if kind == "muon" else 0


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a step on one rank, in bytes; `host` and `nvme` hold offloaded states."""

    states: int  # parameters, gradients and optimizer states on the device, during a pass
    gathered: int  # parameters of the whole model, which ZeRO-3 gathers for a pass
    peak: int  # of the device
    host: int
    nvme: int

    @property
    def activations(self) -> int:
        """Memory of the passes at the peak, with DeepSpeed's buffers."""
        return self.peak - self.states - self.gathered

    def fits(self, memory_bytes: float) -> bool:
        """Return whether the step fits into a device with so much memory."""
        return self.peak <= usable_bytes(memory_bytes)


def usable_bytes(memory_bytes: float) -> float:
    """Return how much of a device's memory tensors can have."""
    return memory_bytes * (1 - LOST_SHARE) - CONTEXT_BYTES


def plan_memory(
    loaded: LoadedRun,
    *,
    micro_batch_size: int,
    zero: ZeroConfig,
    ranks: int,
    ranks_here: int | None = None,
) -> MemoryPlan:
    """Plan the memory of a run's step.

    The peak is at one of three moments: at the end of the forward pass, with all activations and
    the head's; during the reduction of the first full bucket of gradients, when the blocks behind
    it have freed theirs; or in the optimizer's step.

    Args:
        micro_batch_size: Sequences of a pass.
        ranks_here: Ranks of a node; None: unknown.
    """
    count, dtype = count_of_run(loaded), loaded.config.precision.resolved
    parameters, bucket = count.allocated, reduce_bucket_elements(count.allocated)
    states = state_memory(
        parameters,
        zero=zero,
        dtype=dtype,
        ranks=ranks,
        ranks_here=ranks_here,
        matrices=_muons(count, loaded.config.optimizer.kind),
    )
    passing = activation_memory(loaded, micro_batch_size=micro_batch_size)
    gathered = states.gathered if ranks > 1 or zero.offload_parameters != "none" else 0
    kept = passing.blocks
    # Bytes for each element of a bucket: always, and while a full bucket is reduced. Stage 1 sums
    # in float32 and copies the sums, stage 2 copies them, stage 3 merges gradients in a bucket and
    # takes its share of the result in float32, twice if the passes compute in float32.
    size = 4 if dtype == "fp32" else 2
    of_stages: dict[int, tuple[float, float]] = {
        0: (0, 0),
        1: (0, 4 + size),
        2: (size if size == 2 else 0, size),
        3: (0, size + (8 if size == 4 else 4) / ranks),
    }
    early, flushed = of_stages[zero.stage]
    moments = (
        kept + passing.head,
        kept + passing.recomputed + early * bucket,
        kept * max(0.0, 1 - bucket / parameters) + (early + flushed) * bucket,
    )
    resident = states.in_pass + gathered + states.buckets
    peak = max(resident + max(moments), states.gpu + states.buckets)
    return MemoryPlan(states.in_pass, gathered, int(peak), states.host, states.nvme)


class _BlockMemory(NamedTuple):
    """Bytes that a block's mixing keeps: a token, for all sequences, and while differentiated."""

    a_token: float
    shared: float = 0.0
    working: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What a pass keeps on a rank, in bytes."""

    blocks: int  # from the forward to the backward pass, of all blocks
    head: int  # in the head, at the end of the forward pass
    recomputed: int  # of one block, while its gradient is taken


def activation_memory(loaded: LoadedRun, *, micro_batch_size: int) -> ActivationMemory:
    """Return the activations of a pass, with sdpa's attention.

    Compiled blocks keep as much with attention and up to 20 % less without it. Counted from what
    autograd saves in transformers 5.23's blocks and in ours: s bytes an element, and float32 for
    the norms' statistics, the attention's log-sum-exp of each head, and most of what mixes without
    attention. Dropout keeps a mask of one byte an element, as on a GPU.

    With masked documents on a GPU, dropout or a named kernel rule out FlexAttention and need a
    dense mask, which sdpa turns into numbers in each block.
    """
    shape, model = loaded.shape, loaded.config.model
    size = 4 if loaded.config.precision.resolved == "fp32" else 2
    tokens = micro_batch_size * model.slice_tokens
    mask, is_dense = 0, model.dropout > 0 or model.attention != "auto"
    if loaded.config.data.mask_documents:
        mask = mask_bytes(rows=micro_batch_size, length=model.sequence_length, is_dense=is_dense)
    dense_mask = size * mask if is_dense else 0
    kinds = []  # layers, what a block keeps, and more while its feed-forward part is differentiated
    for kind in shape.kinds:
        mixing = _mixing_memory(kind, size=size, rows=micro_batch_size, length=model.slice_tokens)
        drops_states = kind.record.dropouts != ("attention_dropout",)
        dropout_masks = 2 * kind.width if model.dropout > 0 and drops_states else 0
        a_token = int(mixing.a_token) + _STATISTICS + dropout_masks
        block = tokens * a_token + int(mixing.shared) + dense_mask
        if dense_mask and isinstance(kind.mixer, Attention):  # sdpa repeats shared keys and values
            block += 2 * size * tokens * (kind.mixer.query_width - kind.mixer.key_width)
        inner = (kind.record.ffn_matrices - 1) * kind.ffn_width
        exact = 4 * kind.width if kind.record.norm_vectors < 2 else 0  # RMSNorm: in float32
        backward = max(tokens * (size * (2 * kind.width + inner) + exact), int(mixing.working))
        kinds.append((kind.layers, block, backward))
    # The head's forward pass holds the norm's input and output, the gradients of the hidden states
    # and, in float32, of the weight, and a chunk's logits with their softmax in float32 if that is
    # another type or they are capped. The backward pass has no logits, scales both gradients in
    # place, and casts the weight's.
    rows = shape.padded_vocabulary(model.vocabulary_multiple)
    weight = rows * shape.width
    capped = 0 if shape.softcap is None else min(_CAPPED_COLUMNS, rows)
    a_row = size * rows + (4 * rows if size < 4 or capped else 0) + 4 * capped
    chunk = a_row * min(model.head_chunk_tokens, tokens)
    cast = size * weight if size < 4 else 0
    head = 3 * size * tokens * shape.width + 4 * weight + max(chunk, cast)
    if model.activation_checkpointing:
        entries = shape.layers * tokens * size * shape.width
        recomputed = max(block + backward for _, block, backward in kinds)
        return ActivationMemory(entries + mask, head, recomputed)
    mask = 0 if is_dense else mask  # of a dense mask the numbers are kept instead
    blocks = sum(layers * block for layers, block, _ in kinds)
    return ActivationMemory(blocks + mask, head, max(backward for *_, backward in kinds))


def mask_bytes(*, rows: int, length: int, is_dense: bool) -> int:
    """Return the bytes of the document masks of a pass.

    A dense mask has a byte for each pair of tokens. FlexAttention's has 8 bytes for each token, and
    four tables of its blocks with their counts, in 4 bytes each.
    """
    if is_dense:
        return rows * length**2
    blocks = -(-length // _MASK_BLOCK)
    return rows * (8 * length + 4 * 4 * blocks * (blocks + 1))


def _mixing_memory(shape: ModelShape, *, size: int, rows: int, length: int) -> _BlockMemory:
    mixer, width = shape.mixer, shape.width
    inner = size * _KEPT_BY_ACTIVATION * shape.ffn_width
    if not isinstance(mixer, Attention) and mixer.recall != Recall():
        cost = recall_cost(mixer.recall, width=width, size=size, rows=rows, length=length)
        plain = dataclasses.replace(shape, mixer=dataclasses.replace(mixer, recall=Recall()))
        others = _mixing_memory(plain, size=size, rows=rows, length=length)
        return _BlockMemory(
            others.a_token + cost.kept_a_token,
            others.shared + cost.kept,
            max(others.working, cost.working),
        )
    if isinstance(mixer, Resonators):
        # For each token the norms' inputs and outputs, the gate, the convolution's output, and the
        # product of the two; for all sequences the kernel [D, T], from the powers [2, F, T].
        tables = TABLE_BYTES * mixer.count * (min(FINE, length) + length / FINE)
        spectra = min(SPECTRUM_BYTES, 8 * rows * length * width)
        return _BlockMemory(
            7 * size * width + inner,
            4 * length * (width + 2 * mixer.count) + tables + 8 * 4 * mixer.count * width,
            SPECTRA * spectra + 4 * length * width,
        )
    if isinstance(mixer, Eigenstates):
        # For each token the norms' inputs and outputs; for each token of a scale, M modes: inputs
        # [2, M] in float32 and outputs in the precision of the pass; for each chunk the states of
        # the doubling; for all sequences the Toeplitz matrices [2, M, C, C + 1] in float32 and the
        # powers they are made of.
        modes = CELLS * mixer.count
        a_token, shared, working = 2.0 * size * width, 0.0, 0.0
        for scale in mixer.scales:
            tokens = max(1, length // scale)
            chunk = min(shape.settings.get("chunk_size", DEFAULT_CHUNK), tokens)
            rounds = math.ceil(math.log2(max(2, tokens / chunk)))
            means = size * width if scale > 1 else 0
            states = 8 * modes * (rounds + 2) / chunk
            a_token += (modes * (8 + size) + means + states) / scale
            toeplitz = 8 * modes * chunk * (chunk + 1)
            shared += toeplitz + TABLE_BYTES * modes * (chunk + 1) + 4 * 4 * modes * width
            working = max(working, 8 * modes * tokens * rows + toeplitz)
        return _BlockMemory(int(a_token) + 2 * size * width + inner, shared, working)
    kept = shape.bytes_a_token(shape.record.kept, size=size)
    sequential = not shape.settings.get("use_parallel_residual", True)  # GPT-NeoX
    return _BlockMemory(kept + size * width * sequential + 4 * mixer.heads)
