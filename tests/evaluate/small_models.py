"""Small untrained models of every family, with the bytes tokenizer."""

import functools
from pathlib import Path

import torch
from small_families import SHAPES

from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.model_weights import network_class
from refocused.models.families import transformers_config
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

CONTEXT = 64
ROWS = 300  # ids above 256 are padding
FAMILIES = {name: shape for name, shape in SHAPES.items() if name != "llama"}


@functools.cache
def bytes_tokenizer():
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=ROWS)
    return as_transformers(content, end_of_text_id=None, max_length=CONTEXT)


def small_model(family="gpt2", *, spread=0.2, **shape):
    """Build a model with weights wide enough for varied choices."""
    settings = FAMILIES[family] | {"initializer_range": spread} | shape
    config = transformers_config(settings, vocabulary=ROWS, dropout=0.0)
    torch.manual_seed(1)
    network = network_class(config)(config).eval()
    return LoadedModel(network, bytes_tokenizer(), Path(family), {})
