"""Importing torch and what stands on it without the collector walking it again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the `with`, import; the cycle collector rests, and walks what is then there no more.

    torch, transformers and DeepSpeed make a million objects that stay to the end. Collections in
    the midst of that took 2 s of the 9 s of CPU that a rank's start needs, and every later one
    walks them again. What else is alive at the end of the `with` is kept too, if it is a cycle:
    nothing large may be among it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
