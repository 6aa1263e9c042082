"""Which whole files are kept for validation: by a keyed hash of their names, without copies."""

from __future__ import annotations

import dataclasses
import hashlib

from refocused.data.manifest.shard_manifest import Manifest
from refocused.system.errors import ShardError

FARTHEST = 2.0  # times the share that was asked for, or one half of it


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationSplit:
    """What to put into the data section.

    Attributes:
        files: Names of the files kept; empty: they are too few or too large for the share.
        fraction: Share of the windows to keep instead; 0 where `files` says it.
        tokens: Tokens of the files kept, or that share of all.
        total_tokens: Tokens of all files.
    """

    files: tuple[str, ...]
    fraction: float
    tokens: int
    total_tokens: int


def choose_validation(manifest: Manifest, *, ratio: float, seed: int) -> ValidationSplit:
    """Keep files, in an order that depends on names and seed alone, up to a share of the tokens.

    The same file is kept whatever other files there are, as far as the share allows. Where whole
    files would miss the share by a factor of two, a share of the windows is proposed.

    Raises:
        ShardError: The share is not between 0 and 1.
    """
    if not 0 < ratio < 1:
        raise ShardError(f"--val-ratio {ratio:g}: a share between 0 and 1 is wanted, as 0.01.")
    wanted = ratio * manifest.tokens
    chosen: list[str] = []
    tokens = 0
    for shard in sorted(manifest.shards, key=lambda one: _rank(one.name, seed)):
        # Taken when that comes nearer to the share.
        if abs(tokens + shard.tokens - wanted) < abs(tokens - wanted):
            chosen.append(shard.name)
            tokens += shard.tokens
    if not chosen or len(chosen) == len(manifest.shards) or not _is_near(tokens, wanted):
        return ValidationSplit((), ratio, round(wanted), manifest.tokens)
    return ValidationSplit(tuple(sorted(chosen)), 0.0, tokens, manifest.tokens)


def _is_near(tokens: int, wanted: float) -> bool:
    return wanted / FARTHEST <= tokens <= wanted * FARTHEST


def _rank(name: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
