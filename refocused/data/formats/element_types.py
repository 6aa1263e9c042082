"""The element type of token ids: two bytes where the vocabulary allows it, four otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

SMALL_VOCABULARY = 1 << 16  # every id below it fits uint16


def element_type(vocabulary: int) -> np.dtype[Any]:
    """Return the element type of ids below `vocabulary`: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocabulary <= SMALL_VOCABULARY else "<u4")


def vocabulary_for(max_id: int) -> str:
    """Return what to do about ids that the model does not know."""
    return (
        "Set model.vocabulary to the size of the tokenizer that made the data, at least "
        f"{max_id + 1}"
    )
