from __future__ import annotations

import pytest

from refocused.config.batch_plan import plan_batch
from refocused.config.optimization import BatchConfig
from refocused.system.errors import ConfigError


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 128), (8, 16), (128, 1)])
def test_a_global_batch_is_the_same_on_any_number_of_ranks(ranks: int, accumulation: int) -> None:
    plan = plan_batch(BatchConfig(micro=4, windows=512), world_size=ranks, sequence_length=2048)
    assert plan.accumulation == accumulation
    assert plan.windows == 512
    assert plan.tokens == 1_048_576


def test_a_given_accumulation_grows_with_the_ranks() -> None:
    plan = plan_batch(BatchConfig(micro=2, accumulation=3), world_size=5, sequence_length=10)
    assert (plan.windows, plan.tokens) == (30, 300)


@pytest.mark.parametrize("ranks", [3, 256])
def test_ranks_that_cannot_share_the_batch_are_told_what_would_fit(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"a multiple of {4 * ranks}"):
        plan_batch(BatchConfig(micro=4, windows=512), world_size=ranks, sequence_length=8)


def test_a_micro_batch_that_is_still_to_be_chosen_cannot_be_multiplied() -> None:
    with pytest.raises(ConfigError, match=r"batch.micro=auto is chosen on the GPUs"):
        plan_batch(BatchConfig(micro="auto", windows=8), world_size=2, sequence_length=32)
