"""Place documents in training windows by best fit, so that few of them are cut."""

import bisect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from refocused.tokenizers.encoders import Ids

BUFFERED_IDS = 1 << 22  # placed together: 2,048 windows of 2,048


class BestFit:
    """Packs a stream of documents into windows of `length` ids, in bounded memory.

    Best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): the longest document first, each in
    the fullest window with room for it. Only documents longer than a window are cut; every part of
    them begins with `begin_id`, as documents do, so that `document_mask` separates what shares a
    window. The same id fills windows up: each of these attends to itself alone, and where documents
    are masked it is no label.

    Attributes:
        counts: `documents`; those `cut` here, and `cut_in_stream` by the windows of a plain stream;
            ids of the `stream`; `ids` of all windows, and `padding` among them.
    """

    def __init__(self, length: int, begin_id: int, *, dtype: np.dtype[Any]) -> None:
        self._length = length
        self._begin_id = begin_id
        self._dtype = dtype
        self._stream: list[Ids] = []
        self._buffered = 0
        self.counts = Counter[str]()

    def add(self, ids: Ids) -> Iterator[Ids]:
        """Add ids of the stream; yield whole windows, `(windows * length,)`, of a full buffer."""
        self._stream.append(ids)
        self._buffered += len(ids)
        if self._buffered >= BUFFERED_IDS:
            yield self._packed(is_end=False)

    def rest(self) -> Iterator[Ids]:
        """Yield the windows of what is left at the end of the stream."""
        yield self._packed(is_end=True)

    def _packed(self, *, is_end: bool) -> Ids:
        """Pack the buffer, but keep its last document if that may go on and is not all of it."""
        empty = np.empty(0, self._dtype)
        stream = np.concatenate([empty, *self._stream], dtype=self._dtype, casting="unsafe")
        borders = np.flatnonzero(stream == self._begin_id)
        end = len(stream) if is_end or not borders[-1:].any() else int(borders[-1])
        self._stream, self._buffered = [stream[end:]], len(stream) - end
        borders = np.unique([0, *borders[borders < end], end])
        starts, ends = borders[:-1], borders[1:]
        firsts = starts + (stream[starts] == self._begin_id)
        length, room = self._length, self._length - 1
        parts = [
            (start, min(start + room, stop))
            for first, stop in zip(firsts.tolist(), ends.tolist(), strict=True)
            for start in range(first, stop, room)
        ]
        windows = best_fit_decreasing([stop - start + 1 for start, stop in parts], room=length)
        packed = np.full((len(windows), length), self._begin_id, self._dtype)
        for row, numbers in zip(packed, sorted(map(sorted, windows)), strict=True):
            at = 0
            for start, stop in (parts[number] for number in numbers):
                row[at + 1 : at + 1 + stop - start] = stream[start:stop]
                at += 1 + stop - start
            self.counts["padding"] += length - at
        places = borders + self.counts["stream"]
        found = {
            "documents": ends > firsts,
            "cut": ends - firsts > room,
            "cut_in_stream": places[:-1] // length != (places[1:] - 1) // length,
        }
        self.counts.update({name: int(each.sum()) for name, each in found.items()})
        self.counts.update(stream=end, ids=packed.size)
        return packed.ravel()


def best_fit_decreasing(sizes: list[int], *, room: int) -> list[list[int]]:
    """Return the numbers of the parts in each window; sizes are at most `room`."""
    windows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # of windows that are not full, and their numbers; ascending
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect.bisect_left(spaces, (sizes[number],))
        is_new = place == len(spaces)
        space, window = (room, len(windows)) if is_new else spaces.pop(place)
        if is_new:
            windows.append([])
        windows[window].append(number)
        if space := space - sizes[number]:
            bisect.insort(spaces, (space, window))
    return windows
