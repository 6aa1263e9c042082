"""Derive the settings of a run from the depth of its model, by nanochat's rules (pure).

nanochat, commit 92d63d4 (July 2026): `scripts/base_train.py` derives tokens, batch, rates and decay
from the depth, and `nanochat/gpt.py` the width's share of the rates. All was measured there at
depth 12, with 2^19 tokens a step, and is scaled from it.
"""

import json
import math
from typing import Any

from refocused.config import shipped_files
from refocused.config.optimization import RMS_OF_ADAMW

HEAD_WIDTH, WIDTH_A_LAYER = 128, 64
REFERENCE_DEPTH, REFERENCE_WIDTH, REFERENCE_BATCH = 12, 768, 2**19  # tokens of a step
TOKENS_A_PARAMETER = 12  # of matrices and head
BATCH_POWER = 0.383  # Bergsma et al. 2025, Power Lines (arXiv 2505.13738)
MATRIX_LR, MATRIX_DECAY, EMBEDDING_LR, HEAD_LR = 0.02, 0.28, 0.3, 0.008

Rules = dict[str, tuple[Any, str]]  # by setting: its value, and the rule that it follows from


def width_of(depth: int) -> int:
    """Return the width of a model, a multiple of the width of a head."""
    return -(-depth * WIDTH_A_LAYER // HEAD_WIDTH) * HEAD_WIDTH


def scaling_parameters(depth: int, vocabulary: int) -> int:
    """Return the parameters that the tokens follow from: the blocks' matrices and the head.

    A block has 12 W^2 of them: 4 of attention, 8 of the feed-forward part.
    """
    return 12 * depth * width_of(depth) ** 2 + vocabulary * width_of(depth)


def model_of(depth: int, *, vocabulary: int) -> dict[str, Any]:
    """Return the transformers configuration of nanochat's model (October 2025) of a depth."""
    model: dict[str, Any] = json.loads((shipped_files() / "models/nanochat_d12.json").read_bytes())
    width = width_of(depth)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // HEAD_WIDTH)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": vocabulary}
    return model | heads | sizes | {"num_hidden_layers": depth}


def derive(depth: int, *, vocabulary: int, sequence_length: int) -> Rules:
    """Return the settings of a depth with their rules."""
    width, parameters = width_of(depth), scaling_parameters(depth, vocabulary)
    tokens = TOKENS_A_PARAMETER * parameters
    horizon = parameters / scaling_parameters(REFERENCE_DEPTH, vocabulary)  # D / D_ref
    batch = 2 ** round(math.log2(REFERENCE_BATCH * horizon**BATCH_POWER))
    batch = max(batch, sequence_length)
    steps, root = max(1, tokens // batch), math.sqrt(batch / REFERENCE_BATCH)
    by_batch, by_width = f"x sqrt({batch:,} / 2^19)", f"x sqrt(768 / {width})"
    scale, size = root * math.sqrt(REFERENCE_WIDTH / width), RMS_OF_ADAMW * math.sqrt(width)
    there, of_head, initial = "as there", "of the head, as there", "initial weights as there"
    settings: Rules = {
        "run.steps": (steps, f"12 x {parameters / 1e6:,.1f} M parameters of matrices and head"),
        "batch.global_batch_size": (
            batch // sequence_length,
            f"{batch:,} tokens: 2^19 x (D / D of depth 12 = {horizon:.3g})^{BATCH_POWER}, rounded",
        ),
        "optimizer.kind": ("muon", there),
        "optimizer.matrix_lr": (MATRIX_LR * root / size, f"{MATRIX_LR} {by_batch} / {size:.3g}"),
        "optimizer.embedding_lr": (EMBEDDING_LR * scale, f"{EMBEDDING_LR} {by_batch} {by_width}"),
        "optimizer.lr": (HEAD_LR * scale, f"of the head: {HEAD_LR} {by_batch} {by_width}"),
        "optimizer.betas": ([0.8, 0.96], of_head),
        "optimizer.embedding_betas": ([0.8, 0.995], there),
        "optimizer.eps": (1e-10, there),
        "optimizer.matrix_decay": (
            MATRIX_DECAY * root / horizon * size,  # a step's is multiplied by matrix_lr
            f"{MATRIX_DECAY} {by_batch} / {horizon:.3g} x {size:.3g}: constant B / (lr decay D)",
        ),
        "optimizer.weight_decay": (0.01, of_head),
        "optimizer.embedding_decay": (0.001, there),
        "optimizer.decay_schedule": ("cosine", "to 0; there of the matrices only"),
        "optimizer.cautious_decay": (True, there),
        "optimizer.normuon": (True, there),
        "optimizer.momentum": (0.97, there),
        "optimizer.momentum_warmup_steps": (min(400, steps), "from 0.85, as there"),
        "optimizer.momentum_end": (0.9, "while the rate decays, as there"),
        "optimizer.clip": (0, "none, as there"),
        "schedule.kind": ("wsd", "warmup, constant, decay"),
        "schedule.warmup_steps": (min(40, steps // 10), "40, or a tenth of the steps"),
        "schedule.decay": ("linear", there),
        "schedule.decay_fraction": (0.65, there),
        "schedule.min_lr_ratio": (0.05, there),
        "model.embedding_std": (0.8, initial),
        "model.head_std": (0.001, initial),
        "model.matrix_init": ("fan_in", "as there, where one of six matrices begins at 0.4 of it"),
        "model.zero_projections": (True, initial),
    }
    digits = {name: float(f"{of[0]:.3g}") for name, of in settings.items() if type(of[0]) is float}
    return {name: (digits.get(name, value), rule) for name, (value, rule) in settings.items()}
