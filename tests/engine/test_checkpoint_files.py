from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from refocused.bucket.checksum import crc32c_of
from refocused.engine.checkpoint_files import (
    HashingCheckpointEngine,
    HashingWriter,
    WrittenFile,
    load_checked,
    save_hashed,
)
from refocused.errors import CheckpointError

CONTENT = {"weights": torch.arange(100_000), "names": ["a", "b"]}


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel refuses to let a file grow beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_file_is_what_was_saved_and_its_digest_is_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    written = save_hashed(CONTENT, path)
    assert written == WrittenFile(path, path.stat().st_size, crc32c_of(path))
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["weights"], CONTENT["weights"])
    assert read["names"] == CONTENT["names"]


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard.pt").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        save_hashed(CONTENT, tmp_path / "shard.pt")
    assert (tmp_path / "shard.pt").read_bytes() == b"precious"


def test_the_systems_own_error_is_raised_and_not_torchs(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OSError) as caught:
        save_hashed(CONTENT, tmp_path / "shard.pt")
    assert caught.value.errno == errno.EFBIG


def test_writing_goes_on_into_the_void_after_the_first_failure() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = HashingWriter(full)
        assert writer.write(b"12345") == 5
        assert writer.error is not None
        first = writer.error
        assert first.errno == errno.ENOSPC
        assert writer.write(memoryview(b"678")) == 3
        writer.flush()
        assert writer.error is first
        assert writer.size == 8


def test_a_failure_at_the_last_flush_counts_too() -> None:
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - closing it fails, by design
    writer = HashingWriter(full)
    writer.write(b"buffered")
    assert writer.error is None
    writer.flush()
    assert writer.error is not None and writer.error.errno == errno.ENOSPC
    with pytest.raises(OSError):
        full.close()


def test_the_engine_keeps_failures_and_goes_on(tmp_path: Path) -> None:
    engine = HashingCheckpointEngine()
    engine.create(None)
    engine.save(CONTENT, str(tmp_path / "missing" / "a.pt"))
    engine.save(CONTENT, str(tmp_path / "b.pt"))
    assert [file.path.name for file in engine.written] == ["b.pt"]
    assert [error.errno for error in engine.errors] == [errno.ENOENT]
    assert torch.equal(engine.load(str(tmp_path / "b.pt"))["weights"], CONTENT["weights"])


def test_each_save_starts_with_a_clean_slate(tmp_path: Path) -> None:
    engine = HashingCheckpointEngine()
    engine.create(None)
    engine.save(CONTENT, str(tmp_path / "missing" / "a.pt"))
    engine.save(CONTENT, str(tmp_path / "b.pt"))
    engine.create(None)
    assert (engine.written, engine.errors) == ([], [])


class Attack:
    """What a forged file could hold: unpickling it calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/nonexistent/forged"),))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"optimizer_state_dict": Attack()}, tmp_path / "forged.pt")
    for mapped in (False, True):
        with pytest.raises(CheckpointError, match=r"forged.pt cannot be read: Weights only load"):
            load_checked(tmp_path / "forged.pt", mapped=mapped)


def test_deepspeeds_own_small_classes_are_read(tmp_path: Path) -> None:
    content = {
        "scaler": DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False),
        "stage": ZeroStageEnum.weights,
        "address": fragment_address(numel=3, start=4),
    }
    torch.save(content, tmp_path / "small.pt")
    read = load_checked(tmp_path / "small.pt", mapped=True)
    assert read["scaler"].cur_scale == 2.0**16
    assert (read["stage"], read["address"]) == (content["stage"], content["address"])
