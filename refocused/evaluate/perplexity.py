"""Perplexity of texts, by token and by byte, in windows that may overlap."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

from refocused.evaluate.continuations import Continuation, Encoder, Scored
from refocused.evaluate.multiple_choice import Examination, Measure, exponential
from refocused.system.errors import EvaluationError


def read_text(file: Path) -> str:
    """Read a text; raise EvaluationError if it cannot be read, is not UTF-8, or is empty."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise EvaluationError(f"{file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{file}: byte {error.start:,} is no UTF-8. Convert the file to UTF-8."
        ) from None
    if not text:
        raise EvaluationError(f"{file} is empty. Name a file with text.")
    return text


def prepare(
    task: str, text: str, encoder: Encoder, *, stride: int | None = None, limit: int | None = None
) -> Examination:
    """Cut a text into windows of `stride` new tokens, the whole context unless given.

    At most `limit` windows are scored.

    Raises:
        EvaluationError: The text is too short to score, or the stride exceeds the context.
    """
    context = encoder.context_tokens
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise EvaluationError(f"--stride {stride}: a number from 1 to the context, {context}.")
    ids, ends = encoder.offsets(text)
    first = encoder.end_of_text_id
    every = rolling_windows(ids, first=first, context=context, stride=stride)
    windows = every[:limit]
    if not windows:
        raise EvaluationError(f"{task}: the text has {len(ids)} tokens, too few to score one.")
    begin = 0 if first is not None else 1  # where the first token is only context
    last = begin + sum(window.scored for window in windows) - 1
    end = ends[last] if len(windows) < len(every) else len(text)
    text_bytes = len(text[ends[begin - 1] if begin else 0 : end].encode())
    measure = functools.partial(measures_of, windows, text_bytes=text_bytes)
    return Examination(task, len(windows), windows, measure)


def rolling_windows(
    ids: Sequence[int], *, first: int | None, context: int, stride: int
) -> list[Continuation]:
    """Return windows that score every token once, each with as much before it as the model sees.

    As lm-evaluation-harness does at a stride of the whole context (its
    `get_rolling_token_windows`), and transformers' guide to perplexity otherwise. Without a `first`
    token before the text, its own first token is not scored.
    """
    whole = [*ids] if first is None else [first, *ids]
    windows: list[Continuation] = []
    done = 1
    while done < len(whole):
        end = min(len(whole), done + (stride if windows else context))
        begin = max(0, end - context - 1)
        windows.append(Continuation(tuple(whole[begin:end]), end - done))
        done = end
    return windows


def measures_of(
    windows: Sequence[Continuation], scored: Sequence[Scored], *, text_bytes: int
) -> dict[str, Measure]:
    """Return the perplexity by token and by byte, and the bits that a byte takes.

    The standard errors are those of a ratio of sums over windows: with loss r = sum(l) / sum(n),
    var(r) = w / (w - 1) sum((l - r n)^2) / sum(n)^2 (Cochran, Sampling Techniques, 2.11), carried
    over to functions of r by their derivative.
    """
    counts = [window.scored for window in windows]
    losses = [-one.log_probability for one in scored]
    tokens = sum(counts)
    loss = sum(losses) / tokens
    error = None
    if len(windows) > 1:
        spread = sum((own - loss * n) ** 2 for own, n in zip(losses, counts, strict=True))
        error = math.sqrt(spread * len(windows) / (len(windows) - 1)) / tokens

    def scaled(factor: float) -> tuple[float, float | None]:
        return loss * factor, None if error is None else error * factor

    by_byte = tokens / text_bytes
    return {
        "perplexity": exponential(loss, error),
        "byte_perplexity": exponential(*scaled(by_byte)),
        "bits_per_byte": Measure(*scaled(by_byte / math.log(2))),
    }
