"""How long a mirror waits after a failure, and that a bucket which it cannot use is told."""

from __future__ import annotations

import pytest
from checkpoints.mirrored_run import Place, until
from checkpoints.step_samples import make_step

from refocused.checkpoints.mirror.mirror_loop import wait_seconds
from refocused.checkpoints.mirror.remote_steps import is_refusal
from refocused.system.errors import BucketError


def test_waits_double_up_to_the_longest_and_a_refusal_waits_that_at_once() -> None:
    waits = [wait_seconds(failures, refused=False, longest=5.0) for failures in (1, 2, 3, 4, 99)]
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert wait_seconds(5000, refused=False, longest=5.0) == 5.0
    assert wait_seconds(1, refused=True, longest=5.0) == 5.0


def test_a_refusal_is_known_by_its_cause() -> None:
    try:
        try:
            raise PermissionError(13, "Permission denied")
        except PermissionError as error:
            raise BucketError("cannot write") from error
    except BucketError as error:
        assert is_refusal(error)
    assert not is_refusal(BucketError("given up after 10 attempts"))


@pytest.mark.slow
def test_an_unusable_bucket_is_told_and_its_repair_is_found_out(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: (status.last_error or "").startswith("blocked: ")))
    assert place.status().waiting == (10,)
    assert not mirror.ensure_alive()
    place.bucket.unlink()
    until(place.says(lambda status: status.mirrored == (10,) and status.last_error is None))
    assert place.committed() == [10]


@pytest.mark.slow
def test_an_unusable_bucket_is_told_before_the_first_step(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    place.mirror().start()
    until(place.says(lambda status: status.last_error is not None))
