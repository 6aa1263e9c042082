from __future__ import annotations

from pathlib import Path

from refocused.bucket.bucket import (
    BLOCK_BYTES,
    crc32c_from_base64,
    crc32c_of,
    crc32c_to_base64,
    extended_crc32c,
)


def test_it_is_castagnoli(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123456789")
    assert crc32c_of(tmp_path / "x") == 0xE3069283  # the check value of RFC 3720's polynomial


def test_a_file_of_several_blocks_is_hashed_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * (BLOCK_BYTES // 256) + b"tail"
    (tmp_path / "x").write_bytes(content)
    assert crc32c_of(tmp_path / "x") == extended_crc32c(0, content)


def test_it_can_be_extended() -> None:
    assert extended_crc32c(extended_crc32c(0, b"1234"), b"56789") == 0xE3069283


def test_base64_is_big_endian_and_goes_both_ways() -> None:
    assert crc32c_to_base64(0xE3069283) == "4waSgw=="
    assert crc32c_from_base64("4waSgw==") == 0xE3069283
