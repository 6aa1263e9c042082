"""Damaged and lying headers of every form, by the thousand: each gives tokens or a named error.

    .venv/bin/python tests/data/header_fuzz.py --cases 100000

Run as a process of its own whose memory is limited, so that a header that makes the reader
allocate what it claims shows as a MemoryError.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
from shard_samples import llm_c_bytes, npy_bytes, npz_bytes, pt_bytes, settings

from refocused.data.formats.token_blocks import count_tokens, token_blocks
from refocused.data.formats.token_layout import read_layout
from refocused.system.errors import ShardError

ROOM_BYTES = 512 << 20  # above what the imports take
LARGEST_RATIO = 1040  # deflate's own limit
HEADER_BYTES = 200  # where most of a header lies; damage is drawn from there half of the time
LIES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)

ROWS = np.array([[5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.int32)
LENGTHS = np.array([2, 3, 0, 4], np.int32)


def samples() -> dict[str, bytes]:
    """Return a good file of each form."""
    import torch

    stored = io.BytesIO()
    np.savez(stored, tokens=np.arange(300, dtype=np.uint16))
    return {
        "x.npy": npy_bytes(np.arange(40, dtype=np.int32)),
        "rows.npy": npy_bytes(np.arange(40, dtype=np.int64).reshape(4, 10)),
        "x.npz": npz_bytes(input_ids=ROWS, sequence_lengths=LENGTHS),
        "mask.npz": npz_bytes(input_ids=ROWS, attention_mask=(ROWS > 0).astype(np.int8)),
        "stored.npz": stored.getvalue(),
        "x.pt": pt_bytes(torch.arange(40)),
        "rows.pt": pt_bytes(torch.arange(40, dtype=torch.int32).reshape(4, 10)),
        "x.bin": llm_c_bytes(range(40)),
        "raw.bin": np.arange(700, dtype=np.uint16).tobytes(),
    }


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return a file with one to four faults: flipped bytes, lies, cuts, repeats, foreign ends."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        if not found:
            break
        at = _place(len(found), chance)
        kind = chance.randrange(7)
        if kind <= 1:
            found[at] = chance.randrange(256)
        elif kind == 2:
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            form = chance.choice(("<B", "<H", "<I", "<Q", ">I"))
            lie = chance.choice(LIES) % 2 ** (8 * struct.calcsize(form))
            found[at : at + struct.calcsize(form)] = struct.pack(form, lie)
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at:at] = found[: chance.randrange(1, 40)]
        else:
            found[at : at + 8] = str(chance.choice(LIES)).encode()[:8]
    return bytes(found)


def damaged_inside(content: bytes, chance: random.Random) -> bytes:
    """Return a zip whose directory and checksums are right and of whose members one is damaged."""
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(rebuilt, "w") as new:
        entries = old.infolist()
        victim = chance.choice(entries)
        for entry in entries:
            member = old.read(entry)
            member = damaged(member, chance) if entry is victim else member
            new.writestr(entry.filename, member, compress_type=entry.compress_type)
    return rebuilt.getvalue()


def _place(size: int, chance: random.Random) -> int:
    if chance.random() < 0.5:
        return chance.randrange(size)
    near = min(HEADER_BYTES, size)
    start = chance.choice((0, size - near))  # a zip's directory is at its end
    return start + chance.randrange(near)


class WatchedFile(io.BytesIO):
    """A file in memory that adds up what is read out of it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.bytes_read += len(content)
        return content


def outcome(content: bytes, name: str) -> str:
    """Read a file as a run does; return what came of it, or raise what nobody may meet."""
    data = settings(pad_id=0, separator_id=9, dtype="uint16")
    file = WatchedFile(content)
    try:
        layout = read_layout(file, name=name, data=data)
        count_tokens(file, layout, name=name)
        tokens = sum(len(block) for block in token_blocks(file, layout, name=name))
    except ShardError as error:
        assert name in str(error), f"the error does not name the file: {error}"
        assert file.bytes_read <= 40 * (len(content) + 1000), f"{file.bytes_read} bytes read"
        return "refused"
    assert tokens <= len(content) * LARGEST_RATIO, f"{tokens} tokens of {len(content)} bytes"
    return "read"


def fuzz(cases: int, seed: int) -> dict[str, object]:
    """Return how many files were read and refused, and the first few that did neither."""
    soft = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (soft + ROOM_BYTES, soft + ROOM_BYTES))
    chance = random.Random(seed)
    good = samples()
    counts = {name: {"read": 0, "refused": 0} for name in good}
    crashes = []
    for number in range(cases):
        name = chance.choice(list(good))
        inside = name.endswith((".npz", ".pt")) and chance.random() < 0.7
        content = (damaged_inside if inside else damaged)(good[name], chance)
        try:
            counts[name][outcome(content, name)] += 1
        except Exception as error:
            crashes.append(f"case {number}, {name}: {error!r}, of {content!r}"[:2000])
    return {"cases": cases, "seed": seed, "counts": counts, "crashes": crashes[:5]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    assert zipfile  # imported before memory is limited
    print(json.dumps(fuzz(chosen.cases, chosen.seed)))
