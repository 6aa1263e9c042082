from __future__ import annotations

import dataclasses
import random

import pytest

from refocused.bucket.gcs_errors import Attempts, Fault, RetryPolicy, parsed_retry_after
from refocused.system.errors import BucketError

PASSING = Fault(reason="HTTP 503", transient=True, status=503)


def test_the_ceiling_doubles_up_to_the_longest_wait() -> None:
    policy = RetryPolicy(initial_s=0.5, longest_s=30.0, draw=lambda: 1.0)
    waits = [policy.wait_s(failures) for failures in range(1, 9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_the_jitter_is_full() -> None:
    assert RetryPolicy(draw=lambda: 0.0).wait_s(5) == 0.0
    assert RetryPolicy(draw=lambda: 0.25).wait_s(2) == 0.25


def test_the_jitter_leaves_the_random_state_of_the_training_alone() -> None:
    before = random.getstate()
    assert 0.0 <= RetryPolicy().wait_s(3) < 2.0
    assert random.getstate() == before


def test_the_servers_wish_is_a_lower_bound_up_to_the_longest_wait() -> None:
    policy = RetryPolicy(draw=lambda: 1.0, longest_s=30.0)
    assert policy.wait_s(1, retry_after_s=20.0) == 20.0
    assert policy.wait_s(3, retry_after_s=1.0) == 2.0
    assert policy.wait_s(1, retry_after_s=86400.0) == 30.0


@pytest.mark.usefixtures("heard")
def test_a_wait_shorter_than_the_store_asks_for_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = Attempts(RetryPolicy(sleep=lambda _: None, longest_s=30.0), what="asking gs://b/x")
    attempts.wait_after(dataclasses.replace(PASSING, retry_after_s=86400.0))
    assert "asking gs://b/x: HTTP 503; next attempt in 30.0 s" in caplog.text
    assert "the store asks for 86,400 s" in caplog.text


def test_it_gives_up_with_the_object_and_the_reason() -> None:
    waits: list[float] = []
    attempts = Attempts(RetryPolicy(attempts=3, sleep=waits.append), what="asking gs://b/x")
    attempts.wait_after(PASSING)
    attempts.wait_after(PASSING)
    with pytest.raises(BucketError, match=r"asking gs://b/x: HTTP 503; given up after 3"):
        attempts.wait_after(PASSING)
    assert len(waits) == 2


def test_progress_starts_the_count_again() -> None:
    attempts = Attempts(RetryPolicy(attempts=2, sleep=lambda _: None), what="x")
    for _ in range(5):
        attempts.wait_after(PASSING)
        attempts.progressed()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("\u00b2", None),
        ("-1", None),
        ("9" * 5000, float("inf")),
        ("Thu, 99 Jan 1970 00:00:00 GMT", None),
        ("Thu, 01 Jan 9999999999 00:00:00 GMT", None),
        ("Thu, 01 Jan 1970 00:01:40 -9999999", None),
    ],
)
def test_retry_after_is_read_in_both_forms(header: str | None, expected: float | None) -> None:
    assert parsed_retry_after(header, now_s=60.0) == expected
