"""The files of a save: bytes, checksums, errors, copies and random states."""

import collections
import contextlib
import errno
import io
import os
import pickletools
import random
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from refocused.bucket.bucket import crc32c_of
from refocused.engine import state_files
from refocused.engine.shard_files import HashingCheckpointEngine, HostMemory, capture, restore
from refocused.engine.state_files import HashingWriter, WrittenFile, copy_hashed, save_hashed

CONTENT = {"weights": torch.arange(100_000), "names": ["a", "b"]}


@pytest.fixture
def small_files():
    """Limit files to 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_checksum_is_of_the_file_and_the_archive_has_none(tmp_path):
    path, target = tmp_path / "shard.pt", tmp_path / "below" / "copy.pt"
    written = save_hashed(CONTENT, path)
    assert written == WrittenFile(path, path.stat().st_size, crc32c_of(path))
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["weights"], CONTENT["weights"])
    with zipfile.ZipFile(path) as ours:
        assert {entry.CRC for entry in ours.infolist()} == {0}
    torch.save(CONTENT, tmp_path / "theirs.pt")  # others keep theirs
    with zipfile.ZipFile(tmp_path / "theirs.pt") as theirs:
        assert any(entry.CRC for entry in theirs.infolist())
    assert copy_hashed(path, target) == WrittenFile(target, written.size, written.crc32c)
    assert target.read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError):
        save_hashed(CONTENT, path)


def test_the_systems_error_is_raised_instead_of_torchs(tmp_path, small_files):
    with pytest.raises(OSError) as caught:
        save_hashed(CONTENT, tmp_path / "shard.pt")
    assert caught.value.errno == errno.EFBIG


def test_writes_after_the_first_error_are_discarded():
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = HashingWriter(full)
        assert writer.write(b"12345") == 5
        first = writer.error
        assert first is not None and first.errno == errno.ENOSPC
        assert writer.write(memoryview(b"678")) == 3
        writer.flush()
        assert writer.error is first


def test_a_failure_at_the_last_flush_counts_too():
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - closing it fails, by design
    writer = HashingWriter(full)
    writer.write(b"buffered")
    assert writer.error is None
    writer.flush()
    assert writer.error is not None and writer.error.errno == errno.ENOSPC
    with pytest.raises(OSError):
        full.close()


def test_write_back_starts_before_the_flush(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(state_files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(state_files, "WRITE_BACK_BYTES", 3000)
    monkeypatch.setattr(state_files, "start_write_back", lambda _, *part: sent.append(part))
    with (tmp_path / "file").open("wb") as file:
        writer = HashingWriter(file)
        for size in (500, 7000, 100, 2900):
            writer.write(os.urandom(size))
        writer.flush()
    assert sent == [(0, 3500), (3500, 3000), (6500, 3100)]
    assert writer.crc32c == crc32c_of(tmp_path / "file")


def test_a_save_collects_errors_and_the_next_one_clears_them(tmp_path):
    engine = HashingCheckpointEngine()
    engine.create(None)
    engine.save(CONTENT, str(tmp_path / "missing" / "a.pt"))
    engine.save(CONTENT, str(tmp_path / "b.pt"))
    assert [file.path.name for file in engine.written] == ["b.pt"]
    assert [error.errno for error in engine.errors] == [errno.ENOENT]
    assert torch.equal(engine.load(str(tmp_path / "b.pt"))["weights"], CONTENT["weights"])
    engine.create(None)
    assert (engine.written, engine.errors) == ([], [])


OBJECTS = {
    "zero_stage": ZeroStageEnum.weights,
    "loss_scaler": DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False, dtype=torch.float16),
    "param_slice_mappings": [{"weight": fragment_address(numel=3, start=4)}],
}


@pytest.mark.parametrize("copied", [False, True])
def test_files_have_plain_values_and_loads_restore_objects(tmp_path, copied):
    engine, file = HashingCheckpointEngine(), tmp_path / "states.pt"
    engine.create(None)
    with engine.copying() if copied else contextlib.nullcontext():
        engine.save({"optimizer_state_dict": OBJECTS}, str(file))
    engine.write_copies()
    pickled = torch._C.PyTorchFileReader(str(file)).get_record("data.pkl")
    named = {arg for code, arg, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert named == {"torch float16"}
    read = engine.load(str(file))["optimizer_state_dict"]
    assert read["zero_stage"] == 3 and type(read["zero_stage"]) is int
    assert read["param_slice_mappings"] == [{"weight": {"numel": 3, "start": 4}}]
    assert type(read["loss_scaler"]) is DynamicLossScaler
    assert vars(read["loss_scaler"]) == vars(OBJECTS["loss_scaler"])


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def content_of(step):
    """Content as in a checkpoint: views of one storage, a parameter, plain values."""
    flat = torch.full((1000,), step)
    return {
        "masters": [flat[:600], flat[600:].view(20, 20)],
        "module": collections.OrderedDict(weight=torch.nn.Parameter(torch.full((3, 5), -step))),
        "half": torch.arange(7, dtype=torch.bfloat16) + step,
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "empty": [torch.empty(0), torch.empty(0)],
        "shapes": [torch.Size([3, 5])],
        "step": step,
        "name": "adam",
    }


def test_a_copy_is_independent_of_later_changes():
    content = content_of(1.0)
    before, copy = saved(content), HostMemory().copy(content)
    first, second = (part.untyped_storage() for part in copy["masters"])
    assert first.data_ptr() == second.data_ptr()
    assert first.nbytes() == 4000
    content["masters"][0].fill_(99.0)
    content["step"] = 2.0
    content["shapes"].append("more")
    with torch.no_grad():
        content["module"]["weight"].zero_()
    assert saved(copy) == before


def test_the_next_copy_reuses_the_memory():
    def pointers(copy):
        return [copy["masters"][0].untyped_storage().data_ptr(), copy["half"].data_ptr()]

    memory = HostMemory()
    first = pointers(memory.copy(content_of(1.0)))
    second = memory.copy(content_of(2.0))
    assert pointers(second) == first
    assert saved(second) == saved(content_of(2.0))
    grown = {"moments": torch.ones(2000), "step": torch.tensor(1)}
    assert saved(memory.copy(grown)) == saved(grown)


@pytest.mark.gpu
def test_a_copy_from_a_gpu_lies_in_pinned_host_memory():
    copy = HostMemory().copy({"weights": torch.ones(1000, device="cuda")})
    torch.cuda.synchronize()
    assert copy["weights"].is_pinned()
    assert torch.equal(copy["weights"], torch.ones(1000))


def test_a_restored_state_repeats_its_draws(tmp_path):
    torch.manual_seed(3)
    torch.save(capture(), tmp_path / "state.pt")
    wanted = torch.rand(3)
    restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(torch.rand(3), wanted)


def test_draws_of_libraries_change_no_saved_state():
    before = saved(capture())
    random.random(), np.random.rand()  # as google-cloud-storage does in an upload
    assert saved(capture()) == before
