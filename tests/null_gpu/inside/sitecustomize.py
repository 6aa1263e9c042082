"""Imported by every Python process of a walk: counts in those that train."""

import importlib.abc
import sys
from typing import Any


class BeforeTraining(importlib.abc.MetaPathFinder):
    """Prepares the process before it imports the run, which a rank does once it has joined."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "refocused.train.lifecycle.run":
            sys.meta_path.remove(self)
            import null_gpu_counts

            null_gpu_counts.prepare()


sys.meta_path.insert(0, BeforeTraining())
