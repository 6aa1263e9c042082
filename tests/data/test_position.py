from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.position import Position
from refocused.system.errors import CheckpointError


@settings(deadline=None)
@given(steps=st.lists(st.integers(0, 50), max_size=20), per_epoch=st.integers(1, 17))
def test_advancing_in_parts_equals_advancing_at_once(steps, per_epoch):
    position = Position()
    for windows in steps:
        position = position.advanced(windows, windows_per_epoch=per_epoch)
    assert position == Position().advanced(sum(steps), windows_per_epoch=per_epoch)
    assert position.epoch * per_epoch + position.windows == sum(steps)
    assert 0 <= position.windows < per_epoch


def test_survives_json():
    position = Position(3, 123_456_789_012)
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position
    assert position.to_dict() == {"epoch": 3, "windows": 123_456_789_012}


def test_the_position_of_a_mixture_survives_json():
    position = Position(1, 30, {"web": 20, "code": 10})
    assert Position.from_dict(json.loads(json.dumps(position.to_dict()))) == position


@pytest.mark.parametrize(
    "saved",
    [
        {"epoch": 1},
        {"epoch": 1, "windows": 2, "step": 3},
        {"epoch": 1, "windows": -2},
        {"epoch": 1, "windows": 2.0},
        {"epoch": True, "windows": 2},
        {"epoch": "1", "windows": 2},
        {"epoch": 1, "sources": {"web": 2}},
        {"epoch": 1, "windows": 2, "sources": 2},
        {"epoch": 1, "windows": 2, "sources": {"web": -2}},
        {"epoch": 1, "windows": 2, "sources": {"web": 2.5}},
    ],
)
def test_refuses_a_damaged_position_showing_it(saved):
    with pytest.raises(CheckpointError) as caught:
        Position.from_dict(saved)
    assert repr(saved) in str(caught.value)
