"""Small texts and a small byte-pair encoding for the tests of tokenising."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from refocused.bucket.folder import DirectoryBucket
from refocused.data.manifest.shard_manifest import read_manifest

WORDS = (
    "the cat sat on the mat and it's 1984, \n\nshe said: Hëllo wörld! \t don't 漢字 🙂 " * 2
).split(" ")


def tiny_bpe(folder: Path) -> Path:
    """Write `vocab.bpe` and `encoder.json` of 256 bytes, some merges, and the end of text."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in plain]
    characters = [chr(byte) for byte in plain] + [chr(256 + n) for n in range(len(others))]
    space = chr(256 + others.index(ord(" ")))
    merges = [("t", "h"), ("th", "e"), (space, "the"), (space, "s"), (space, "c"), ("a", "t")]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    tokens = [*characters, *(first + second for first, second in merges), "<|endoftext|>"]
    encoder = {token: number for number, token in enumerate(tokens)}
    (folder / "encoder.json").write_text(json.dumps(encoder), encoding="utf-8")
    return folder


def word_file(path: Path, *, ends: str | None = "<|endoftext|>") -> Path:
    words = {"the": 0, "cat": 1, "[UNK]": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends is not None:
        tokenizer.add_special_tokens([ends])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def random_texts(number: int, *, words: int = 40, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) or "x" for _ in range(number)]


def write_jsonl(path: Path, texts: Sequence[Any], *, field: str = "text") -> Path:
    content = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode(), mtime=0))
    else:
        path.write_text(content)
    return path


def write_parquet(
    path: Path, texts: Sequence[Any], *, field: str = "text", group: int = 10
) -> Path:
    parquet.write_table(pyarrow.table({field: texts}), path, row_group_size=group)
    return path


def stream(folder: Path, split: str) -> list[int]:
    """Return the tokens of all shards of a split, one after the other."""
    paths = sorted(folder.glob(f"*_{split}_*.npy"))
    return [int(token) for path in paths for token in np.load(path)]


def documents_of(tokens: Sequence[int], *, begin: int) -> list[list[int]]:
    documents: list[list[int]] = []
    for token in tokens:
        if token == begin:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of everything below a folder, hidden files too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_prepared(folder: Path) -> None:
    """Check that every shard is what the manifest says, and that nothing is left over."""
    from refocused.bucket.bucket import is_stored

    bucket = DirectoryBucket(folder)
    manifest = read_manifest(bucket)
    for shard in manifest.shards:
        assert shard.crc32c is not None
        assert is_stored(bucket, shard.name, size=shard.size, crc32c=shard.crc32c)
        tokens = np.load(folder / shard.name)
        assert (len(tokens), int(tokens.max())) == (shard.tokens, shard.max_id)
    names = {shard.name for shard in manifest.shards}
    assert set(files_of(folder)) == {*names, "manifest.json", "recipe.json"}
