from __future__ import annotations

import pytest

from refocused.monitor.sampler.gpu_reader import local_ranks, visible_devices

ALIKE = [("GPU-aa00", "H100"), ("GPU-ab00", "H100"), ("GPU-bb00", "H100"), ("GPU-cc00", "H100")]
MIXED = [("GPU-aa00", "L4"), ("GPU-ab00", "H100")]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 3 , 1 ", [3, 1]),
        ("GPU-bb00,GPU-aa00", [2, 0]),
        ("GPU-bb,1", [2, 1]),
        ("GPU-a,1", []),  # two begin so
        ("1,-1,2", [1]),  # what follows a word that names none is not seen
        ("1,9,2", [1]),
        ("1,1", []),
        ("0,GPU-aa", []),
        ("MIG-aa00,1", []),
    ],
)
def test_devices_as_cuda_numbers_them(visible: str | None, expected: list[int]) -> None:
    assert visible_devices(ALIKE, visible=visible, cuda_order=None) == expected


def test_numbers_say_nothing_where_kinds_differ_and_cuda_puts_the_fastest_first() -> None:
    assert visible_devices(MIXED, visible="0,1", cuda_order=None) == [None, None]
    assert visible_devices(MIXED, visible=None, cuda_order="FASTEST_FIRST") == [None, None]
    assert visible_devices(MIXED, visible="1,0", cuda_order="PCI_BUS_ID") == [1, 0]
    assert visible_devices(MIXED, visible="GPU-ab,GPU-aa", cuda_order=None) == [1, 0]


def test_a_gpu_of_unknown_name_is_no_other_kind() -> None:
    gpus = [(None, None), *ALIKE[1:]]
    assert visible_devices(gpus, visible="0,1", cuda_order=None) == [0, 1]


def test_owners() -> None:
    def owners(visible: str | None, ranks: int) -> list[int | None]:
        return local_ranks(ALIKE, visible=visible, cuda_order=None, ranks=ranks)

    assert owners("3,1", 2) == [None, 1, None, 0]
    assert owners(None, 2) == [0, 1, None, None]
    assert owners("3,1", 4) == [None, 1, None, 0]
    assert owners("0", 0) == [None] * 4
