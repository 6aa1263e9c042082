"""Interrupted twice and resumed equals uninterrupted, bit for bit, under every pair of settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from end_to_end.forked import ForkedRanks, main_of
from exactness_cases import EXACTNESS_CASES, SAVED_AT, ExactnessCase

Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks measured, all cases in one start."""
    folder = tmp_path_factory.mktemp("exactness")
    ranks = ForkedRanks(2, [str(folder)], folder=folder, command=main_of("exactness_ranks"))
    ended = ranks.wait()
    assert ended.codes == [0, 0], ended.everything
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_pair_of_settings_comes_together() -> None:
    names = [field.name for field in dataclasses.fields(ExactnessCase) if field.name != "family"]
    values = {name: {getattr(case, name) for case in EXACTNESS_CASES} for name in names}
    for one, other in itertools.combinations(names, 2):
        together = {(getattr(case, one), getattr(case, other)) for case in EXACTNESS_CASES}
        assert together == set(itertools.product(values[one], values[other])), (one, other)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_two_interruptions_change_no_bit(found: Found, case: ExactnessCase) -> None:
    for rank in found:
        measured = rank[case.name]
        assert measured["resumed"] == measured["straight"][SAVED_AT[0] :]
        assert measured["found"] == measured["wanted"]
    if case.dtype == "fp16":  # both happened, and on both sides of a save
        scales = [scale for _, scale, _ in found[0][case.name]["straight"]]
        skipped = [count for _, _, count in found[0][case.name]["straight"]]
        assert skipped[-1] > 0
        assert max(scales[SAVED_AT[0] :]) > min(scales)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_every_rank_has_its_own_random_state_back(found: Found, case: ExactnessCase) -> None:
    first, second = (rank[case.name] for rank in found)
    assert first["found"]["random"] == first["wanted"]["random"]
    assert second["found"]["random"] == second["wanted"]["random"]
    assert first["found"]["random"] != second["found"]["random"]
