"""What a block's short convolution and memory keep, compute and move (`models/recall.py`)."""

import dataclasses

from refocused.config.model_shape import Recall

MEMORY_CHUNK = 128  # tokens of a chunk of a memory
CHUNKS_TOGETHER = 64  # whose states are one product


@dataclasses.dataclass(slots=True)
class RecallCost:
    """Amounts of one block, without the memory's projections, for all windows of a pass.

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
    """Return the cost of `rows` windows of `length` tokens with elements of `size` bytes.

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
