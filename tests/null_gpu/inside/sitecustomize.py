"""Imported by every Python process of a walk: changes modules of refocused as they are imported."""

import importlib.abc
import importlib.util
import sys
from typing import Any

# Those of `null_gpu_patches.PATCHES`, which imports more than each process should.
PATCHED = {
    "kernel_errors",
    "refocused.engine.bit_checks",
    "refocused.engine.finite_updates",
    "refocused.evaluate.export",
    "refocused.train.lifecycle.launch_session",
    "refocused.train.lifecycle.resume",
    "refocused.train.lifecycle.trial",
    "refocused.train.step.loop",
    "refocused.train.step.profile",
    "refocused.train.step.reporter",
    "refocused.train.step.saver",
    "torch.backends.cuda",
    "transformers.generation.utils",
}


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds a module as without it, and lets its patch follow its code."""

    def __init__(self) -> None:
        self._finding = set[str]()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHED or name in self._finding:
            return None
        self._finding.add(name)
        spec = importlib.util.find_spec(name)
        self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: Any) -> None:
                from null_gpu_patches import PATCHES

                execute(module)
                PATCHES[name](module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, PatchingFinder())
