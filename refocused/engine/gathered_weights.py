"""Avoid repeated gathering of weights under ZeRO-3: in a save, and over several passes."""

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from torch import nn

_HOLDER = -1  # DeepSpeed numbers the modules that use a weight from 0


@contextlib.contextmanager
def without_regathering(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed's optimizer save without gathering the small weights again afterwards.

    It partitions all weights before a save, and then gathers those below
    `stage3_param_persistence_threshold` again: half of the time that training waits for a
    background save (deepspeed 0.19, gloo). They have not changed, so the full tensors are kept and
    put back. Does nothing at other stages, or with weights on an NVMe drive, whose buffers are
    released by partitioning.
    """
    small = getattr(optimizer, "persistent_parameters", [])
    whole = [(weight, weight.data) for weight in small if _can_be_kept(weight)]
    if len(whole) < len(small) or not whole:  # not gathered yet at step 0
        yield
        return
    optimizer.checkpoint_event_epilogue = optimizer.invalidate_secondary_tensor
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue
        for weight, data in whole:
            weight.data = data
            weight.ds_status = ZeroParamStatus.AVAILABLE


def _can_be_kept(weight: Any) -> bool:
    is_whole = weight.ds_status is ZeroParamStatus.AVAILABLE
    return is_whole and bool(weight.ds_tensor.final_location != OffloadDeviceEnum.nvme)


@contextlib.contextmanager
def gathered_once(module: nn.Module) -> Iterator[None]:
    """Gather the weights once for all forward passes inside; collective.

    DeepSpeed partitions a block's weights after each pass unless another module uses them, so they
    are marked as in use. Does nothing at other stages.
    """
    weights: list[Any] = [weight for weight in module.parameters() if hasattr(weight, "ds_status")]
    apart = [one for one in weights if one.ds_status is not ZeroParamStatus.AVAILABLE]
    with GatheredParameters(apart):
        for weight in weights:
            weight.ds_active_sub_modules.add(_HOLDER)
        try:
            yield
        except BaseException:  # the modules of an interrupted pass are still marked
            for weight in weights:
                weight.ds_active_sub_modules.clear()
            raise
        finally:
            for weight in weights:
                weight.ds_active_sub_modules.discard(_HOLDER)
