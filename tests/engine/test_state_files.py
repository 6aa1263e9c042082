"""The allowed contents of a checkpoint file."""

import os
import zipfile

import pytest
import torch

from refocused.engine.state_files import UnreadableFileError, read_state
from refocused.system.errors import CheckpointError

STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
GETATTR = b"c__builtin__\ngetattr\n"  # as protocol 2 names it


def write(path, value):
    """Write a file as `torch.save` does whose content is `{"stage": value}`, by its pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data.pkl", b"\x80\x02}X\x05\0\0\0stage" + value + b"s.")
    return path


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call(function, *arguments):
    return function + b"(" + b"".join(arguments) + b"tR"


@pytest.mark.parametrize(
    "form",
    {
        "a member of an Enum, as Python 3.11.2 writes it": call(GETATTR, STAGE, text("weights")),
        "a member of an Enum, as later versions write it": call(STAGE, b"K\x03"),
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
def test_only_tensors_and_plain_values_are_read(tmp_path, form):
    with pytest.raises(UnreadableFileError, match=r"states.pt cannot be loaded: "):
        read_state(write(tmp_path / "states.pt", form[1]))


class Runs:
    """Creates a folder when unpickled without restrictions."""

    def __init__(self, folder):
        self._folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("mapped", [False, True])
def test_code_in_a_file_is_rejected_and_not_run(tmp_path, mapped):
    file, folder = tmp_path / "states.pt", tmp_path / "made"
    torch.save({"module": Runs(folder)}, file)
    with pytest.raises(UnreadableFileError, match=r"cannot be loaded: it contains .*posix\.mkdir"):
        read_state(file, mapped=mapped)
    assert not folder.exists()
    torch.load(file, weights_only=False)
    assert folder.exists()  # the file is able to


def test_truncated_corrupt_and_other_files_are_rejected(tmp_path):
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


def test_a_read_error_is_not_taken_for_corruption(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone.pt cannot be read: No such file") as told:
        read_state(tmp_path / "gone.pt", mapped=True)
    assert not isinstance(told.value, UnreadableFileError)
