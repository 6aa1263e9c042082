from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from refocused.train.step.garbage_collection import quick_imports


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_rests_and_leaves_out_what_is_then_there() -> None:
    with quick_imports():
        assert not gc.isenabled()
        imported: list[object] = [[]]
    assert gc.isenabled()
    assert not any(one is imported for one in gc.get_objects())  # they are not walked
    later: list[object] = [[]]
    assert any(one is later for one in gc.get_objects())


def test_it_goes_on_after_an_error_and_stays_off_where_it_was() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
