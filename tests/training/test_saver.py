from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints.fake_owner import FACTS, FakeOwner
from checkpoints.step_samples import make_step
from run_fakes import Clock, FakeReporter, Log
from thread_ranks import on_two_ranks, results

from refocused.batches.position import Position
from refocused.checkpoints.checkpointer import Checkpointer
from refocused.checkpoints.mirror_status import MirrorStatus
from refocused.checkpoints.step_directory import parse_name, read_step, step_paths
from refocused.config.outputs import CheckpointConfig
from refocused.errors import CheckpointError
from refocused.monitoring.throughput import Throughput
from refocused.process_identity import this_process
from refocused.training.saver import Saver
from refocused.training.state import TrainState
from refocused.world import World


def said_by_mirror(**facts: Any) -> MirrorStatus:
    return MirrorStatus(bucket="b", prefix="p", process=this_process(), heartbeat=0.0, **facts)


@dataclasses.dataclass
class FakeMirror:
    """A background copy that does what the test says."""

    log: Log
    said: MirrorStatus | None = None
    drains: bool | None = True  # None: it never gets there

    def start(self) -> None:
        self.log.append("mirror started")

    def ensure_alive(self) -> bool:
        self.log.append("mirror looked after")
        return False

    def status(self) -> MirrorStatus | None:
        return self.said

    def request_drain(self, timeout_s: float) -> str:
        self.log.append(f"drain {timeout_s:.0f}")
        return "request"

    def await_drain(
        self, request: str, slice_s: float, progress: Callable[[Any], None]
    ) -> bool | None:
        assert request == "request"
        return self.drains


class Session:
    """A saver over a real folder, with an owner whose disk the test can fill."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        mirror: FakeMirror | None = None,
        keep: int = 2,
        max_failed_saves: int = 3,
        in_background: bool = False,
    ) -> None:
        self.folder = folder
        self.log: Log = []
        self.clock = Clock()
        world = world or World()
        self.owner = FakeOwner(world.rank)
        self.throughput = Throughput(self.clock)
        self.reporter = FakeReporter(self.log)
        self.saver = Saver(
            Checkpointer(folder, world=world, facts=FACTS),
            folder=folder,
            engine=cast("Any", self.owner),
            mirror=cast("Any", mirror),
            settings=CheckpointConfig.model_validate(
                {"keep": keep, "max_failed_saves": max_failed_saves, "async": in_background}
            ),
            reporter=cast("Any", self.reporter),
            throughput=self.throughput,
            world=world,
            files_done=lambda state: state.step // 10,
        )

    def save(self, *steps: int, **changes: Any) -> TrainState:
        for step in steps:
            state = self.saver.save(TrainState(step=step, **changes))
        return state

    def there(self) -> list[int | None]:
        return [parse_name(path.name) for path in step_paths(self.folder)]


def test_a_state_is_saved_with_its_time_and_money_booked(tmp_path: Path) -> None:
    session = Session(tmp_path)
    state = session.save(10, loss=2.0)
    assert state == TrainState(step=10, loss=2.0, seconds=7.0)
    step = read_step(tmp_path / "checkpoint_step_10")
    assert step.manifest.files_done == 1
    assert Session(tmp_path).saver.load(step) == state
    assert session.saver.saved_step == 10
    assert not session.saver.last_save_failed


def test_a_save_is_told_with_the_time_that_it_took(tmp_path: Path) -> None:
    session = Session(tmp_path)
    write = session.owner.save_shards

    def slowly(folder: Path) -> Any:
        session.clock.now += 4.0
        return write(folder)

    session.owner.save_shards = slowly  # type: ignore[method-assign]
    session.save(1500)
    assert session.log == ["save: save   1,500 local 4 s"]
    session.clock.now += 1.0
    session.throughput.lap("step")
    assert session.throughput.seconds_left(steps=1, validations=0, saves=1) == 5.0


def test_what_a_save_cost_is_recorded(tmp_path: Path) -> None:
    session = Session(tmp_path)
    write = session.owner.save_shards

    def slowly(folder: Path) -> Any:
        session.clock.now += 4.0
        return write(folder)

    session.owner.save_shards = slowly  # type: ignore[method-assign]
    session.save(10)
    (record,) = session.reporter.figures
    size = read_step(tmp_path / "checkpoint_step_10").manifest.total_bytes
    seconds = record["save_write_seconds"]
    assert isinstance(seconds, float) and seconds > 0  # measured where it is written
    assert record == {
        "kind": "save",
        "step": 10,
        "save_stall_seconds": 4.0,
        "save_write_seconds": seconds,
        "save_bytes": size,
        "save_bytes_per_second": size / seconds,
    }


def test_the_same_step_is_saved_once(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.save(10, 10)
    assert session.log == ["save:" + " save      10 local 0 s"]
    resumed = Session(tmp_path)
    resumed.saver.load(read_step(tmp_path / "checkpoint_step_10"))
    resumed.save(10)
    assert resumed.log == []


def test_a_step_of_another_run_is_loaded_and_still_has_to_be_saved_here(tmp_path: Path) -> None:
    Session(tmp_path / "other").save(10)
    session = Session(tmp_path / "mine")
    state = session.saver.load(read_step(tmp_path / "other" / "checkpoint_step_10"))
    session.saver.save(state)
    assert session.there() == [10]


def test_a_failed_save_is_told_and_borne(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.owner.disk_is_full = True
    assert session.save(10).step == 10
    assert session.saver.last_save_failed
    assert session.saver.saved_step is None
    (told,) = session.log
    assert told.startswith("save_failed: checkpoint_step_10 was not saved: No space left on device")
    assert told.endswith("Training goes on.")
    session.owner.disk_is_full = False
    session.save(20)
    assert not session.saver.last_save_failed
    assert session.there() == [20]


def test_so_many_failures_in_a_row_stop_the_run_on_both_ranks(tmp_path: Path) -> None:
    def action(world: World) -> None:
        session = Session(tmp_path, world=world, max_failed_saves=2)
        session.owner.disk_is_full = world.rank == 1
        session.save(10)
        session.owner.disk_is_full = False
        session.save(20)  # a good one in between: the count starts anew
        session.owner.disk_is_full = world.rank == 1
        session.save(30, 40)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, CheckpointError)
        assert ended.error.on_every_rank
        assert str(ended.error).startswith("2 saves in a row have failed; the run stops")
        assert "checkpoint_step_40 was not saved: No space left" in str(ended.error)


def test_only_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.save(10)
    session.save(20, validation_loss=1.0)
    session.save(30, 40, 50, validation_loss=1.5)
    assert session.there() == [20, 40, 50]
    session.save(60, validation_loss=0.5)
    assert session.there() == [50, 60]


def test_a_step_that_the_mirror_lacks_stays(tmp_path: Path) -> None:
    mirror = FakeMirror([], said_by_mirror(mirrored=(20,)))
    session = Session(tmp_path, mirror=mirror)
    session.save(10, 20, 30, 40)
    assert session.there() == [10, 30, 40]
    mirror.said = None  # it has not said anything yet: nothing may go
    session.save(50)
    assert session.there() == [10, 30, 40, 50]


def test_a_broken_step_does_not_count_among_the_kept(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.save(10, 20)
    (tmp_path / "checkpoint_step_20" / "manifest.json").unlink()
    session.save(30)
    assert session.there() == [10, 20, 30]


def test_a_step_that_cannot_be_removed_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("busy")

    monkeypatch.setattr("refocused.checkpoints.thinning.remove_step", refuse)
    session = Session(tmp_path)
    session.save(10, 20, 30)
    assert session.there() == [10, 20, 30]
    assert not session.saver.last_save_failed


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (None, "| upload queued"),
        (said_by_mirror(), "| nothing mirrored yet, 1 behind"),
        (said_by_mirror(mirrored=(5, 10)), "| mirrored up to step 10"),
        (
            said_by_mirror(mirrored=(1000,), waiting=(5,), last_error="503"),
            "| mirrored up to step 1,000, 1 behind, last error: 503",
        ),
        (said_by_mirror(mirrored=(4,), failed={10: "cut"}), "to step 4, 1 cannot be copied"),
    ],
)
def test_a_save_tells_how_the_mirror_is(
    tmp_path: Path, said: MirrorStatus | None, told: str
) -> None:
    mirror = FakeMirror([], said)
    session = Session(tmp_path, mirror=mirror)
    session.save(10)
    assert session.log[0].endswith(told)
    assert mirror.log == ["mirror looked after"]


def test_a_bucket_that_refuses_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    mirror = FakeMirror([])
    session = Session(tmp_path, mirror=mirror)
    blocked = said_by_mirror(last_error="blocked: 403, no storage.objects.create.")
    told = []
    for mirror.said in (None, said_by_mirror(last_error="503"), blocked, blocked, said_by_mirror()):
        session.saver.watch_mirror()
        told.append(len(session.log))
    assert told == [0, 0, 1, 1, 2]
    assert session.log[0].startswith("mirror_failed: mirror blocked: 403, no storage")
    assert session.log[1].startswith("mirror_recovered: ")


def test_later_steps_are_set_aside_when_training_goes_on_from_an_earlier_one(
    tmp_path: Path,
) -> None:
    Session(tmp_path, keep=5).save(10, 20, 30)
    session = Session(tmp_path, keep=5)
    state = session.saver.load(read_step(tmp_path / "checkpoint_step_20"))
    session.saver.go_on_from(state)
    assert session.there() == [10, 20]
    (aside,) = (path for path in tmp_path.iterdir() if "superseded" in path.name)
    assert (aside / "zero" / "rank_0.pt").exists()
    assert f"checkpoint_step_30 is now {aside.name}" in session.log[0]
    session.save(30)  # another step 30, under its own name
    assert session.there() == [10, 20, 30]


def test_a_start_from_scratch_sets_every_step_aside(tmp_path: Path) -> None:
    make_step(tmp_path, 10)
    session = Session(tmp_path)
    session.saver.go_on_from(TrainState())
    assert session.there() == []


def test_the_mirror_belongs_to_rank_0_and_both_hear_of_its_end(tmp_path: Path) -> None:
    mirror = FakeMirror([], drains=False)

    def action(world: World) -> bool:
        mine = mirror if world.is_first else None
        session = Session(tmp_path, world=world, mirror=mine)
        session.saver.start_mirror()
        session.save(10, position=Position(0, 4))
        return session.saver.drain(60.0, lambda status: None)

    assert results(on_two_ranks(action)) == [False, False]
    assert mirror.log == ["mirror started", "mirror looked after", "drain 60"]


def test_the_wait_for_the_mirror_ends_on_both_ranks_when_they_agree_on_it(tmp_path: Path) -> None:
    mirror = FakeMirror([], drains=None)
    asked = [0, 0]

    def action(world: World) -> bool:
        def given_up() -> int:
            asked[world.rank] += 1
            return asked[world.rank] == 3

        session = Session(tmp_path, world=world, mirror=mirror if world.is_first else None)
        return session.saver.drain(60.0, lambda status: None, given_up)

    assert results(on_two_ranks(action)) == [False, False]
    assert asked == [3, 3]


def test_without_a_mirror_everything_is_where_it_should_be(tmp_path: Path) -> None:
    assert Session(tmp_path).saver.drain(0.0, lambda status: None)


def on_machines(root: Path, action: Callable[[Session], Any], **settings: Any) -> list[Any]:
    """Let each of two machines that share no disk do the same, with a folder of its own."""

    def on_one(world: World) -> Any:
        mirror = FakeMirror([], **settings) if settings else None
        folder = root / f"machine_{world.rank}"
        folder.mkdir(exist_ok=True)
        return action(Session(folder, world=world, mirror=mirror))

    return results(on_two_ranks(on_one, machines=2))


def test_a_step_that_one_machine_lacks_is_set_aside_on_the_others(tmp_path: Path) -> None:
    on_machines(tmp_path, lambda session: session.save(10, 20))
    (tmp_path / "machine_1" / "checkpoint_step_20").rename(
        tmp_path / "machine_1" / ".tmp-checkpoint_step_20-killed"
    )

    def go_on(session: Session) -> list[int | None]:
        state = session.saver.load(read_step(session.folder / "checkpoint_step_10"))
        session.saver.go_on_from(state)
        there = session.there()
        session.save(20)
        return [*there, *session.there()]

    assert on_machines(tmp_path, go_on) == [[10, 10, 20]] * 2
    assert list((tmp_path / "machine_0").glob("superseded-checkpoint_step_20-*"))


@pytest.mark.parametrize(("drains", "finished"), [(True, True), (False, False)])
def test_the_end_waits_for_every_machines_mirror(
    tmp_path: Path, drains: bool, finished: bool
) -> None:
    def drain(session: Session) -> bool:
        mirror = cast("FakeMirror", session.saver._mirror)
        mirror.drains = drains if session.folder.name == "machine_1" else True
        return session.saver.drain(5.0, lambda _status: None)

    assert on_machines(tmp_path, drain, drains=True) == [finished] * 2


def test_what_is_wrong_with_another_machines_mirror_is_told_with_the_save(tmp_path: Path) -> None:
    def save(session: Session) -> list[str]:
        if session.folder.name == "machine_1":
            cast("FakeMirror", session.saver._mirror).said = said_by_mirror(last_error="it is down")
        session.save(10)
        return session.log

    first, _ = on_machines(tmp_path, save, drains=True)
    assert first[-1].endswith(
        "| upload queued | node 1: nothing mirrored yet, 1 behind, last error: it is down"
    )
