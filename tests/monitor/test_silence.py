from __future__ import annotations

import pytest

from refocused.monitor.run_status import longest_seconds, silence

BEGAN = 1_000_000.0


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        ([], 1800),
        ([10, 10], 1800),  # too few to know what is usual
        ([10] * 20, 120),
        ([60] * 20, 300),
        ([60] * 20 + [400] + [60] * 5, 600),  # a validation and a save took so long before
    ],
)
def test_how_long_a_step_may_take(gaps: list[float], seconds: float) -> None:
    times = [BEGAN]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert longest_seconds(times) == seconds


def test_before_the_first_step_it_counts_from_the_beginning() -> None:
    assert not silence([], began=BEGAN, now=BEGAN + 1799).is_too_long
    assert silence([], began=BEGAN, now=BEGAN + 1801).is_too_long


def test_a_clock_that_went_back_makes_no_silence() -> None:
    assert silence([BEGAN], began=0.0, now=BEGAN - 5).seconds == 0
