"""What a model writes after a prompt: in batches, with its cache, through transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.sampling import Sampling, generation_config
from refocused.evaluate.written_text import Writing, cut_at_stop
from refocused.system.errors import CheckpointError, ConfigError
from refocused.tokenizers.encoders import tokenizer_faults

Ending = Literal["end of text", "stop string", "tokens", "context"]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One text that a model wrote.

    Attributes:
        prompt: Which prompt it continues, counted from 0.
        text: Without the prompt, and without the stop string that may have ended it.
        tokens: Tokens written, those of the end among them.
        ended: Why it ended: `context` is the longest sequence that the model knows.
    """

    prompt: int
    text: str
    tokens: int
    ended: Ending


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """Everything that was asked for.

    Attributes:
        answers: In the order of the prompts; the samples of one prompt together.
        seconds: That all batches took, reading the prompts included.
        first_seconds: Until the first batch's first tokens were there.
        longest: Most tokens that the model read of one text; the last one written is not read.
    """

    answers: tuple[Answer, ...]
    seconds: float
    first_seconds: float
    longest: int

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
    """A prompt as ids, its number, and how many tokens may follow it."""

    number: int
    ids: tuple[int, ...]
    tokens: int


def generate(
    model: LoadedModel,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    batch: int = 8,
    show: Callable[[str], None] | None = None,
) -> Generated:
    """Continue prompts.

    Args:
        model: With a tokenizer.
        prompts: Texts to continue; none is empty.
        sampling: How.
        batch: Most texts written at once.
        show: Told the text while it is written, where a single one is asked for.

    Raises:
        ConfigError: A prompt is empty or fills the model's context.
        CheckpointError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise CheckpointError(
            f"{model.source} has no tokenizer, without which text is no tokens. Name it: "
            "--tokenizer bytes, --tokenizer gpt2 --bpe-folder FOLDER or --tokenizer FILE."
        )
    read = [_read(model, number, text, sampling) for number, text in enumerate(prompts)]
    is_single = len(prompts) * sampling.samples == 1
    answers: list[Answer] = []
    first_seconds: list[float] = []
    began = time.perf_counter()
    with _seeded(sampling.seed, model.network.device):
        for group in _batches(model, read, most=max(1, batch // sampling.samples)):
            writing = Writing(
                lambda ids: _decoded(model, ids),
                rows=len(group) * sampling.samples,
                ends=_ends(model),
                stops=sampling.stops,
                show=show if is_single else None,
            )
            answers += _write(model, group, sampling, writing)
            first_seconds.append((writing.first_seconds or began) - began)
    seconds = time.perf_counter() - began
    answers.sort(key=lambda answer: answer.prompt)
    longest = max(len(read[answer.prompt].ids) + answer.tokens - 1 for answer in answers)
    return Generated(tuple(answers), seconds, first_seconds[0], longest)


def _read(model: LoadedModel, number: int, text: str, sampling: Sampling) -> _Prompt:
    """Turn a prompt into ids, and see how much may follow."""
    with tokenizer_faults("The tokenizer"):
        ids = tuple(model.tokenizer(text, verbose=False)["input_ids"])
    if not ids:
        raise ConfigError(f"{_named(number)} is empty. Write something that can be continued.")
    context = model.longest_sequence
    if context is None:
        return _Prompt(number, ids, sampling.tokens)
    if len(ids) >= context:
        raise ConfigError(
            f"{_named(number)} has {len(ids):,} tokens, and the model's context is {context:,}, "
            "in which what it writes has to fit too. Shorten the prompt."
        )
    return _Prompt(number, ids, min(sampling.tokens, context - len(ids)))


def _named(number: int) -> str:
    return f"Prompt {number + 1}" if number else "The prompt"


def _batches(
    model: LoadedModel, prompts: Sequence[_Prompt], *, most: int
) -> Iterator[Sequence[_Prompt]]:
    """Yield prompts of similar length together.

    Those of one batch may be followed by equally many tokens, and have one length where the family
    cannot leave out padding.
    """
    is_padded = getattr(model.network.config, "takes_padding", True)

    def alike(prompt: _Prompt) -> tuple[int, int]:
        return prompt.tokens, 0 if is_padded else len(prompt.ids)

    by_length = sorted(prompts, key=lambda prompt: (*alike(prompt), len(prompt.ids)))
    for _, group in itertools.groupby(by_length, key=alike):
        found = list(group)
        for start in range(0, len(found), most):
            yield found[start : start + most]


def _write(
    model: LoadedModel, group: Sequence[_Prompt], sampling: Sampling, writing: Writing
) -> list[Answer]:
    """Continue the prompts of one batch."""
    from transformers import StoppingCriteriaList

    known = max(model.tokenizer.get_vocab().values()) + 1
    config = generation_config(
        sampling,
        tokens=group[0].tokens,
        ends=_ends(model),
        unknown=range(known, int(model.network.config.vocab_size)),
    )
    ids, mask = _padded(group, fill=config.pad_token_id)
    device = model.network.device
    with torch.inference_mode():  # which transformers' own no_grad is slower than
        found: Tensor = model.network.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([writing]),
        )
    written = found[:, ids.shape[1] :].tolist()
    answers = []
    for row, tokens in enumerate(written):
        prompt = group[row // sampling.samples]
        answers.append(
            _answer(model, prompt, tokens, sampling=sampling, stopped=writing.lengths[row])
        )
    writing.finish(answers[0].text)
    return answers


def _answer(
    model: LoadedModel,
    prompt: _Prompt,
    tokens: Sequence[int],
    *,
    sampling: Sampling,
    stopped: int | None,
) -> Answer:
    """Make one row's text of what was written, which goes on with padding after its end."""
    if stopped is not None:
        text = _decoded(model, tokens[:stopped])
        cut = cut_at_stop(text, sampling.stops, added=len(text))
        return Answer(prompt.number, text if cut is None else cut, stopped, "stop string")
    ends = _ends(model)
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    if end is not None:
        return Answer(prompt.number, _decoded(model, tokens[:end]), end + 1, "end of text")
    full = prompt.tokens < sampling.tokens
    text = _decoded(model, tokens)
    return Answer(prompt.number, text, len(tokens), "context" if full else "tokens")


def _padded(group: Sequence[_Prompt], *, fill: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask `[B, T]`, filled up on the left so that all prompts end together."""
    longest = max(len(prompt.ids) for prompt in group)
    ids = torch.full((len(group), longest), fill)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(group):
        ids[row, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, longest - len(prompt.ids) :] = 1
    return ids, mask


def _ends(model: LoadedModel) -> list[int]:
    """Return the ids that end a text: those of the model's own settings, else the tokenizer's."""
    own = model.network.generation_config.eos_token_id
    if own is None:
        own = model.tokenizer.eos_token_id
    if own is None:
        return []
    return list(own) if isinstance(own, list) else [own]


def _decoded(model: LoadedModel, ids: Sequence[int]) -> str:
    text: str = model.tokenizer.decode(ids, skip_special_tokens=True)
    return text


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed, and leave the process's own generators as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
