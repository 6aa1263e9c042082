"""The settings of a run, checked before anything starts; where the shipped run files are."""

from pathlib import Path


def shipped_files() -> Path:
    """Return the folder of the shipped `runs/`, `models/`, `deepspeed/` and `prices.yaml`.

    This is `config/` in a checkout. A wheel carries a copy as `refocused/shipped` (`setup.py`).
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent / "config"
