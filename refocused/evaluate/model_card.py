"""The model card of an export: what the model is, and what it was trained on, for how much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refocused.checkpoints.resume.step_contents import checked_trainer
from refocused.checkpoints.step.step_directory import read_mapping
from refocused.evaluate.model_weights import TRAINED_LENGTH, ModelWeights
from refocused.evaluate.modeling_file import modeling_name
from refocused.evaluate.safetensors_files import Dtype


def model_card(weights: ModelWeights, *, dtype: Dtype, parameters: int) -> str:
    """Write the README.md of an exported model.

    Args:
        weights: Of the step.
        dtype: What the exported weights are rounded to.
        parameters: Of the exported model.
    """
    manifest, config = weights.step.manifest, weights.config
    step = weights.step
    trainer = checked_trainer(read_mapping(step.trainer), where=str(step.path))
    cost = trainer["cost_usd"]
    rows = {
        "run": f"{manifest.run}, step {manifest.step:,}",
        "saved": manifest.created.isoformat(timespec="seconds"),
        "architecture": f"{config.model_type}, {parameters:,} parameters, stored as {dtype}",
        "context": _context(config),
        "vocabulary": f"{config.vocab_size:,} ids, {_tokenizer(weights.settings)}",
        "tokens": f"{manifest.tokens:,} trained on",
        "data": f"fingerprint {manifest.data_fingerprint}, order {manifest.data_order}",
        "training loss": _loss(manifest.loss),
        "validation loss": _loss(manifest.validation_loss),
        "time": f"{trainer['seconds'] / 3600:,.2f} h until this step was saved",
        "cost": "unknown" if cost is None else f"${cost:,.2f} until this step was saved",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    name = modeling_name(config)
    code = "" if name is None else f"It needs torch, transformers 5 and its code, {name}.py.\n\n"
    consent = "" if name is None else ", trust_remote_code=True"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {manifest.run}

A causal language model, pre-trained from scratch; it is not tuned to follow instructions.

| | |
|---|---|
{table}

{code}```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{consent})
tokenizer = AutoTokenizer.from_pretrained("."{consent})
```
"""


def _context(config: Any) -> str:
    trained, longest = getattr(config, TRAINED_LENGTH), config.max_position_embeddings
    fewer = f", of {longest:,} that it takes" if trained < longest else ""
    return f"trained on {trained:,} tokens at once{fewer}"


def _tokenizer(settings: Mapping[str, Any]) -> str:
    return f"tokenizer {settings['data'].get('tokenizer', 'unknown')}"


def _loss(loss: float | None) -> str:
    """Write a loss in nats a token, with its perplexity."""
    return (
        "not known"
        if loss is None
        else f"{loss:.4f} (perplexity {math.exp(min(loss, 100.0)):,.2f})"
    )
