"""Tokens becoming text while they are written: whole characters, stop strings, what is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteria

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder makes of a character whose bytes are not all there


class GrowingText:
    """The text of tokens that come one after another.

    Only the last few are decoded anew for each one: those since the last whole character, with the
    ones before them whose company some decoders need.

    Attributes:
        text: All whole characters so far.
    """

    def __init__(self, decode: Decode) -> None:
        self.text = ""
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of what is decoded anew
        self._settled = 0  # tokens whose characters are in `text`

    def add(self, token: int) -> str:
        """Take one token; return what it adds to the text, which may be nothing yet."""
        self._ids.append(token)
        known = self._decode(self._ids[self._start : self._settled])
        found = self._decode(self._ids[self._start :])
        if len(found) <= len(known) or found.endswith(UNFINISHED):
            return ""
        added = found[len(known) :]
        self._start, self._settled = self._settled, len(self._ids)
        self.text += added
        return added


class Writing(StoppingCriteria):  # type: ignore[misc]
    """Follows the rows of a batch: finds stop strings, shows the text, and takes the time.

    transformers call it after every token of every row.

    Attributes:
        first_seconds: When the first tokens were there, on the clock of `time.perf_counter`.
        lengths: Of each row, the tokens after which a stop string was whole; None: there was none.
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
        """Prepare for a batch.

        Args:
            decode: Makes text of ids.
            rows: Rows of the batch.
            ends: Ids that end a text.
            stops: Strings that end one.
            show: Told the text of row 0 as it becomes certain; None: nobody is.
        """
        self.first_seconds: float | None = None
        self.lengths: list[int | None] = [None] * rows
        self._texts = [GrowingText(decode) for _ in range(rows)]
        self._ended = [False] * rows
        self._ends = ends
        self._stops = stops
        self._show = show
        self._shown = 0
        self._count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Say which rows are done, `[rows]` of bool, after one more column of `input_ids`."""
        self._count += 1
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter()
        if self._stops or self._show is not None:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self._ended[row] = self._ended[row] or self._take(row, token)
        return torch.tensor(self._ended, device=input_ids.device)

    def finish(self, text: str) -> None:
        """Show what is missing of row 0's whole text."""
        if self._show is not None:
            self._show(text[self._shown :])

    def _take(self, row: int, token: int) -> bool:
        """Take a row's token; return whether the row is done."""
        if token in self._ends:
            return True
        text = self._texts[row]
        added = text.add(token)
        if not added:
            return False
        if cut_at_stop(text.text, self._stops, added=len(added)) is not None:
            self.lengths[row] = self._count
            return True
        if row == 0 and self._show is not None:
            certain = len(text.text) - _begun(text.text, self._stops)
            self._show(text.text[self._shown : certain])
            self._shown = max(self._shown, certain)
        return False


def cut_at_stop(text: str, stops: Sequence[str], *, added: int) -> str | None:
    """Return a text without its first stop string and what follows; None where there is none.

    Args:
        text: The text.
        stops: The strings.
        added: Its last characters, before which it was looked at already.
    """
    places = [text.find(stop, max(0, len(text) - added - len(stop) + 1)) for stop in stops]
    found = [place for place in places if place >= 0]
    return text[: min(found)] if found else None


def _begun(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at a text's end may be the beginning of a stop string."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ),
        default=0,
    )
