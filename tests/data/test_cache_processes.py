"""Several ranks on a node and several nodes, each a process, over one store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import Emulator, Fault
from shard_samples import npy_bytes, settings

from refocused.bucket.gcs import GcsBucket
from refocused.data.manifest.shard_manifest import build_manifest, manifest_to_json

pytestmark = pytest.mark.bucket

SHARDS, TOKENS = 12, 20_000
SCRIPT = Path(__file__).with_name("cache_process.py")


def shard_tokens(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 50_000, TOKENS).astype(np.uint16)


@pytest.fixture
def digest(emulator: Emulator) -> str:
    """The digest of all tokens, which are in the emulator."""
    found = hashlib.sha256()
    for index in range(SHARDS):
        emulator.put(f"tokens/t_{index:02d}.npy", npy_bytes(shard_tokens(index)))
        found.update(shard_tokens(index).tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def rank(
    emulator: Emulator, manifest: Path, node: Path, role: str, limit_bytes: int = 0
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            str(SCRIPT),
            f"{emulator.url}/tokens",
            str(manifest),
            str(node),
            role,
            str(limit_bytes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "STORAGE_EMULATOR_HOST": emulator.proxy.url},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def written_manifest(emulator: Emulator, folder: Path) -> Path:
    bucket = GcsBucket(f"{emulator.url}/tokens")
    path = folder / "manifest.json"
    path.write_text(manifest_to_json(build_manifest(bucket, settings(), cache_file=None)))
    emulator.proxy.requests.clear()
    return path


def read_line(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the rank ended without a word"
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_object_is_asked_for_once_a_node_however_many_ranks_read_it(
    emulator: Emulator, digest: str, tmp_path: Path, nodes: int
) -> None:
    manifest = written_manifest(emulator, tmp_path)
    with contextlib.ExitStack() as stack:
        roles = [("fetcher", "reader", "reader", "reader")[: 4 // nodes]] * nodes
        ranks = [
            stack.enter_context(rank(emulator, manifest, tmp_path / f"node_{node}", role))
            for node, node_roles in enumerate(roles)
            for role in node_roles
        ]
        reports = [read_line(process) for process in ranks]
    assert {report["digest"] for report in reports} == {digest}
    gets = Counter(r.path for r in emulator.proxy.requests if r.is_download)
    assert set(gets.values()) == {nodes}
    assert len(gets) == SHARDS


def test_ranks_under_a_limit_of_three_shards_read_everything_though_the_store_fails(
    emulator: Emulator, digest: str, tmp_path: Path
) -> None:
    manifest = written_manifest(emulator, tmp_path)
    for fault in (Fault(status=503), Fault(flip_byte=200), Fault(cut_after=9000)):
        emulator.proxy.script(lambda request: request.is_download, fault, times=2)
    limit = 3 * (2 * TOKENS + 128)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(rank(emulator, manifest, tmp_path / "node", role, limit))
            for role in ("fetcher", "reader")
        ]
        assert {read_line(process)["digest"] for process in ranks} == {digest}
        local = list((tmp_path / "node").rglob("shards/*.npy"))
        assert 0 < sum(path.stat().st_size for path in local) <= limit
