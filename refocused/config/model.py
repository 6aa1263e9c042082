"""Settings of the model: which shape, how it is computed."""

from __future__ import annotations

from typing import Literal

from refocused.config.section import Count, CountOrAuto, Fraction, Section


class ModelConfig(Section):
    """The model of a run.

    Attributes:
        preset: Name of a shape in `config/models/NAME.json` (the transformers config form), or a
            path to such a file.
        vocabulary: Token ids the model knows: a number; `auto`, as many as `data.tokenizer` has,
            else as the data's `manifest.json` says, else as the shape; None, as the shape.
        sequence_length: Tokens a window trains on; at most what the shape allows.
        dropout: Probability at every dropout of the model; 0 in pre-training by default.
        vocabulary_multiple: The embedding's rows are padded up to a multiple of this; matrix
            units want 64 or 128. The padding is never a label.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its
            activations: about 30 % more time for about 80 % less activation memory.
        compile: `auto` compiles the blocks on GPUs, `on` on CPUs too, where it stops without a C++
            compiler; `off` runs them as written. If torch's compiler fails, a warning says why and
            they run as written. The batches of training and validation use it.
        attention: Kernel of attention: `auto` is the fastest of a timed trial on GPUs, and
            FlexAttention for masked documents; `flash`, which has no masks, is FlashAttention-3
            where it is installed and the GPU is a Hopper.
        head: How the loss is computed: `chunked` by torch's operations, `fused` by torch's own
            form, `kernel` by our Triton kernel; `auto` is the fastest of a timed trial on GPUs.
        head_chunk_tokens: Tokens whose logits exist at once in the loss.
    """

    preset: str
    vocabulary: CountOrAuto | None = None
    sequence_length: Count
    dropout: Fraction = 0.0
    vocabulary_multiple: Count = 128
    activation_checkpointing: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    attention: Literal["auto", "cudnn", "flash", "math"] = "auto"
    head: Literal["auto", "chunked", "fused", "kernel"] = "auto"
    head_chunk_tokens: Count = 2048
