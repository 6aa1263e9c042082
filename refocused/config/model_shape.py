"""Read the shape of a model from a transformers configuration."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from refocused.system.errors import ConfigError
from refocused.system.strict_json import MalformedError, parse_json

Family = Literal["gpt2", "gpt_neox", "resonance", "ten"]


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """A mixer by attention; GPT-2's projections always have biases."""

    heads: int
    bias: bool
    rotary_fraction: float | None  # of each head; None where positions are learned


@dataclasses.dataclass(frozen=True, slots=True)
class Resonators:
    """A mixer by a causal convolution with a sum of damped cosines."""

    count: int  # resonators of a block, F


@dataclasses.dataclass(frozen=True, slots=True)
class Eigenstates:
    """A mixer by a recurrence of complex modes."""

    count: int  # modes of a cell, K; a block has two cells at every scale
    scales: tuple[int, ...]  # tokens that are averaged before each of a block's recurrences


Mixer = Attention | Resonators | Eigenstates


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What the parameters and the FLOPs of a model follow from."""

    family: Family  # transformers' `model_type`
    vocabulary: int  # token ids of the model, V
    width: int  # of the residual stream, D
    layers: int  # blocks, L
    ffn_width: int  # inner size of the feed-forward part
    max_length: int  # longest sequence, T_max
    learned_positions: bool  # an embedding for each position up to T_max
    tied: bool  # the head shares the token embedding
    mixer: Mixer  # sequence mixer of each block
    settings: Mapping[str, Any] = dataclasses.field(repr=False, hash=False)  # the whole file

    def padded_vocabulary(self, multiple: int) -> int:
        """Return the embedding's rows: V rounded up to a multiple."""
        return -(-self.vocabulary // multiple) * multiple

    def with_vocabulary(self, vocabulary: int) -> ModelShape:
        """Return the same shape for another number of token ids."""
        settings = {**self.settings, "vocab_size": vocabulary}
        return dataclasses.replace(self, vocabulary=vocabulary, settings=settings)


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """The names of a family's settings, to read them and to recognize misspelt ones."""

    mixing: str  # heads, resonators or modes
    others: tuple[str, ...]
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    ffn_width: str = "intermediate_size"
    max_length: str = "max_position_embeddings"
    ties_by_default: bool = True

    def required(self) -> tuple[str, ...]:
        return ("vocab_size", self.width, self.layers, self.mixing, self.max_length)


# Far above every known model; larger ones take minutes to build, or their sizes overflow.
MOST_LAYERS = 1_000
LARGEST_WIDTH = 2**20
LARGEST_NUMBER = 2**31 - 1
MOST_SCALES = 16
MOST_SETTINGS = 1_000
_MOST = {
    **dict.fromkeys(("n_layer", "num_hidden_layers"), MOST_LAYERS),
    **dict.fromkeys(("n_embd", "hidden_size"), LARGEST_WIDTH),
}
_HEADS = ("n_head", "num_attention_heads")  # they share the width
_OURS = ("tie_word_embeddings", "layer_norm_eps", "initializer_range", "spectrum_length")
_NAMES = {
    "gpt2": _Names(
        "n_head",
        ("tie_word_embeddings", "activation_function", "layer_norm_epsilon"),
        width="n_embd",
        layers="n_layer",
        ffn_width="n_inner",
        max_length="n_positions",
    ),
    "gpt_neox": _Names(
        "num_attention_heads",
        (
            "tie_word_embeddings",
            "attention_bias",
            "hidden_act",
            "layer_norm_eps",
            "rotary_pct",
            "rope_parameters",
            "use_parallel_residual",
        ),
        ties_by_default=False,
    ),
    "resonance": _Names("num_resonators", _OURS),
    "ten": _Names("num_eigenstates", (*_OURS, "learned_positions", "scales", "chunk_size")),
}


def load_shape(file: Path) -> ModelShape:
    """Read a shape; raise ConfigError if the file is not JSON, and as `shape_from`."""
    try:
        settings = parse_json(file.read_bytes())
    except MalformedError as error:
        raise ConfigError(f"{file}: not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f'{file}: expected an object {{"model_type": ...}}.')
    return shape_from(settings, where=str(file))


def shape_from(settings: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the shape in a transformers configuration; `where` is named in errors.

    Raises:
        ConfigError: The family is unknown, or a number is missing, wrong or misspelt.
    """
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in _NAMES:
        raise ConfigError(
            f"{where}: model_type = {family!r:.80} is not supported. Families: {', '.join(_NAMES)}."
        )
    names = _NAMES[family]
    problems = _problems(settings, names)
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    count, width = settings[names.mixing], settings[names.width]
    learns_positions = bool(settings.get("learned_positions", True))
    mixer: Mixer = Resonators(count)
    if family == "gpt2":
        mixer, learns_positions = Attention(count, bias=True, rotary_fraction=None), True
    elif family == "gpt_neox":
        has_bias = bool(settings.get("attention_bias", True))
        mixer, learns_positions = Attention(count, has_bias, _rotary_fraction(settings)), False
    elif family == "ten":
        mixer = Eigenstates(count, tuple(settings.get("scales") or (1,)))
    return ModelShape(
        family=cast("Family", family),
        vocabulary=settings["vocab_size"],
        width=width,
        layers=settings[names.layers],
        ffn_width=settings.get(names.ffn_width) or 4 * width,
        max_length=settings[names.max_length],
        learned_positions=learns_positions,
        tied=bool(settings.get("tie_word_embeddings", names.ties_by_default)),
        mixer=mixer,
        settings=dict(settings),
    )


def _problems(settings: Mapping[str, Any], names: _Names) -> list[str]:
    if len(settings) > MOST_SETTINGS:
        return [f"it has {len(settings):,} settings; at most {MOST_SETTINGS:,} are allowed."]
    required = names.required()
    problems = [f"{name} is missing." for name in required if settings.get(name) is None]
    for name in (*required, names.ffn_width):
        value, most = settings.get(name), _MOST.get(name, LARGEST_NUMBER)
        if value is not None and (type(value) is not int or value < 1):
            problems.append(f"{name} = {value!r:.80}: expected a whole number of at least 1.")
        elif value is not None and value > most:
            problems.append(f"{name} = {value}: expected at most {most:,}.")
    # transformers ignores unknown names and takes its defaults instead.
    unused = [n for n in (*required, names.ffn_width, *names.others) if n not in settings]
    problems += [
        f"{name} is unknown to transformers. Did you mean {near}?"
        for name in settings
        for near in difflib.get_close_matches(name, unused, n=1, cutoff=0.8)
    ]
    scales = settings.get("scales") or [1]
    if "scales" in names.others and not (
        isinstance(scales, list)
        and len(scales) <= MOST_SCALES
        and all(type(scale) is int and 1 <= scale <= LARGEST_NUMBER for scale in scales)
    ):
        problems.append(
            f"scales = {scales!r:.80}: expected a list of at most {MOST_SCALES} numbers from 1."
        )
    if not 0 <= _rotary_fraction(settings) <= 1:
        problems.append("rotary_pct, or rope_parameters: expected a share from 0 to 1.")
    heads = names.mixing
    if not problems and heads in _HEADS and settings[names.width] % settings[heads]:
        problems.append(
            f"{names.width} = {settings[names.width]} is not a multiple of "
            f"{heads} = {settings[heads]}."
        )
    return problems


def _rotary_fraction(settings: Mapping[str, Any]) -> float:
    """Return NeoX's rotated share, under the new or the old name; NaN if it is no number."""
    rope = settings.get("rope_parameters") or {}
    try:
        return float(rope.get("partial_rotary_factor", settings.get("rotary_pct", 0.25)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return math.nan
