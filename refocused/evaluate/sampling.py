"""How the next token is drawn: the settings, their checks, and transformers' form of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from refocused.system.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What is asked of a model for every prompt.

    Attributes:
        tokens: Most tokens to write.
        temperature: What logits are divided by; 0 takes the likeliest token every time.
        top_k: Draw from so many likeliest tokens; 0: from all.
        top_p: Draw from the likeliest tokens that together have this probability.
        min_p: Draw from the tokens that have this share of the likeliest one's probability.
        repetition_penalty: What the logits of tokens that were seen are divided by (positive ones)
            or multiplied by; 1: nothing.
        seed: Of the draws; a text also depends on the batch that it was written in.
        samples: Texts for each prompt.
        stops: Where one of these is written, the text ends before it.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    samples: int = 1
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: A setting is outside its range.
        """
        right = {
            "tokens": self.tokens >= 1,
            "temperature": 0 <= self.temperature < math.inf,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "seed": 0 <= self.seed < 2**63,
            "samples": self.samples >= 1,
        }
        for name, is_right in right.items():
            if not is_right:
                value = getattr(self, name)
                raise ConfigError(f"{name} = {value} is outside its range: {_RANGES[name]}.")
        if not all(self.stops):
            raise ConfigError("A stop string is empty. Give the text that ends what is written.")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"samples = {self.samples} at temperature = 0 would be one text {self.samples} "
                "times. Raise the temperature, or ask for one."
            )


_RANGES = {
    "tokens": "a whole number from 1",
    "temperature": "a number from 0",
    "top_k": "a whole number from 1, or 0 for all tokens",
    "top_p": "above 0 and at most 1",
    "min_p": "from 0 to 1",
    "repetition_penalty": "above 0, where 1 changes nothing",
    "seed": "a whole number from 0",
    "samples": "a whole number from 1",
}


def generation_config(
    sampling: Sampling, *, tokens: int, ends: Sequence[int], unknown: Sequence[int]
) -> Any:
    """Return transformers' form of the settings.

    Args:
        sampling: What is asked for.
        tokens: Most tokens to write, in place of the settings' own.
        ends: Ids that end a text.
        unknown: Ids that mean nothing to the tokenizer, and are never drawn.
    """
    from transformers import GenerationConfig

    drawn = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        num_return_sequences=sampling.samples,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,  # comes after a text's end, and is cut off
        suppress_tokens=list(unknown) or None,
        use_cache=True,
        **(drawn if sampling.temperature > 0 else {}),
    )
