"""refocused: pre-training of ~1B language models with DeepSpeed, from a bucket of tokens."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refocused.api import CheckpointManager, estimate_run, load, start_training
    from refocused.data.loader.open_data import TokenLoader

__version__ = "0.1.0"
__all__ = ["CheckpointManager", "TokenLoader", "estimate_run", "load", "start_training"]


def __getattr__(name: str) -> Any:
    """Import a name of the API on its first use: `import refocused` alone needs no package."""
    if name not in __all__:
        raise AttributeError(f"module 'refocused' has no attribute {name!r}")
    module = "data.loader.open_data" if name == "TokenLoader" else "api"
    return getattr(importlib.import_module(f"refocused.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
