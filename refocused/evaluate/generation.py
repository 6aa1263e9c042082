"""Generate text: batches of prompts, stop strings, and text shown while it is written."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from refocused.evaluate.load_model import LoadedModel
from refocused.system.errors import CheckpointError, ConfigError
from refocused.tokenizers.encoders import tokenizer_faults

Ending = Literal["end of text", "stop string", "tokens", "context"]
Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # decoders return it for a character with missing bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What is requested for every prompt; a text also depends on the batch it was written in."""

    tokens: int = 100  # at most
    temperature: float = 0.8  # divides the logits; 0 takes the likeliest token every time
    top_k: int = 40  # sample from so many likeliest tokens; 0: from all
    top_p: float = 1.0  # sample from the likeliest tokens that together have this probability
    min_p: float = 0.0  # sample from tokens with this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides positive logits of seen tokens, multiplies others
    seed: int = 0
    samples: int = 1  # texts for each prompt
    stops: tuple[str, ...] = ()  # strings before which a text ends

    def __post_init__(self) -> None:
        for name, (is_right, wanted) in _RANGES.items():
            value = getattr(self, name)
            if not is_right(value):
                raise ConfigError(f"{name} = {value} is outside its range: {wanted}.")
        if not all(self.stops):
            raise ConfigError("A stop string is empty. Give the text that ends what is written.")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"samples = {self.samples} at temperature = 0 would be one text {self.samples} "
                "times. Raise the temperature, or ask for one."
            )


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "tokens": (lambda value: value >= 1, "a whole number from 1"),
    "temperature": (lambda value: 0 <= value < math.inf, "a number from 0"),
    "top_k": (lambda value: value >= 0, "a whole number from 1, or 0 for all tokens"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0, where 1 changes nothing"),
    "seed": (lambda value: 0 <= value < 2**63, "a whole number from 0"),
    "samples": (lambda value: value >= 1, "a whole number from 1"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One generated text."""

    prompt: int  # number of the prompt that it continues, from 0
    text: str  # without the prompt, and without the stop string that ended it
    tokens: int  # written, with those of the ending
    ended: Ending  # `context`: at the longest sequence that the model knows


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """All requested texts, in the order of the prompts."""

    answers: tuple[Answer, ...]
    seconds: float  # of all batches, reading the prompts included
    first_seconds: float  # until the first tokens of the first batch
    longest: int  # most tokens that the model read of one text; the last one written is not read

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens written a second, over all texts."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    number: int
    ids: tuple[int, ...]
    tokens: int  # that may follow


def generate(
    model: LoadedModel,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    batch: int = 8,
    show: Callable[[str], None] | None = None,
) -> Generated:
    """Continue prompts, at most `batch` texts at once.

    `show` gets the text while it is written, where a single one is requested.

    Raises:
        ConfigError: A prompt is empty or fills the model's context.
        CheckpointError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise CheckpointError(
            f"{model.source} has no tokenizer, without which text is no tokens. Name it: "
            "--tokenizer bytes, --tokenizer gpt2 --bpe-folder FOLDER or --tokenizer FILE."
        )
    read = [_read(model, number, text, sampling.tokens) for number, text in enumerate(prompts)]
    is_single = len(prompts) * sampling.samples == 1
    answers: list[Answer] = []
    first_at: list[float] = []
    began = time.perf_counter()
    device = model.network.device
    # Leaves the process's own generators as they were.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        for group in _batches(model, read, most=max(1, batch // sampling.samples)):
            writing = Writing(
                functools.partial(model.tokenizer.decode, skip_special_tokens=True),
                rows=len(group) * sampling.samples,
                ends=_ends(model),
                stops=sampling.stops,
                show=show if is_single else None,
            )
            answers += _write(model, group, sampling, writing)
            first_at.append(writing.first_seconds or began)
    seconds = time.perf_counter() - began
    answers.sort(key=lambda answer: answer.prompt)
    longest = max(len(read[answer.prompt].ids) + answer.tokens - 1 for answer in answers)
    return Generated(tuple(answers), seconds, first_at[0] - began, longest)


def _read(model: LoadedModel, number: int, text: str, wanted: int) -> _Prompt:
    with tokenizer_faults("The tokenizer"):
        ids = tuple(model.tokenizer(text, verbose=False)["input_ids"])
    name = f"Prompt {number + 1}" if number else "The prompt"
    if not ids:
        raise ConfigError(f"{name} is empty. Write something that can be continued.")
    context = model.longest_sequence
    if context is not None and len(ids) >= context:
        raise ConfigError(
            f"{name} has {len(ids):,} tokens, and the model's context is {context:,}, "
            "in which what it writes has to fit too. Shorten the prompt."
        )
    return _Prompt(number, ids, wanted if context is None else min(wanted, context - len(ids)))


def _batches(
    model: LoadedModel, prompts: Sequence[_Prompt], *, most: int
) -> Iterator[Sequence[_Prompt]]:
    is_padded = getattr(model.network.config, "takes_padding", True)

    def alike(prompt: _Prompt) -> tuple[int, int]:
        # A batch writes equally many tokens; some families cannot mask padding.
        return prompt.tokens, 0 if is_padded else len(prompt.ids)

    by_length = sorted(prompts, key=lambda prompt: (*alike(prompt), len(prompt.ids)))
    for _, found in itertools.groupby(by_length, key=alike):
        group = list(found)
        for start in range(0, len(group), most):
            yield group[start : start + most]


def _write(
    model: LoadedModel, group: Sequence[_Prompt], sampling: Sampling, writing: Writing
) -> list[Answer]:
    from transformers import StoppingCriteriaList

    config = _generation_config(model, sampling, tokens=group[0].tokens)
    # Filled up on the left, so that all prompts end together.
    longest = max(len(prompt.ids) for prompt in group)
    ids = torch.full((len(group), longest), config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(group):
        ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, longest - len(prompt.ids) :] = 1
    device = model.network.device
    with torch.inference_mode():  # faster than transformers' own no_grad
        found: Tensor = model.network.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([writing]),
        )
    answers = []
    for row, tokens in enumerate(found[:, longest:].tolist()):
        prompt = group[row // sampling.samples]
        text, count, ended = writing.result(row, tokens)
        if ended == "tokens" and prompt.tokens < sampling.tokens:
            ended = "context"
        answers.append(Answer(prompt.number, text, count, ended))
    writing.finish(answers[0].text)
    return answers


def _generation_config(model: LoadedModel, sampling: Sampling, *, tokens: int) -> Any:
    from transformers import GenerationConfig

    ends = _ends(model)
    known = max(model.tokenizer.get_vocab().values()) + 1
    unknown = range(known, int(model.network.config.vocab_size))  # mean nothing to the tokenizer
    choice = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    choice["min_p"] = sampling.min_p or None
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        num_return_sequences=sampling.samples,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,  # comes after a text's end, and is cut off
        suppress_tokens=list(unknown) or None,
        use_cache=True,
        **(choice if sampling.temperature > 0 else {}),
    )


def _ends(model: LoadedModel) -> list[int]:
    """Return the ids that end a text: those of the model's own settings, else the tokenizer's."""
    own = model.network.generation_config.eos_token_id
    ends = model.tokenizer.eos_token_id if own is None else own
    if isinstance(ends, list):
        return ends
    return [] if ends is None else [ends]


class GrowingText:
    """All whole characters of tokens that come one by one.

    Decodes again the tokens since the last one, and those before, which some decoders need.
    """

    def __init__(self, decode: Decode) -> None:
        self.text = ""
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of what is decoded again
        self._settled = 0  # tokens whose characters are in `text`

    def add(self, token: int) -> str:
        """Return what a token adds to the text, perhaps nothing yet."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._settled])
        found = self._decode(self._ids[self._start :])
        if len(found) <= len(known) or found.endswith(UNFINISHED):
            return ""
        self._start, self._settled = self._settled, len(self._ids)
        self.text += found[len(known) :]
        return found[len(known) :]


class Writing:
    """Follows the rows of a batch: finds stop strings, shows the text, and takes the time.

    A stopping criterion, which transformers calls after every token of every row. Its own
    `stop_strings` and `TextStreamer` do not do it (docs/decisions.md).
    """

    def __init__(
        self,
        decode: Decode,
        *,
        rows: int,
        ends: Collection[int],
        stops: Sequence[str],
        show: Callable[[str], None] | None,
    ) -> None:
        """Prepare for a batch; `show` gets the text of row 0 as it becomes certain."""
        self.first_seconds: float | None = None  # by `time.perf_counter`
        # Of each row, the tokens after which a stop string was whole.
        self.lengths: list[int | None] = [None] * rows
        self._decode = decode
        self._texts = [GrowingText(decode) for _ in range(rows)]
        self._ended = [False] * rows
        self._ends = ends
        self._stops = stops
        self._show = show
        self._shown = 0
        self._count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Take one more column of `input_ids`; return which rows are done, `[rows]` of bool."""
        self._count += 1
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter()
        if self._stops or self._show is not None:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self._ended[row] = self._ended[row] or self._take(row, token)
        return torch.tensor(self._ended, device=input_ids.device)

    def result(self, row: int, tokens: Sequence[int]) -> tuple[str, int, Ending]:
        """Return a row's text, its tokens, and why it ended; padding follows the ending."""
        stopped = self.lengths[row]
        if stopped is not None:
            text = self._decode(tokens[:stopped])
            cut = cut_at_stop(text, self._stops, added=len(text))
            return text if cut is None else cut, stopped, "stop string"
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        if end is not None:
            return self._decode(tokens[:end]), end + 1, "end of text"
        return self._decode(tokens), len(tokens), "tokens"

    def finish(self, text: str) -> None:
        """Show what is missing of row 0's whole text."""
        if self._show is not None:
            self._show(text[self._shown :])

    def _take(self, row: int, token: int) -> bool:
        """Take a row's token; return whether the row is done."""
        if token in self._ends:
            return True
        added = self._texts[row].add(token)
        if not added:
            return False
        text = self._texts[row].text
        if cut_at_stop(text, self._stops, added=len(added)) is not None:
            self.lengths[row] = self._count
            return True
        if row == 0 and self._show is not None:
            certain = len(text) - _begun(text, self._stops)
            self._show(text[self._shown : certain])
            self._shown = max(self._shown, certain)
        return False


def cut_at_stop(text: str, stops: Sequence[str], *, added: int) -> str | None:
    """Return a text up to the first stop string that ends in its `added` last characters."""
    places = [text.find(stop, max(0, len(text) - added - len(stop) + 1)) for stop in stops]
    return min((text[:place] for place in places if place >= 0), key=len, default=None)


def _begun(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at a text's end may be the beginning of a stop string."""
    beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
    return max((len(begun) for begun in beginnings if text.endswith(begun)), default=0)
