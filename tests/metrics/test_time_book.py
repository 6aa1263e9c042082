from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from refocused.metrics.run_time import TimeSpent
from refocused.metrics.throughput import PENDING_STEPS, Throughput, TimeBook, step_phases


class Watch:
    """A clock that a test moves, and what is read from it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.throughput = Throughput(self, began_seconds=90.0)
        self.phases = step_phases("cpu", self)
        self.book = TimeBook(self.throughput, self.phases)

    def __call__(self) -> float:
        return self.now

    def take_step(self, passes: float, update: float) -> None:
        self.phases.begin()
        self.now += passes
        self.phases.passes_made()
        self.now += update
        self.phases.end()
        self.throughput.lap("step")


def test_every_second_gets_one_use() -> None:
    watch = Watch()
    watch.now += 5.0
    watch.throughput.lap("start_up")
    watch.now += 2.0  # for a batch
    watch.take_step(6.0, 1.0)
    watch.now += 3.0
    watch.throughput.lap("validation")
    watch.now += 4.0
    watch.throughput.lap("save")
    watch.now += 0.25
    spent = watch.book.since_last(waited_seconds=2.0)
    assert spent == TimeSpent(
        start_up_seconds=15.0,
        forward_backward_seconds=6.0,
        update_seconds=1.0,
        data_wait_seconds=2.0,
        save_stall_seconds=4.0,
        validation_seconds=3.0,
        other_seconds=0.25,
    )
    assert spent.total_seconds == watch.throughput.session_seconds == 31.25


def test_a_second_record_tells_only_what_is_new() -> None:
    watch = Watch()
    watch.take_step(6.0, 1.0)
    watch.book.since_last(waited_seconds=1.5)
    watch.take_step(2.0, 1.0)
    again = watch.book.since_last(waited_seconds=1.5)
    assert again == TimeSpent(forward_backward_seconds=2.0, update_seconds=1.0)
    assert watch.book.since_last() == TimeSpent()


def test_what_the_host_waited_for_while_the_device_computed_costs_nothing() -> None:
    watch = Watch()
    watch.throughput.lap("start_up")
    watch.take_step(8.0, 2.0)
    # The host had waited 7 s for its batch, and all but one of them while the GPU was busy.
    watch.now += 1.0
    spent = watch.book.since_last(waited_seconds=7.0)
    assert spent == TimeSpent(
        start_up_seconds=10.0,
        forward_backward_seconds=8.0,
        update_seconds=2.0,
        data_wait_seconds=1.0,
    )


def test_time_after_a_failure_is_booked_without_a_use() -> None:
    watch = Watch()
    watch.take_step(6.0, 1.0)
    watch.book.since_last()
    watch.now += 1800.0
    assert watch.book.rest_as_other() == TimeSpent(other_seconds=1800.0)


def test_many_steps_between_two_records_are_all_counted() -> None:
    watch = Watch()
    for _ in range(3 * PENDING_STEPS):
        watch.take_step(1.0, 0.5)
    passes, updates = watch.phases.take()
    assert (passes, updates) == (3.0 * PENDING_STEPS, 1.5 * PENDING_STEPS)
    assert watch.phases.take() == (0.0, 0.0)


@pytest.mark.gpu
def test_a_gpu_times_its_own_work_and_nobody_waits_for_it() -> None:
    phases = step_phases("cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    phases.begin()
    for _ in range(200):
        matrix @ matrix
    phases.passes_made()
    matrix @ matrix
    phases.end()
    queued = time.perf_counter() - began
    passes, updates = phases.take()
    taken = time.perf_counter() - began
    assert 0 < updates < passes <= taken
    assert queued < taken / 2


def test_a_moment_on_a_gpu_waits_for_the_later_point_and_tells_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Event:
        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self) -> None:
            asked.append(f"record {self.number}")

        def synchronize(self) -> None:
            asked.append(f"wait {self.number}")

        def elapsed_time(self, later: Event) -> float:
            return 1500.0 * (later.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = step_phases("cuda")
    phases.begin()
    phases.passes_made()
    phases.end()
    assert "wait" not in "".join(asked)
    assert phases.take() == (1.5, 1.5)
    assert asked[-2:] == ["wait 3", "wait 4"]


def test_the_uses_are_all_that_a_record_holds() -> None:
    names = [field.name for field in dataclasses.fields(TimeSpent)]
    spent = TimeSpent(*(float(number) for number in range(1, len(names) + 1)))
    assert spent.total_seconds == len(names) * (len(names) + 1) / 2
    assert TimeSpent.from_record(spent.as_record()) == spent
    assert (spent + spent).as_record() == {
        name: 2 * value for name, value in spent.as_record().items()
    }
