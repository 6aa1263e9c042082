from __future__ import annotations

from refocused.data.cache.fetch_plan import FetchQueue


def queue(*, present: tuple[int, ...] = ()) -> FetchQueue:
    return FetchQueue(lambda index: 10, present=present)


def drained(fetches: FetchQueue) -> list[int]:
    order = []
    while (index := fetches.following(now=0.0)) is not None:
        fetches.busy.add(index)
        order.append(index)
    return order


def test_what_is_awaited_comes_first_then_the_current_then_the_pinned() -> None:
    fetches = queue(present=(4,))
    fetches.plan([7, 4, 2])
    fetches.pin([9, 8])
    fetches.ask([5])
    assert drained(fetches) == [5, 7, 8, 9, 2]
    assert fetches.missing() == 5


def test_a_shard_on_its_way_that_can_be_helped_with_comes_before_a_later_one() -> None:
    fetches = queue(present=(3,))
    fetches.plan([3, 4, 5, 6])
    fetches.busy |= {4, 5}
    assert fetches.following(now=0.0, shared={4, 5}) == 4
    assert fetches.following(now=0.0, shared={5}) == 5
    assert fetches.following(now=0.0) == 6


def test_the_first_of_the_plan_and_what_is_awaited_are_in_a_hurry() -> None:
    fetches = queue()
    fetches.plan([7, 3, 9, 1])
    fetches.ask([1, 20])
    first = [i for i in (7, 3, 9, 1, 20, 5) if fetches.is_among_first(2, i)]
    assert first == [7, 3, 1, 20]


def test_not_begun_is_what_is_wanted_and_neither_local_nor_on_its_way() -> None:
    fetches = queue(present=(3, 4))
    fetches.plan([3, 5, 6])
    fetches.pin([4, 8])
    fetches.ask([9])
    fetches.busy |= {6, 7}
    assert fetches.not_begun() == len({5, 8, 9})


def test_a_paused_shard_lets_others_pass_until_its_time() -> None:
    fetches = queue()
    fetches.plan([1, 2])
    fetches.pause(1, until=5.0)
    assert fetches.following(now=4.0) == 2
    assert fetches.following(now=5.0) == 1


def test_the_plan_of_longest_ago_is_evicted_first_and_no_more_than_needed() -> None:
    fetches = queue(present=(0, 1, 2, 3, 4, 5))
    fetches.plan([3])
    fetches.plan([1, 2])
    fetches.plan([5])
    fetches.pin([0])
    assert fetches.evictable(bytes_wanted=15) == [4, 3]
    assert fetches.evictable(bytes_wanted=1000) == [4, 3, 1, 2]
    assert fetches.evictable(bytes_wanted=0) == []


def test_what_is_awaited_or_on_its_way_is_not_evicted() -> None:
    fetches = queue(present=(1, 2))
    fetches.busy.add(2)
    fetches.ask([1])
    assert fetches.evictable(bytes_wanted=100) == []
    assert fetches.present_bytes() == 20


def test_what_comes_next_is_ready_up_to_the_first_that_is_not_local() -> None:
    fetches = queue(present=(1, 2, 4))
    assert fetches.ready() == 0
    fetches.plan([2, 1, 3, 4])
    assert fetches.ready() == 2
    fetches.present.add(3)
    assert fetches.ready() == 4
