"""Checkpoints of small models, saved once by real ranks for all tests."""

from pathlib import Path

import pytest
from evaluate.step_saves import SAVES, save_steps


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folders of checkpoints, by number of ranks."""
    folders = {}
    for ranks, saves in SAVES.items():
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        save_steps(folders[ranks], saves, ranks=ranks)
    return folders


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need the saved checkpoints as slow."""
    for item in items:
        is_here = item.path.is_relative_to(Path(__file__).parent)
        if is_here and "saved" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
