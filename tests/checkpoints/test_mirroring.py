"""The mirror as the trainer's ranks use it: reports, restarts and the final wait."""

from pathlib import Path

import pytest
from thread_ranks import on_two_ranks, results
from train.run_fakes import FakeMirror, Saving, status_of_mirror

from refocused.checkpoints.mirror.mirror import MirrorStatus
from refocused.data.order.sequences import Position
from refocused.system.world import World


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (None, "| upload queued"),
        (status_of_mirror(), "| nothing mirrored yet, 1 behind"),
        (status_of_mirror(mirrored=(5, 10)), "| mirrored up to step 10"),
        (
            status_of_mirror(mirrored=(1000,), waiting=(5,), last_error="503"),
            "| mirrored up to step 1,000, 1 behind, last error: 503",
        ),
        (status_of_mirror(mirrored=(4,), failed={10: "cut"}), "to step 4, 1 cannot be copied"),
    ],
)
def test_a_save_reports_the_mirrors_progress(
    tmp_path: Path, said: MirrorStatus | None, told: str
) -> None:
    mirror = FakeMirror([], said)
    session = Saving(tmp_path, mirror=mirror)
    session.save(10)
    assert session.log[0].endswith(told)
    assert mirror.log == ["mirror looked after"]


def test_a_refusing_bucket_and_its_recovery_are_reported_once(tmp_path: Path) -> None:
    mirror = FakeMirror([])
    session = Saving(tmp_path, mirror=mirror)
    blocked = status_of_mirror(last_error="blocked: 403, no storage.objects.create.")
    told = []
    down, well = status_of_mirror(last_error="503"), status_of_mirror()
    for mirror.said in (None, down, blocked, blocked, well):
        session.saver.mirror.watch()
        told.append(len(session.log))
    assert told == [0, 0, 1, 1, 2]
    assert session.log[0].startswith("mirror_failed: mirror blocked: 403, no storage")
    assert session.log[1].startswith("mirror_recovered: ")


def test_rank_0_has_the_mirror_and_both_ranks_get_its_result(tmp_path: Path) -> None:
    mirror = FakeMirror([], drains=False)

    def action(world: World) -> bool:
        session = Saving(tmp_path, world=world, mirror=mirror if world.is_rank_0 else None)
        session.saver.mirror.start()
        session.save(10, position=Position(0, 4))
        return session.saver.mirror.drain(60.0, lambda status: None)

    assert results(on_two_ranks(action)) == [False, False]
    assert mirror.log == ["mirror started", "mirror looked after", "drain 60"]


def test_the_wait_for_the_mirror_ends_on_both_ranks_together(tmp_path: Path) -> None:
    mirror = FakeMirror([], drains=None)
    asked = [0, 0]

    def action(world: World) -> bool:
        def given_up() -> int:
            asked[world.rank] += 1
            return asked[world.rank] == 3

        session = Saving(tmp_path, world=world, mirror=mirror if world.is_rank_0 else None)
        return session.saver.mirror.drain(60.0, lambda status: None, given_up)

    assert results(on_two_ranks(action)) == [False, False]
    assert asked == [3, 3]


@pytest.mark.parametrize("drains", [True, False])
def test_every_machines_mirror_is_reported_and_waited_for(tmp_path: Path, drains: bool) -> None:
    mirrors = FakeMirror([]), FakeMirror([], status_of_mirror(last_error="down"), drains=drains)
    sessions: list[Saving] = []

    def action(world: World) -> bool:
        folder = tmp_path / f"machine_{world.rank}"
        folder.mkdir()
        session = Saving(folder, world=world, mirror=mirrors[world.rank])
        session.save(10)
        sessions.append(session)
        return session.saver.mirror.drain(5.0, lambda _status: None)

    assert results(on_two_ranks(action, machines=2)) == [drains] * 2
    (first,) = (session for session in sessions if session.folder.name == "machine_0")
    assert first.log[-1].endswith(
        "| upload queued | node 1: nothing mirrored yet, 1 behind, last error: down"
    )
