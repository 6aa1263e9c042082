"""The work of a model, by arithmetic alone: parameters, FLOPs, and their share of a GPU's peak."""

from __future__ import annotations

import dataclasses

from refocused.config.model_shape import ModelShape
from refocused.estimate.blocks import block_elements, block_parameters, mixing_flops

# Above this share of a GPU's peak no training of a whole language model has been measured.
CREDIBLE_MFU = 0.60
# With products of 8 bits, twice as fast, in three quarters of the work (GPT-2 "1B" at T 2048); the
# share stays one of the bf16 peak, so that runs can be compared.
CREDIBLE_MFU_IN_FP8 = CREDIBLE_MFU / (1 / 4 + 3 / 4 / 2)


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterCount:
    """The elements of a model, by their place.

    Attributes:
        tokens: Token embedding, the shape's own rows.
        positions: Learned positions; 0 where there are none.
        blocks: All blocks.
        final_norm: The norm before the head.
        head: Output matrix; 0 when it is the token embedding.
        padding: Rows beyond the vocabulary, in the embedding and in an untied head.
    """

    tokens: int
    positions: int
    blocks: int
    final_norm: int
    head: int
    padding: int

    @property
    def total(self) -> int:
        """All that mean something: without the padding."""
        return self.without_embeddings + self.tokens + self.positions + self.head

    @property
    def allocated(self) -> int:
        """All that are kept in memory and updated: with the padding."""
        return self.total + self.padding

    @property
    def without_embeddings(self) -> int:
        """Blocks and final norm: without token and position embeddings and without the head."""
        return self.blocks + self.final_norm


def count_parameters(shape: ModelShape, *, vocabulary_multiple: int = 1) -> ParameterCount:
    """Count a model's parameters exactly.

    Args:
        shape: The model.
        vocabulary_multiple: The embedding's rows are padded up to a multiple of this.
    """
    width = shape.width
    rows = shape.padded_vocabulary(vocabulary_multiple) - shape.vocabulary
    return ParameterCount(
        tokens=shape.vocabulary * width,
        positions=shape.max_length * width if shape.learned_positions else 0,
        blocks=shape.layers * block_parameters(shape),
        final_norm=2 * width,
        head=0 if shape.tied else shape.vocabulary * width,
        padding=rows * width * (1 if shape.tied else 2),
    )


def flops_per_token(shape: ModelShape, *, sequence_length: int) -> float:
    """Return the FLOPs of one token's forward and backward pass.

    6 N and what positions take to meet (Chowdhery et al. 2022, PaLM, appendix B): N counts the
    elements of matrix products, the head once and no look-up; recomputation is not counted.

    Args:
        shape: The model.
        sequence_length: Tokens of a window, T.
    """
    in_products = shape.layers * block_elements(shape) + shape.vocabulary * shape.width
    mixing = shape.layers * mixing_flops(shape, sequence_length=sequence_length)
    return 6.0 * in_products + mixing


def mfu_fraction(
    tokens_per_second: float, *, flops_per_token: float, gpus: int, peak_flops: float | None
) -> float | None:
    """Return the share of the GPUs' peak that does the model's own work.

    Args:
        tokens_per_second: Of all GPUs together.
        flops_per_token: From the function of that name.
        gpus: GPUs of the run.
        peak_flops: Dense bf16 peak of one GPU in FLOP/s; None: unknown, and so is the result.
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (gpus * peak_flops)
