"""Generate text: batched prompts, stop strings, streaming output."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import pydantic.dataclasses
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from refocused.config.outputs import LEAST_TEMPERATURE
from refocused.evaluate.load_model import LoadedModel
from refocused.system.errors import ConfigError, tokenizer_errors

Ending = Literal["end of text", "stop string", "tokens", "context"]
Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # decoders return it for a character with missing bytes


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for every prompt; a text also depends on the batch it was generated in."""

    tokens: Annotated[int, Field(ge=1)] = 100  # maximum
    # Divides the logits; 0: always the most likely token.
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    # Sample from this many of the most likely tokens; 0: all.
    top_k: Annotated[int, Field(ge=0)] = 40
    # Sample from the most likely tokens that together have this probability.
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # Sample from tokens with at least this share of the highest probability.
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Divides positive logits of seen tokens, multiplies others.
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    samples: Annotated[int, Field(ge=1)] = 1  # texts for each prompt
    stops: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # strings before which a text ends

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST_TEMPERATURE:  # quotients of logits would overflow
            raise ConfigError(
                f"temperature={self.temperature:g}: expected 0, or at least {LEAST_TEMPERATURE}."
            )
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(
                f"samples={self.samples} with temperature=0 would give the same text "
                f"{self.samples} times. Raise the temperature, or set samples=1."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One generated text."""

    prompt: int  # number of the prompt that it continues, from 0
    text: str  # without the prompt, and without the stop string that ended it
    tokens: int  # generated, including the end-of-text token or stop string
    ended: Ending  # `context`: the model's longest sequence was reached


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """All requested texts, in the order of the prompts."""

    answers: tuple[Answer, ...]
    seconds: float  # for all batches, including the prompts
    first_seconds: float  # until the first tokens of the first batch
    longest: int  # most tokens read of one text; the last generated one is not read

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all texts."""
        return self.tokens / self.seconds


class _Prompt(NamedTuple):
    number: int
    ids: list[int]
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

    `show` receives the text while it is generated, if a single one is requested.

    Raises:
        ConfigError: A prompt is empty or fills the model's context.
    """
    read = [_read(model, number, text, sampling.tokens) for number, text in enumerate(prompts)]
    is_single, most = len(prompts) * sampling.samples == 1, max(1, batch // sampling.samples)
    is_padded = getattr(model.network.config, "takes_padding", True)

    def alike(prompt: _Prompt) -> tuple[int, int]:
        # A batch writes equally many tokens; some families cannot mask padding.
        return prompt.tokens, 0 if is_padded else len(prompt.ids)

    by_length = sorted(read, key=lambda prompt: (*alike(prompt), len(prompt.ids)))
    answers: list[Answer] = []
    first_at: float | None = None
    began = time.perf_counter()
    device = model.network.device
    # Leaves the process's own generators as they were.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(sampling.seed)
        for _, similar in itertools.groupby(by_length, key=alike):
            waiting = list(similar)
            while group := waiting[:most]:
                del waiting[:most]
                writing = Writing(
                    functools.partial(model.tokenizer.decode, skip_special_tokens=True),
                    start=max(len(prompt.ids) for prompt in group),
                    ends=_ends(model),
                    stops=sampling.stops,
                    show=show if is_single else None,
                )
                answers += _write(model, group, sampling, writing)
                first_at = first_at or writing.first_seconds
    seconds = time.perf_counter() - began
    answers.sort(key=lambda answer: answer.prompt)
    longest = max(len(read[answer.prompt].ids) + answer.tokens - 1 for answer in answers)
    return Generated(tuple(answers), seconds, (first_at or began) - began, longest)


def _read(model: LoadedModel, number: int, text: str, most: int) -> _Prompt:
    with tokenizer_errors("The tokenizer"):
        ids = list(model.tokenizer(text, verbose=False)["input_ids"])
    name = f"Prompt {number + 1}" if number else "The prompt"
    if not ids:
        raise ConfigError(f"{name} is empty. Give a text to continue.")
    context = model.longest_sequence
    if context is not None and len(ids) >= context:
        raise ConfigError(
            f"{name} has {len(ids):,} tokens. With the generated text it must fit into the model's "
            f"context of {context:,}. Shorten the prompt."
        )
    return _Prompt(number, ids, most if context is None else min(most, context - len(ids)))


def _write(
    model: LoadedModel, group: Sequence[_Prompt], sampling: Sampling, writing: Writing
) -> list[Answer]:
    from transformers import GenerationConfig, StoppingCriteriaList

    network, ends = model.network, _ends(model)
    known = max(model.tokenizer.get_vocab().values()) + 1
    unknown = range(known, int(network.config.vocab_size))  # not in the tokenizer
    choice = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    choice["min_p"] = sampling.min_p or None
    config = GenerationConfig(
        max_new_tokens=group[0].tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        num_return_sequences=sampling.samples,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,  # follows the end of a text, and is cut off
        suppress_tokens=list(unknown) or None,
        use_cache=True,
        **(choice if sampling.temperature > 0 else {}),
    )
    # Padded on the left, so that all prompts end together.
    rows = [torch.tensor(prompt.ids) for prompt in group]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad(rows, padding_value=config.pad_token_id)
    mask = pad([torch.ones_like(row) for row in rows])
    with torch.inference_mode():  # faster than transformers' own no_grad
        texts: Tensor = network.generate(
            ids.to(network.device),
            attention_mask=mask.to(network.device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([writing]),
        )
    answers = []
    for row, tokens in enumerate(texts[:, ids.shape[1] :].tolist()):
        prompt = group[row // sampling.samples]
        text, count, ended = writing.result(row, tokens)
        if ended == "tokens" and prompt.tokens < sampling.tokens:
            ended = "context"
        answers.append(Answer(prompt.number, text, count, ended))
    writing.finish(answers[0].text)
    return answers


def _ends(model: LoadedModel) -> list[int]:
    """Return the ids that end a text: those of the model's own settings, else the tokenizer's."""
    ends = model.network.generation_config.eos_token_id
    ends = model.tokenizer.eos_token_id if ends is None else ends
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


class Writing:
    """A stopping criterion: finds stop strings, streams the text, and measures the time.

    transformers calls it after each token of a batch. Its own `stop_strings` and `TextStreamer` do
    not suffice (docs/decisions/libraries.md).
    """

    def __init__(
        self,
        decode: Decode,
        *,
        start: int,
        ends: Sequence[int],
        stops: Sequence[str],
        show: Callable[[str], None] | None,
    ) -> None:
        """Prepare for prompts of `start` tokens; `show` receives the text of row 0.

        `ends` are the ids that end a text.
        """
        self.first_seconds: float | None = None  # by `time.perf_counter`
        # Of rows with a stop string: the text before it, and the tokens that were written.
        self.stopped: dict[int, tuple[str, int]] = {}
        self._decode, self._start = decode, start
        self._prompts: list[tuple[list[int], str]] = []  # ids, with padding, and their text
        self._ends, self._stops = ends, stops
        self._show, self._shown = show, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Read the tokens so far `[rows, T]`; return which rows have a stop string `[rows]`."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter()
            prompts = input_ids[:, : self._start].tolist()
            self._prompts = [(ids, self._decode(ids)) for ids in prompts]
        if self._stops or self._show is not None:
            for row, tokens in enumerate(input_ids[:, self._start :].tolist()):
                if row in self.stopped:
                    continue
                # A character whose last bytes are missing decodes to UNFINISHED.
                text = self._text(row, tokens[: self._end(tokens)]).rstrip(UNFINISHED)
                stops = [start for stop in self._stops if (start := text.find(stop)) >= 0]
                if stops:
                    self.stopped[row] = text[: min(stops)], len(tokens)
                elif row == 0 and self._show is not None:
                    # What may be the beginning of a stop string is held back.
                    begins = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
                    held = max((len(begin) for begin in begins if text.endswith(begin)), default=0)
                    certain = len(text) - held
                    self._show(text[self._shown : certain])
                    self._shown = max(self._shown, certain)
        is_stopped = [row in self.stopped for row in range(len(input_ids))]
        return torch.tensor(is_stopped, device=input_ids.device)

    def _text(self, row: int, tokens: Sequence[int]) -> str:
        """Decode the tokens as they follow the row's prompt: some decoders strip a text's start."""
        ids, prompt = self._prompts[row]
        whole = self._decode([*ids, *tokens])
        # A character that the prompt begins and the tokens end is the answer's.
        return whole[len(prompt if whole.startswith(prompt) else prompt.rstrip(UNFINISHED)) :]

    def _end(self, tokens: Sequence[int]) -> int | None:
        """Return the position of the end-of-text token; padding follows it."""
        return next((index for index, token in enumerate(tokens) if token in self._ends), None)

    def result(self, row: int, tokens: Sequence[int]) -> tuple[str, int, Ending]:
        """Return a row's text, its tokens, and why it ended."""
        if row in self.stopped:
            return *self.stopped[row], "stop string"
        end = self._end(tokens)
        if end is not None:
            return self._text(row, tokens[:end]), end + 1, "end of text"
        return self._text(row, tokens), len(tokens), "tokens"

    def finish(self, text: str) -> None:
        """Show the rest of row 0's text."""
        if self._show is not None:
            self._show(text[self._shown :])
