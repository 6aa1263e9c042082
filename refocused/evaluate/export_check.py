"""Whether an exported folder is the model that was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from refocused.evaluate.load_model import build_network, load_network
from refocused.evaluate.model_weights import ModelWeights
from refocused.evaluate.safetensors_files import TORCH_DTYPES, Dtype
from refocused.models.causal_lm import CausalLM
from refocused.system.errors import CheckpointError

CHECKED_TOKENS = 64
STRIDE = 7919  # a prime, so that the checked tokens are spread over the vocabulary
TOLERANCE = 1e-4  # of the largest logit, in float32: sums are ordered by the shapes of products


def largest_difference(weights: ModelWeights, folder: Path, *, dtype: Dtype) -> float:
    """Load an export as anybody would; return how far its logits are from the step's own.

    Every tensor has to be the step's, rounded, bit for bit. The logits are compared, in float32 and
    as a share of the largest, with those of the model that was trained: our head, padding rows
    and all, out of weights that are rounded alike.

    Raises:
        CheckpointError: A tensor or the logits differ.
    """
    length = min(CHECKED_TOKENS, int(weights.config.max_position_embeddings))
    ids = (torch.arange(length) * STRIDE % int(weights.config.vocab_size)).unsqueeze(0)
    wanted = _logits_as_trained(weights, ids, dtype=dtype)
    found = _logits_of_folder(weights, ids, folder, dtype=dtype)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCE:  # so that NaN fails too
        raise _differs(f"its logits are {difference:.1e} of the largest one away")
    return difference


def _logits_as_trained(weights: ModelWeights, ids: Tensor, *, dtype: Dtype) -> Tensor:
    """Return the logits `[1, T, V]` of the step's model, in float32."""
    kind, inner = TORCH_DTYPES[dtype], weights.weights
    tensors = {name: inner.tensor(name, dtype=kind).float() for name in inner.shapes}
    network = build_network(weights.padded, tensors, dtype="fp32")
    model = CausalLM(network, chunk_tokens=1)
    with torch.no_grad():
        return model.logits(ids)[..., : int(weights.config.vocab_size)].clone()


def _logits_of_folder(weights: ModelWeights, ids: Tensor, folder: Path, *, dtype: Dtype) -> Tensor:
    """Return the logits `[1, T, V]` of an export, in float32, after a look at each tensor."""
    try:
        network = load_network(folder, dtype="fp32")
    except (OSError, ValueError) as error:
        raise _differs(f"transformers cannot load it ({error})") from None
    found = dict(network.named_parameters()) | dict(network.named_buffers())
    for name in weights.shapes:
        if not torch.equal(found[name], weights.tensor(name, dtype=TORCH_DTYPES[dtype]).float()):
            raise _differs(f"its {name} is another")
    with torch.no_grad():
        logits: Tensor = network(ids).logits
    return logits


def _differs(how: str) -> CheckpointError:
    return CheckpointError(
        f"The exported model is not the one that was trained: {how}. The export is removed. Please "
        "report this with the versions of torch and transformers."
    )
