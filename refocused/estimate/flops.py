"""Parameters and FLOPs of a model, in total and by block, and what its recall costs."""

import dataclasses
import math

from refocused.config.load_run import LoadedRun
from refocused.config.model_shape import Attention, Eigenstates, ModelShape, Recall, Resonators

CELLS = 2  # of a block of the ten family at each scale
MEMORY_CHUNK = 128  # tokens of a chunk of a memory
CHUNKS_TOGETHER = 64  # whose states are one product


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterCount:
    """The parameters of a model by part; `padding` counts the rows beyond the vocabulary."""

    tokens: int
    positions: int
    blocks: int
    final_norm: int
    head: int  # 0 if tied to the token embedding
    padding: int
    matrices: int  # of the blocks' linear layers, part of `blocks`: those that Muon updates

    @property
    def total(self) -> int:
        """All parameters without padding."""
        return self.without_embeddings + self.tokens + self.positions + self.head

    @property
    def allocated(self) -> int:
        """All parameters in memory, with padding."""
        return self.total + self.padding

    @property
    def without_embeddings(self) -> int:
        """Blocks and final norm, without embeddings and head."""
        return self.blocks + self.final_norm


def count_parameters(shape: ModelShape, *, vocabulary_multiple: int = 1) -> ParameterCount:
    """Count a model's parameters, with the embedding's rows padded to a multiple."""
    width = shape.width
    rows = shape.padded_vocabulary(vocabulary_multiple) - shape.vocabulary
    return ParameterCount(
        tokens=shape.vocabulary * width,
        positions=shape.max_length * width if shape.learned_positions else 0,
        blocks=sum(kind.layers * _block_parameters(kind) for kind in shape.kinds),
        final_norm=shape.record.norm_vectors * width,
        head=0 if shape.tied else shape.vocabulary * width,
        padding=rows * width * (1 if shape.tied else 2),
        matrices=sum(kind.layers * _linear_elements(kind) for kind in shape.kinds),
    )


def count_of_run(loaded: LoadedRun) -> ParameterCount:
    """Count the parameters of a run's model, with its padding."""
    return count_parameters(
        loaded.shape, vocabulary_multiple=loaded.config.model.vocabulary_multiple
    )


def _block_parameters(shape: ModelShape) -> int:
    """Count the parameters of one block; all blocks of the shape are of one kind.

    With D the width: two norms of 2, 1 or 0 vectors, the feed-forward part's two or three matrices
    (three with a gate) and their biases, and

    * attention: matrices D x Q (queries, output) and D x K (keys, values), their biases, and the
      norms of a query head and a key head;
    * resonance: gate and output (D x D, with biases), magnitude and phase of F resonators for each
      channel (2 F D), interference (F x F), damping and frequency (2 F);
    * ten, for each scale two cells of K modes: complex input and real output (3 K D), coupling
      (K x K), decay and frequency (2 K);
    * before and beside both, W taps of a convolution (W D), and a memory of H heads: queries, keys,
      values and output (4 D x D, one bias), decay and write of each head (with biases).
    """
    width, inner, mixer, record = shape.width, shape.ffn_width, shape.mixer, shape.record
    if isinstance(mixer, Attention):
        others = (mixer.query_width + 2 * mixer.key_width + width) * mixer.bias
        others += 2 * record.head_norm_vectors * mixer.head_width
    else:
        modes = mixer.count**2 + 2 * mixer.count
        if isinstance(mixer, Eigenstates):
            others = len(mixer.scales) * CELLS * (3 * mixer.count * width + modes)
        else:
            others = 2 * mixer.count * width + modes + 2 * width
        others += (mixer.recall.taps + (mixer.recall.memory_heads > 0)) * width
    biases = ((record.ffn_matrices - 1) * inner + width) * shape.ffn_bias
    return _linear_elements(shape) + others + biases + 2 * record.norm_vectors * width


def block_elements(shape: ModelShape) -> float:
    """Count the elements of one block's matrices that every token is multiplied by.

    A matrix applied to averages of s tokens counts 1/s of its elements.
    """
    elements: float = _linear_elements(shape)
    if isinstance(shape.mixer, Eigenstates):
        elements += 3 * modes_a_token(shape.mixer) * shape.width
    return elements


def _linear_elements(shape: ModelShape) -> int:
    """Count the elements of the linear layers' matrices of one block."""
    width, mixer = shape.width, shape.mixer
    mixing = shape.record.ffn_matrices * width * shape.ffn_width
    if isinstance(mixer, Attention):
        return mixing + 2 * width * (mixer.query_width + mixer.key_width)
    if isinstance(mixer, Resonators):  # the matrices of eigenstates are no layers
        mixing += 2 * width**2
    if heads := mixer.recall.memory_heads:
        mixing += 5 * width**2 + 2 * heads * width
    return mixing


def modes_a_token(mixer: Eigenstates, *, averaged: bool = True) -> float:
    """Count the modes of a block; if `averaged`, modes on averages of s tokens count 1/s."""
    return CELLS * mixer.count * sum(1 / scale if averaged else 1 for scale in mixer.scales)


def flops_per_token(shape: ModelShape, *, sequence_length: int) -> float:
    """Return the FLOPs of one token's forward and backward pass in sequences of T tokens.

    6 N plus the sequence mixer (Chowdhery et al. 2022, PaLM, appendix B). N counts the elements of
    matrix products, with the head and without look-ups; recomputation is not counted.

    Attention is counted in full, not its causal half: 12 Q T, with Q the width of all queries. A
    convolution by FFT transforms input and output of each channel, 2 T real numbers each (2.5 n
    log2 n FLOPs for n numbers), and multiplies T complex ones (6 FLOPs); the backward pass does so
    twice. Its kernel, shared by all sequences of a micro-batch, is not counted. A mode takes a
    complex product and sum (8 FLOPs) three times: the FLOPs of the recurrence, not of its chunked
    form. So does each element of a memory's state (5 FLOPs: decay, write, read) and each tap of a
    short convolution (2 FLOPs).
    """
    flops = 6.0 * shape.vocabulary * shape.width
    for kind in shape.kinds:
        mixer = kind.mixer
        if isinstance(mixer, Attention):
            mixing = 12.0 * mixer.query_width * sequence_length
        else:
            if isinstance(mixer, Eigenstates):
                mixing = 3.0 * 8.0 * modes_a_token(mixer)
            else:
                transforms = 2 * 2.5 * 2 * math.log2(2 * sequence_length)
                mixing = 3.0 * kind.width * (transforms + 6)
            heads = mixer.recall.memory_heads
            in_memory = 5 * kind.width / heads if heads else 0
            mixing += 3.0 * kind.width * (2 * mixer.recall.taps + in_memory)
        flops += kind.layers * (6.0 * block_elements(kind) + mixing)
    return flops


def possible_mfu(loaded: LoadedRun) -> float:
    """Return the MFU of a run whose GPUs are never below their peak.

    Attention is counted in full, but causal kernels do half of it, and little of it where documents
    are masked. Products of blocks in 8 bits are twice as fast; MFU stays a share of the bf16 peak,
    so that runs can be compared.
    """
    config, length = loaded.config, loaded.config.model.sequence_length
    counted = done = flops_per_token(loaded.shape, sequence_length=length)
    for kind in loaded.shape.kinds:
        if isinstance(kind.mixer, Attention):
            spared = 1.0 if config.data.mask_documents else 0.5
            done -= spared * kind.layers * 12.0 * kind.mixer.query_width * length
        if config.precision.fp8 != "none":
            done -= kind.layers * 3.0 * block_elements(kind)
    return counted / done


def mfu_fraction(
    tokens_per_second: float, *, flops_per_token: float, gpus: int, peak_flops: float | None
) -> float | None:
    """Return the model FLOPs utilization: FLOPs of the model per FLOPs of the GPUs' bf16 peak.

    `tokens_per_second` is that of all GPUs, `peak_flops` the peak of one GPU in FLOP/s (None:
    unknown).
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (gpus * peak_flops)


@dataclasses.dataclass(slots=True)
class RecallCost:
    """Amounts of a block's short convolution and memory (`models/recall.py`), for all sequences.

    Fitted to what autograd keeps, and what operations read and write, of blocks with 2 and 4 heads
    in passes of 16 and of 32 bits (`tests/estimate`). A backward pass computes twice the FLOPs.
    """

    kept_a_token: float = 0.0  # bytes until the backward pass
    kept: float = 0.0  # bytes of the states between chunks
    working: float = 0.0  # bytes, while a block is differentiated
    products: float = 0.0  # FLOPs forward, in the precision of the passes
    exact: float = 0.0  # FLOPs forward, in float32
    forward_bytes: float = 0.0  # moved
    backward_bytes: float = 0.0  # moved


def recall_cost(recall: Recall, *, width: int, size: int, rows: int, length: int) -> RecallCost:
    """Return the cost of `rows` sequences of `length` tokens with elements of `size` bytes.

    The convolution keeps its padded input. For each token the memory keeps queries, keys and values
    with their softmaxes and copies in heads' order, a row of a chunk's scores and decays, and the
    gates; for each chunk a state in float32 and in the precision of the pass.
    """
    tokens, cost = rows * length, RecallCost()
    if recall.taps:
        cost.kept_a_token = size * width
        cost.forward_bytes = tokens * width * size * (3.0 * recall.taps + 2)
        cost.backward_bytes = tokens * width * size * (13.0 * recall.taps + 2)
    if heads := recall.memory_heads:
        chunk, head = min(MEMORY_CHUNK, length), width / heads
        chunks = -(-length // chunk)
        cost.kept_a_token += 12 * size * width + heads * (100 + (8 + size) * chunk)
        together = min(chunks, CHUNKS_TOGETHER)
        cost.kept = rows * heads * (chunks + 1) * ((8 + size) * head**2 + 16 * together)
        cost.working = 8.0 * tokens * heads * chunk
        cost.products = 4.0 * tokens * width * (chunk + head)
        cost.exact = 2.0 * rows * heads * chunks / together * ((together + 1) * head) ** 2
        cost.forward_bytes += tokens * ((42 * size + 57) * width + 32 * heads * chunk)
        cost.backward_bytes += tokens * ((133 * size + 65) * width + 60 * heads * chunk)
    return cost
