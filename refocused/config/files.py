"""Finding the files of a `config/` folder by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from refocused.config.suggestions import did_you_mean
from refocused.system.errors import ConfigError

Kind = Literal["runs", "models", "deepspeed"]

REPOSITORY_CONFIG = Path(__file__).resolve().parents[2] / "config"
_SUFFIXES: dict[Kind, str] = {"runs": ".yaml", "models": ".json", "deepspeed": ".json"}


def find_config(kind: Kind, name: str | Path, *, beside: Path | None = None) -> Path:
    """Find a run, a model shape or a DeepSpeed fragment.

    Args:
        kind: Folder below `config/`.
        name: A path to a file, or the bare name of one in that folder.
        beside: A run file; the `config/` folder that holds it is searched first, then the
            repository's.

    Raises:
        ConfigError: There is none; the message names what there is.
    """
    suffix = _SUFFIXES[kind]
    if Path(name).is_file():
        return Path(name)
    folders = [REPOSITORY_CONFIG / kind]
    if beside is not None:
        folders.insert(0, beside.resolve().parent.parent / kind)
    if Path(name).name == str(name):  # a bare name, not a path
        for folder in folders:
            found = folder / f"{str(name).removesuffix(suffix)}{suffix}"
            if found.is_file():
                return found
    there_are = sorted({file.stem for folder in folders for file in folder.glob(f"*{suffix}")})
    raise ConfigError(
        f"no file {str(name).removesuffix(suffix)}{suffix}."
        f"{did_you_mean(Path(name).stem, there_are)} "
        f"There are {', '.join(there_are)} in config/{kind}; a path to a file works too."
    )
