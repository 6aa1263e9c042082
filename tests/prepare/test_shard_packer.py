from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.text_samples import stream
from power_cut import Disk

from refocused.bucket.folder import DirectoryBucket
from refocused.data.manifest.shard_manifest import Shard
from refocused.prepare.packing_state import Journal
from refocused.prepare.shard_packer import Cursor, ShardPacker, is_open_shard_whole

DTYPE = np.dtype("<u2")
SOURCES = [np.arange(n * 100, n * 100 + 35) for n in range(6)]
ALL = [int(one) for source in SOURCES for one in source]


class PowerCutError(Exception):
    pass


def opened(folder: Path) -> Any:
    return contextlib.closing(Journal(folder / "work" / "journal.jsonl", dtype=DTYPE))


def pack(folder: Path, *, cut_after: int = 10**9) -> list[Shard]:
    """Pack all sources, or until so many lines of the journal were written."""
    (folder / "work").mkdir(exist_ok=True)
    with opened(folder) as journal:
        lines = 0

        def note(cursor: Cursor, row: Shard | None) -> None:
            nonlocal lines
            if lines == cut_after:
                raise PowerCutError
            lines += 1
            journal.note("s", cursor, row)

        assert is_open_shard_whole(folder / "work", "s_train", journal.cursor("s"), dtype=DTYPE)
        packer = ShardPacker(
            DirectoryBucket(folder),
            folder=folder / "work",
            name="s_train",
            shard_name=lambda number: f"s_train_{number:06d}.npy",
            shard_tokens=50,
            dtype=DTYPE,
            begin_id=100,
            cursor=journal.cursor("s"),
            note=note,
        )
        while packer.cursor.source < len(SOURCES):
            packer.add(SOURCES[packer.cursor.source][packer.cursor.offset :])
            packer.end_source()
        packer.end_shard()
        packer.close()
        return journal.shards("s")


def test_a_stream_is_cut_into_shards_of_one_size(tmp_path: Path) -> None:
    rows = pack(tmp_path)
    assert [row.tokens for row in rows] == [50, 50, 50, 50, 10]
    assert [row.max_id for row in rows] == [114, 229, 409, 524, 534]
    assert [row.documents for row in rows] == [1, 0, 0, 0, 0]
    assert stream(tmp_path, "train") == ALL
    for row in rows:
        assert (tmp_path / row.name).stat().st_size == row.size == 128 + 2 * row.tokens


def test_finished_shards_and_what_is_known_of_them_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pack(tmp_path)
    disk = Disk(monkeypatch)
    assert pack(tmp_path) == rows  # a start reads the journal and writes it anew
    assert disk.exposed == []
    disk.cut(tmp_path / "work")
    with opened(tmp_path) as journal:
        assert journal.shards("s") == rows


@pytest.mark.parametrize("lines", range(11))
def test_packing_goes_on_from_any_line_of_the_journal(tmp_path: Path, lines: int) -> None:
    with pytest.raises(PowerCutError):
        pack(tmp_path, cut_after=lines)
    before = {path: path.stat().st_ino for path in tmp_path.glob("*.npy")}
    rows = pack(tmp_path)
    assert stream(tmp_path, "train") == ALL
    assert [row.tokens for row in rows] == [50, 50, 50, 50, 10]
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_a_damaged_open_shard_is_seen(tmp_path: Path, damage: str) -> None:
    with pytest.raises(PowerCutError):
        pack(tmp_path, cut_after=1)
    work = tmp_path / "work"
    path = work / "s_train.open"
    with opened(tmp_path) as journal:
        cursor = journal.cursor("s")
    assert cursor.filled == 35
    assert is_open_shard_whole(work, "s_train", cursor, dtype=DTYPE)
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[: 128 + 69])
    else:
        content = bytearray(path.read_bytes())
        content[140] ^= 1
        path.write_bytes(content)
    assert not is_open_shard_whole(work, "s_train", cursor, dtype=DTYPE)


def test_a_journal_forgets_what_followed_a_shard(tmp_path: Path) -> None:
    rows = pack(tmp_path)
    with opened(tmp_path) as journal:
        journal.rewind("s", shards=2)
    with opened(tmp_path) as journal:
        assert journal.shards("s") == rows[:2]
        assert (journal.cursor("s").shard, journal.cursor("s").filled) == (2, 0)
        journal.rewind("s", shards=0)
        assert journal.cursor("s") == Cursor()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    rows = pack(tmp_path)
    path = tmp_path / "work" / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with opened(tmp_path) as journal:
        assert journal.shards("s") == rows[:-1]
        journal.note("s", Cursor(), rows[-1])
    with opened(tmp_path) as journal:
        assert journal.shards("s") == rows
