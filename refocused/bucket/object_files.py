"""Which file each object of a bucket becomes: never one file for two objects."""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from refocused.bucket.bucket import checked_name
from refocused.bucket.partial_files import disk_errors, existing_folder
from refocused.system.errors import BucketError


def object_files(names: Iterable[str], folder: Path, *, where: str) -> dict[str, Path]:
    """Return the file below a folder that each object becomes; the folder need not exist.

    `a//b` becomes `a/b`. Names that differ only in case or in their Unicode form are refused where
    the folder's file system takes them for one.

    Args:
        names: Names of objects, each once.
        folder: Where the files go.
        where: The bucket, for messages.

    Raises:
        BucketError: A name cannot be a file's, two objects would be one file, or one would be a
            folder of the other.
    """
    paths = {name: PurePosixPath(checked_name(name, where=where)) for name in names}
    clash = _clash(paths, _folded)
    if clash is not None:  # seldom: only then is the file system tried
        clash = _clash(paths, _form_on(folder))
    if clash is not None:
        name, other, what = clash
        raise BucketError(
            f"{where}: the objects {name!r} and {other!r} cannot both be files below {folder}: "
            f"{what}. Rename one of them in the bucket, or exclude it."
        )
    return {name: folder / path for name, path in paths.items()}


def _clash(
    paths: Mapping[str, PurePosixPath], form: Callable[[str], str]
) -> tuple[str, str, str] | None:
    """Return two names that cannot both be files, and why; None when all can.

    Args:
        paths: The path of each name.
        form: What of a path tells it from others.
    """
    owners: dict[str, str] = {}
    for name, path in paths.items():
        other = owners.setdefault(form(str(path)), name)
        if other != name:
            return other, name, "both would be the same file"
    for name, path in paths.items():
        for folder in path.parents[:-1]:
            other = owners.get(form(str(folder)), name)
            if other != name:
                return other, name, "the first would be a file, and the folder of the second"
    return None


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _form_on(folder: Path) -> Callable[[str], str]:
    """Return what the file system of a folder, which need not exist, tells names apart by."""
    start = existing_folder(folder)
    with disk_errors(start), tempfile.TemporaryDirectory(dir=start, prefix=".names-") as trial:
        for name in ("a", "\u00e9"):  # the second is e with an acute accent, as one character
            Path(trial, name).touch()
        one_case = Path(trial, "A").exists()
        one_form = Path(trial, "e\u0301").exists()

    def form(text: str) -> str:
        text = unicodedata.normalize("NFC", text) if one_form else text
        return text.casefold() if one_case else text

    return form
