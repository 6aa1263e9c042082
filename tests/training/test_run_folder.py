"""All ranks must see one folder of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from thread_ranks import on_two_ranks

from refocused.errors import ConfigError
from refocused.training.run import _require_one_folder
from refocused.world import World


@pytest.mark.parametrize("shared", [True, False])
def test_machines_that_do_not_share_the_runs_folder_are_refused(
    tmp_path: Path, shared: bool
) -> None:
    folders = [tmp_path / "one", tmp_path / ("one" if shared else "other")]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def action(world: World) -> None:
        _require_one_folder(folders[world.rank], world)

    ended = on_two_ranks(action)
    for rank in ended:
        if shared:
            assert rank.error is None
        else:
            assert isinstance(rank.error, ConfigError)
            assert "rank 1: The run's folder" in str(rank.error)
            assert "a disk that all machines share" in str(rank.error)
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
