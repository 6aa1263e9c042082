"""What DeepSpeed compiles on a machine before a run with an offload to NVMe can start."""

from __future__ import annotations

import os


def why_no_async_io(device: str) -> str | None:
    """Return why DeepSpeed's asynchronous files cannot be built here; None: they can.

    Args:
        device: `cuda` or `cpu`.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)  # or it searches, with warnings
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if builder.is_compatible(verbose=False):
        return None
    return builder.error_log or "libaio's headers (libaio-dev) are not found"
