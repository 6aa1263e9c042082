"""The allowed contents of a checkpoint file."""

import os
import pickle
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from refocused.engine.state_files import UnreadableFileError, read_state
from refocused.system.errors import CheckpointError

STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
GETATTR = b"c__builtin__\ngetattr\n"  # as protocol 2 names it


def write(path: Path, value: bytes) -> Path:
    """Write a file as `torch.save` does whose content is `{"stage": value}`, by its pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data.pkl", b"\x80\x02}X\x05\0\0\0stage" + value + b"s.")
    return path


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


@pytest.mark.parametrize("member", ZeroStageEnum, ids=lambda member: member.name)
@pytest.mark.parametrize("mapped", [False, True])
def test_both_forms_of_a_pickled_stage_are_read(
    tmp_path: Path, member: ZeroStageEnum, mapped: bool
) -> None:
    by_name = call(GETATTR, STAGE, text(member.name))  # Python 3.11.2
    by_value = call(STAGE, b"K" + bytes([member.value]))  # 3.11.7 and newer
    for form in (by_name, by_value):
        file = write(tmp_path / "states.pt", form)
        assert torch.load(file, weights_only=False) == {"stage": member}  # the bytes are right
        stage = read_state(file, mapped=mapped)["stage"]
        assert (stage, type(stage)) == (member.value, int)


@pytest.mark.parametrize(
    "form",
    {
        "an attribute that is no member": call(GETATTR, STAGE, text("mro")),
        "a hidden attribute": call(GETATTR, STAGE, text("__class__")),
        "of another class": call(GETATTR, b"ccollections\nOrderedDict\n", text("fromkeys")),
        "of a value": call(GETATTR, text("weights"), text("upper")),
        "of a module's function": call(GETATTR, b"ctorch._utils\n_rebuild_tensor\n", text("x")),
        "a third argument": call(GETATTR, STAGE, text("mro"), b"K\x03"),
        "of itself": call(GETATTR, GETATTR, text("weights")),
        "another class of an Enum": b"cdeepspeed.runtime.zero.config\nOffloadDeviceEnum\n",
    }.items(),
    ids=lambda item: item[0],
)
def test_getattr_reads_only_members_of_an_allowed_class(
    tmp_path: Path, form: tuple[str, bytes]
) -> None:
    with pytest.raises(UnreadableFileError, match=r"states.pt cannot be loaded: "):
        read_state(write(tmp_path / "states.pt", form[1]))


def test_deepspeeds_own_objects_in_earlier_files_become_mappings(tmp_path: Path) -> None:
    scaler, address = DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False), fragment_address(3, 4)
    torch.save({"scaler": scaler, "address": address}, tmp_path / "small.pt")
    read = read_state(tmp_path / "small.pt", mapped=True)
    assert read == {"scaler": vars(scaler), "address": {"numel": 3, "start": 4}}


class Runs:
    """Creates a folder when unpickled without restrictions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("mapped", [False, True])
def test_code_in_a_file_is_rejected_and_not_run(tmp_path: Path, mapped: bool) -> None:
    file, folder = tmp_path / "states.pt", tmp_path / "made"
    torch.save({"module": Runs(folder)}, file)
    with pytest.raises(UnreadableFileError, match=r"cannot be loaded: it contains .*posix\.mkdir"):
        read_state(file, mapped=mapped)
    assert not folder.exists()
    torch.load(file, weights_only=False)
    assert folder.exists()  # the file is able to


def test_truncated_corrupt_and_other_files_are_rejected(tmp_path: Path) -> None:
    torch.save({"module": torch.ones(1000)}, tmp_path / "states.pt")
    spoilt = [b"h\x07", b"\xff", b"R", call(STAGE, text("weights"))]
    files = [write(tmp_path / f"{number}.pt", form) for number, form in enumerate(spoilt)]
    cut = (tmp_path / "states.pt").read_bytes()[:2000]
    for number, content in enumerate([cut, b"", b"no zip file at all", b"PK\3\4" + bytes(100)]):
        files.append(tmp_path / f"other-{number}.pt")
        files[-1].write_bytes(content)
    for file in files:
        with pytest.raises(UnreadableFileError, match="cannot be loaded"):
            read_state(file, mapped=True)


def test_a_read_error_is_not_taken_for_corruption(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.pt cannot be read: No such file") as told:
        read_state(tmp_path / "gone.pt", mapped=True)
    assert not isinstance(told.value, UnreadableFileError)


def test_threads_read_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_load(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.001)  # lets another thread begin or end a read
        return load(*arguments, **options)

    load = torch.load
    monkeypatch.setattr(torch, "load", slow_load)
    file = write(tmp_path / "states.pt", call(GETATTR, STAGE, text("weights")))
    failed: list[Exception] = []

    def read() -> None:
        try:
            for _ in range(20):
                read_state(file)
        except CheckpointError as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_the_crafted_bytes_are_what_pickle_writes(tmp_path: Path) -> None:
    """Check the form that this Python has."""

    class ByName:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (ZeroStageEnum, "weights")

    for value in (ByName(), ZeroStageEnum.weights):
        torch.save({"stage": value}, tmp_path / "saved.pt")
        assert read_state(tmp_path / "saved.pt") == {"stage": 3}
    assert GETATTR in pickle.dumps(ByName(), 2)
