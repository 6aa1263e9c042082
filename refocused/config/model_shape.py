"""Read the shape of a model from a transformers configuration."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic.dataclasses

from refocused.config import shipped_files
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.atomic_files import read_regular
from refocused.system.errors import ConfigError, counted
from refocused.system.strict_json import MalformedError, parse_json


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """A mixer by attention; several query heads may share keys and values."""

    heads: int  # of queries
    bias: bool  # of all four projections
    key_heads: int  # of keys and values
    head_width: int

    @property
    def query_width(self) -> int:
        """Width of all queries, and of the result."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.key_heads * self.head_width


@dataclasses.dataclass(frozen=True, slots=True)
class Recall:
    """What lets a recurrent model look up content; 0: nothing."""

    taps: int = 0  # of the convolution before a mixer
    memory_heads: int = 0  # beside a mixer
    attention_every: int = 0  # blocks, of which the last one has attention
    attention_heads: int = 1  # of such a block


@dataclasses.dataclass(frozen=True, slots=True)
class Resonators:
    """A mixer by a causal convolution with a sum of damped cosines."""

    count: int  # resonators of a block, F
    recall: Recall = dataclasses.field(default_factory=Recall)


@dataclasses.dataclass(frozen=True, slots=True)
class Eigenstates:
    """A mixer by a recurrence of complex modes."""

    count: int  # modes of a cell, K; a block has two cells at every scale
    scales: tuple[int, ...]  # tokens that are averaged before each of a block's recurrences
    recall: Recall = dataclasses.field(default_factory=Recall)


Mixer = Attention | Resonators | Eigenstates
Bytes = Mapping[str, tuple[float, float]]


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True, config={"extra": "forbid"})
class Family:
    """A model family: the content of `config/families/NAME.yaml`.

    Settings have transformers' names. `kept` and `moved` are a block's bytes for each token, in
    passes of 16 and of 32 bits, by the width that they are proportional to: `width` (of the
    residual stream), `queries`, `keys` (or values), `inner` (of the feed-forward part).
    """

    mixer: Literal["attention", "resonators", "eigenstates"]
    classes: str  # prefix of its classes' names
    module: str = "transformers"  # of its classes
    dropouts: tuple[str, ...]  # settings
    # Names of the settings of its sizes; `mixing` is heads, resonators or modes.
    mixing: str = "num_attention_heads"
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    ffn_width: str = "intermediate_size"
    max_length: str = "max_position_embeddings"
    required: tuple[str, ...] = ()  # further settings without which transformers takes constants
    sizes: tuple[str, ...] = ()  # further settings that are whole numbers
    others: tuple[str, ...] = ()  # further settings, to recognize misspelt ones
    defaults: Mapping[str, Any]  # of settings, as in transformers
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # read like settings
    unsupported: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings' values
    norm_vectors: int = 2  # parameters of a norm, as multiples of its width
    head_norm_vectors: int = 0  # of the norms of queries and keys, one for each
    ffn_matrices: int = 2
    kept: Bytes = dataclasses.field(default_factory=dict)  # by autograd, with attention
    # Read and written besides products and mixer: `eager` or `compiled`, `forward` or `backward`.
    moved: Mapping[str, Mapping[str, Bytes]]
    # Ends of the names of the matrices that write into the residual stream.
    projections: tuple[str, ...]
    names_in_files: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of tensors

    @property
    def has_attention(self) -> bool:
        """Whether its mixer is attention, which can mask earlier documents."""
        return self.mixer == "attention"


@functools.cache
def families() -> Mapping[str, Family]:
    """Read all families, by transformers' `model_type`."""
    files = sorted((shipped_files() / "families").glob("*.yaml"))
    return {file.stem: Family(**parse_yaml_mapping(file.read_bytes())) for file in files}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What the parameters and the FLOPs of a model follow from."""

    family: str  # transformers' `model_type`
    vocabulary: int  # token ids of the model, V
    width: int  # of the residual stream, D
    layers: int  # blocks, L
    ffn_width: int  # inner size of the feed-forward part
    ffn_bias: bool  # of the feed-forward part's matrices
    max_length: int  # longest sequence, T_max
    learned_positions: bool  # an embedding for each position up to T_max
    tied: bool  # the head shares the token embedding
    softcap: float | None  # bound of the logits' magnitude
    mixer: Mixer  # sequence mixer of each block
    settings: Mapping[str, Any] = dataclasses.field(repr=False, hash=False)  # the whole file

    @property
    def record(self) -> Family:
        """What all models of its family have in common."""
        return families()[self.family]

    def bytes_a_token(self, amounts: Bytes, *, size: int) -> float:
        """Return a block's bytes for each token in a pass with elements of `size` bytes."""
        return sum(pair[size == 4] * self.widths.get(of, 0) for of, pair in amounts.items())

    @property
    def kinds(self) -> tuple[Self, ...]:
        """The same shape for each kind of blocks, with as many layers as are of that kind."""
        if isinstance(self.mixer, Attention) or not self.mixer.recall.attention_every:
            return (self,)
        recall = self.mixer.recall
        number, heads = self.layers // recall.attention_every, recall.attention_heads
        others = dataclasses.replace(recall, attention_every=0)
        attention = Attention(heads, bias=True, key_heads=heads, head_width=self.width // heads)
        return (
            dataclasses.replace(
                self,
                layers=self.layers - number,
                mixer=dataclasses.replace(self.mixer, recall=others),
            ),
            dataclasses.replace(self, layers=number, mixer=attention),
        )

    @property
    def widths(self) -> Mapping[str, int]:
        """The widths of a block's tensors."""
        widths = {"width": self.width, "inner": self.ffn_width}
        if isinstance(self.mixer, Attention):
            widths |= {"queries": self.mixer.query_width, "keys": self.mixer.key_width}
        return widths

    def padded_vocabulary(self, multiple: int) -> int:
        """Return the embedding's rows: V rounded up to a multiple."""
        return -(-self.vocabulary // multiple) * multiple

    def with_vocabulary(self, vocabulary: int) -> Self:
        """Return the same shape for another number of token ids."""
        settings = {**self.settings, "vocab_size": vocabulary}
        return dataclasses.replace(self, vocabulary=vocabulary, settings=settings)


# Far above every known model; larger ones take minutes to build, or their sizes overflow.
MOST_LAYERS = 1_000
LARGEST_WIDTH = 2**20
LARGEST_NUMBER = 2**31 - 1
MOST_SCALES = 16
MOST_SETTINGS = 1_000
RECALL = ("convolution_width", "memory_heads", "attention_every", "attention_heads")
_MOST = {
    **dict.fromkeys(("n_layer", "num_hidden_layers"), MOST_LAYERS),
    **dict.fromkeys(("n_embd", "hidden_size", *RECALL), LARGEST_WIDTH),
}


def load_shape(file: Path) -> ModelShape:
    """Read a shape; raise ConfigError if the file is not JSON, and as `shape_from`."""
    try:
        settings = parse_json(read_regular(file))
    except (MalformedError, OSError) as error:
        raise ConfigError(f"{file}: not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f'{file}: expected an object {{"model_type": ...}}.')
    return shape_from(settings, where=str(file))


def shape_from(settings: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the shape in a transformers configuration; `where` is named in errors.

    Raises:
        ConfigError: The family is unknown, or a number is missing, wrong or misspelt.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in families():
        raise ConfigError(
            f"{where}: model_type = {name!r:.80} is not supported. Families: "
            f"{', '.join(families())}."
        )
    family = families()[name]
    problems = _problems(settings, family)
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    values = {**family.defaults, **settings, **family.fixed}
    width, count = values[family.width], values[family.mixing]
    mixer: Mixer
    if family.has_attention:
        mixer = Attention(
            heads=count,
            bias=bool(values["attention_bias"]),
            key_heads=values.get("num_key_value_heads") or count,
            head_width=values.get("head_dim") or width // count,
        )
    else:
        heads = values.get("attention_heads") or max(1, width // 64)
        taps, memory_heads, every = (values.get(name) or 0 for name in RECALL[:3])
        recall = Recall(taps, memory_heads, every, heads)
        scales = tuple(values.get("scales") or (1,))
        is_ten = family.mixer == "eigenstates"
        mixer = Eigenstates(count, scales, recall) if is_ten else Resonators(count, recall)
    return ModelShape(
        family=name,
        vocabulary=values["vocab_size"],
        width=width,
        layers=values[family.layers],
        ffn_width=values.get(family.ffn_width) or 4 * width,
        ffn_bias=bool(values["mlp_bias"]),
        max_length=values[family.max_length],
        learned_positions=bool(values["learned_positions"]),
        tied=bool(values["tie_word_embeddings"]),
        softcap=values.get("final_logit_softcapping"),
        mixer=mixer,
        settings=dict(settings),
    )


def _problems(settings: Mapping[str, Any], family: Family) -> list[str]:
    if len(settings) > MOST_SETTINGS:
        return [
            f"it has {counted(len(settings), 'setting')}; at most {MOST_SETTINGS:,} are allowed."
        ]
    basic = ("vocab_size", family.width, family.layers, family.mixing, family.max_length)
    required = (*basic, *family.required)
    sizes = tuple(dict.fromkeys((*required, family.ffn_width, *family.sizes)))
    problems = [f"{name} is missing." for name in required if settings.get(name) is None]
    least = dict.fromkeys(sizes, 1) | dict.fromkeys(() if family.has_attention else RECALL, 0)
    for name, lowest in least.items():
        value, most = settings.get(name), _MOST.get(name, LARGEST_NUMBER)
        if value is not None and (type(value) is not int or value < lowest):
            problems.append(
                f"{name} = {value!r:.80}: expected a whole number of at least {lowest}."
            )
        elif value is not None and value > most:
            problems.append(f"{name} = {value}: expected at most {most:,}.")
    # transformers ignores unknown names and takes its defaults instead.
    unused = [name for name in (*sizes, *family.others) if name not in settings]
    problems += [
        f"{name} is unknown to transformers. Did you mean {near}?"
        for name in settings
        for near in difflib.get_close_matches(name, unused, n=1, cutoff=0.8)
    ]
    problems += [
        f"{name} = {value!r} is not supported. Remove it."
        for name, value in family.unsupported.items()
        if settings.get(name) == value
    ]
    scales = settings.get("scales") or [1]
    if "scales" in family.others and not (
        isinstance(scales, list)
        and len(scales) <= MOST_SCALES
        and all(type(scale) is int and 1 <= scale <= LARGEST_NUMBER for scale in scales)
    ):
        problems.append(
            f"scales = {scales!r:.80}: expected a list of at most {MOST_SCALES} numbers from 1."
        )
    if settings.get("attention_every") == 1 and not family.has_attention:
        problem = f"attention_every = 1 leaves no block of {family.mixer}."
        problems.append(f"{problem} Set it to 2 or more, or 0.")
    rope = settings.get("rope_parameters") or {}
    try:  # the rotated share of heads, under the new or the old name
        share = float(rope.get("partial_rotary_factor", settings.get("rotary_pct", 0.25)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        share = math.nan
    if not 0 <= share <= 1:
        problems.append("rotary_pct, or rope_parameters: expected a share from 0 to 1.")
    return problems or list(_misfits({**family.defaults, **settings}, family))


def _misfits(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield what does not fit together in settings that are right by themselves."""
    heads, width, head_width = values[family.mixing], values[family.width], values.get("head_dim")
    divisors = [(family.width, "memory_heads"), (family.width, "attention_heads")]
    if family.has_attention:
        divisors = [(family.mixing, "num_key_value_heads")]
        divisors += [(family.width, family.mixing)] if head_width is None else []
    for name, divisor in divisors:
        if (number := values.get(divisor)) and values[name] % number:
            yield f"{name} = {values[name]} is not a multiple of {divisor} = {number}."
    rotates = family.has_attention and "rope_parameters" in family.others
    if rotates and (head_width or width // heads) % 2 and (head_width or width % heads == 0):
        yield f"a head is {head_width or width // heads} wide; rotary positions need an even width."
    cap = values.get("final_logit_softcapping") if family.has_attention else None
    if cap is not None and (type(cap) not in (int, float) or not 0 < cap < math.inf):
        yield f"final_logit_softcapping = {cap!r:.80}: expected a number above 0, or null."
