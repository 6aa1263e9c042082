import contextlib
from pathlib import Path

import numpy as np
import pytest
from data.text_samples import stream
from power_cut import Disk

from refocused.bucket.folder import DirectoryBucket
from refocused.data.manifest.shard_manifest import Shard
from refocused.prepare.write_shards import Cursor, Journal, ShardPacker, packed_sources

DTYPE = np.dtype("<u2")
SOURCES = [np.arange(n * 100, n * 100 + 35) for n in range(6)]
ALL = [int(one) for source in SOURCES for one in source]


class PowerCutError(Exception):
    pass


class CutJournal(Journal):
    """A journal that loses its power after so many shards."""

    left = 10**9

    def note(self, stream: str, cursor: Cursor, shard: Shard) -> None:
        if not self.left:
            raise PowerCutError
        self.left -= 1
        super().note(stream, cursor, shard)


def opened(folder: Path) -> CutJournal:
    (folder / "work").mkdir(exist_ok=True)
    return CutJournal(folder / "work" / "journal.jsonl", dtype=DTYPE)


def pack(folder: Path, *, cut_after: int = 10**9) -> list[Shard]:
    """Pack all sources, or until so many shards are in the journal."""
    journal = opened(folder)
    journal.left = cut_after
    packer = ShardPacker(
        DirectoryBucket(folder),
        journal,
        "s",
        folder=folder / "work",
        name="s_train",
        shard_name=lambda number: f"s_train_{number:06d}.npy",
        shard_tokens=50,
        begin_id=100,
    )
    assert (packer.source, packer.start) == packer.cursor == journal.cursor("s")
    with contextlib.closing(packer):
        while packer.source < len(SOURCES):
            packer.add(SOURCES[packer.source][packer.start :])
            packer.end_source()
        packer.end_shard()
    return journal.shards("s")


def test_finished_shards_and_their_rows_survive_a_power_cut(tmp_path, monkeypatch):
    rows = pack(tmp_path)
    disk = Disk(monkeypatch)
    assert pack(tmp_path) == rows  # a start reads the journal and writes it anew
    assert disk.exposed == []
    disk.cut(tmp_path / "work")
    assert opened(tmp_path).shards("s") == rows


@pytest.mark.parametrize("shards", range(5))
def test_packing_continues_after_any_shard(tmp_path, shards):
    with pytest.raises(PowerCutError):
        pack(tmp_path, cut_after=shards)
    assert packed_sources(tmp_path / "work", ["s"]) == [0, 1, 2, 4, 5][shards]
    before = {path: path.stat().st_ino for path in tmp_path.glob("*.npy")}
    rows = pack(tmp_path)
    assert stream(tmp_path, "train") == ALL
    assert [row.tokens for row in rows] == [50, 50, 50, 50, 10]
    assert [row.max_id for row in rows] == [114, 229, 409, 524, 534]
    assert [row.documents for row in rows] == [1, 0, 0, 0, 0]
    for row in rows:
        assert (tmp_path / row.name).stat().st_size == row.size == 128 + 2 * row.tokens
    assert {path: path.stat().st_ino for path in before} == before


def test_a_journal_is_rewound_to_a_shard(tmp_path):
    rows = pack(tmp_path)
    opened(tmp_path).rewind("s", shards=2)
    journal = opened(tmp_path)
    assert (journal.shards("s"), journal.cursor("s")) == (rows[:2], (2, 30))
    journal.rewind("s", shards=0)
    assert journal.cursor("s") == (0, 0)


@pytest.mark.parametrize("garbage", [b"\0" * 99, b"\0" * 99 + b"\n", b"\0\n{}\n", b'{"stream": \n'])
def test_what_a_power_cut_left_at_the_journals_end_is_dropped(tmp_path, garbage):
    with pytest.raises(PowerCutError):
        pack(tmp_path, cut_after=3)
    journal = tmp_path / "work" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + garbage)
    packed = packed_sources(tmp_path / "work", ["s"])
    assert opened(tmp_path).cursor("s")[0] == packed > 0
    pack(tmp_path)
    assert stream(tmp_path, "train") == ALL


def test_a_torn_last_line_is_dropped(tmp_path):
    rows = pack(tmp_path)
    path = tmp_path / "work" / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    journal = opened(tmp_path)
    assert journal.shards("s") == rows[:-1]
    journal.note("s", (6, 0), rows[-1])
    assert opened(tmp_path).shards("s") == rows
