from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from refocused.engine.zero_layout import (
    SHARDED_MASTERS,
    is_of_all_ranks,
    model_file_rank,
    optimizer_file_rank,
    saved_fragments,
    shapes_of,
)
from refocused.system.errors import CheckpointError

SHAPES = shapes_of([{"a": (5, 3), "b": (4,)}, {"c": (1,), "d": (7,)}])
SHARES = {2: [8, 2, 1, 4], 3: [5, 2, 1, 3]}  # of each parameter, padding included


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    elements: int

    def numel(self) -> int:
        return self.elements


def states(ranks: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [{SHARDED_MASTERS: [Flat(size) for size in sizes]} for _ in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, [10, 5]), (2, [8, 2, 1, 4]), (2, [15]), (2, [9, 6]), (3, [7, 4])]
)
def test_zero_3_has_each_element_once_however_its_groups_are_cut(
    ranks: int, sizes: list[int]
) -> None:
    seen: dict[str, list[int]] = {name: [] for name in SHAPES}
    for part in saved_fragments(states(ranks, sizes), SHAPES):
        seen[part.name] += range(part.start, part.start + part.size)
        # The place in all groups of the rank, one after another, is that of its shares.
        before = sum(SHARES[ranks][: list(SHAPES).index(part.name)])
        share = SHARES[ranks][list(SHAPES).index(part.name)]
        place = sum(sizes[: part.group]) + part.place
        assert place - before == part.start - part.rank * share
        assert part.place + part.size <= sizes[part.group]
    assert seen == {name: list(range(math.prod(shape))) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("sizes", "words"), [([10, 4], "fewer"), ([10, 6], "more")])
def test_a_rank_with_another_number_of_elements_is_refused(sizes: list[int], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"rank 0 .* {words} elements"):
        list(saved_fragments(states(2, sizes), SHAPES))


def test_files_say_whose_they_are() -> None:
    assert optimizer_file_rank("bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt") == 12
    assert optimizer_file_rank("zero/zero_pp_rank_3_mp_rank_00_optim_states.pt") == 3
    assert optimizer_file_rank("zero_pp_rank_3_mp_rank_00_model_states.pt") is None
    assert model_file_rank("zero_pp_rank_3_mp_rank_00_model_states.pt") == 3
    assert model_file_rank("zero/mp_rank_00_model_states.pt") == 0
    assert is_of_all_ranks("zero/mp_rank_00_model_states.pt")
    assert not is_of_all_ranks("zero/zero_pp_rank_0_mp_rank_00_model_states.pt")
