"""Count token ids: range, frequencies, and documents with their lengths."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from refocused.data.formats.token_blocks import Ids

COUNTED_IDS = 1 << 20  # larger ids, beyond any vocabulary, only enter the maximum
BINS = 64
LENGTH_BINS = 48
REMEMBERED_DOCUMENTS = 4_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges, of which there is one more; upper edges are exclusive."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class IdStatistics:
    """Statistics of the ids that were read; None: unknown."""

    tokens: int
    min_id: int | None
    max_id: int | None
    distinct_ids: int
    most_frequent: tuple[tuple[int, float], ...]  # the ten most frequent ids and their shares
    documents: int | None  # or rows; one that spans two files counts twice
    id_histogram: Histogram  # tokens by id, in bins of equal width
    length_histogram: Histogram  # documents by tokens, in bins of equal ratio


class IdCounter:
    """Counts ids, and documents where their ends are known, in bounded memory."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens = 0
        self._min_id: int | None = None
        self._max_id: int | None = None
        self._knows_documents = False
        self._lengths: list[int] = []

    def add(self, ids: Ids) -> None:
        """Count ids."""
        if not len(ids):
            return
        self._tokens += len(ids)
        low, high = int(ids.min()), int(ids.max())
        self._min_id = min(low, low if self._min_id is None else self._min_id)
        self._max_id = max(high, self._max_id or 0)
        counted = ids if high < COUNTED_IDS else ids[ids < COUNTED_IDS]
        counts = np.bincount(counted.astype(np.int64, copy=False), minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def add_documents(self, lengths: Iterable[int]) -> None:
        """Count documents, of so many tokens each, but no empty ones."""
        self._knows_documents = True
        room = REMEMBERED_DOCUMENTS - len(self._lengths)
        self._lengths += [length for length in lengths if length][:room]

    def statistics(self) -> IdStatistics:
        """Return the statistics so far."""
        counts = self._counts
        order = np.argsort(-counts, kind="stable")[:10]
        frequent = ((int(one), float(counts[one] / self._tokens)) for one in order if counts[one])
        return IdStatistics(
            tokens=self._tokens,
            min_id=self._min_id,
            max_id=self._max_id,
            distinct_ids=int(np.count_nonzero(counts)),
            most_frequent=tuple(frequent),
            documents=len(self._lengths) if self._knows_documents else None,
            id_histogram=self._id_histogram(),
            length_histogram=self._length_histogram(),
        )

    def _id_histogram(self) -> Histogram:
        width = max(-(-len(self._counts) // BINS), 1)
        starts = np.arange(0, len(self._counts), width)
        counts = np.add.reduceat(self._counts, starts) if len(starts) else starts
        edges = np.arange(len(starts) + 1) * width
        return Histogram(tuple(map(float, edges)), tuple(map(int, counts)))

    def _length_histogram(self) -> Histogram:
        if not self._lengths:
            return Histogram((), ())
        longest = max(self._lengths)
        edges = np.unique(np.geomspace(1, longest + 1, LENGTH_BINS + 1).round())
        counts, _ = np.histogram(self._lengths, edges)
        return Histogram(tuple(map(float, edges)), tuple(map(int, counts)))
