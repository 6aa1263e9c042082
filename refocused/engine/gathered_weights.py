"""Weights that every rank holds whole under ZeRO-3: over a save, and over several passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from torch import nn

_HOLDER = -1  # among the numbers of the modules that use a weight, which begin with 0


@contextlib.contextmanager
def kept_gathered(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed save without gathering the small weights again afterwards.

    It takes all weights apart before it writes, so that files hold each rank's part alone, and
    gathers those below `stage3_param_persistence_threshold` when it has written: half of what
    training waits for in a save from host memory (deepspeed 0.19, gloo). They have not changed
    meanwhile, so that they can be put aside and back. Nothing is done at other stages, nor where a
    weight's own part lies on an NVMe drive: taking it apart gives that part's buffer back.

    Args:
        optimizer: DeepSpeed's.
    """
    small = getattr(optimizer, "persistent_parameters", [])
    whole = [(weight, weight.data) for weight in small if _can_be_kept(weight)]
    if len(whole) < len(small) or not whole:  # at step 0 they are not gathered yet
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
def held_whole(module: nn.Module) -> Iterator[None]:
    """Gather the weights once for all forward passes inside; every rank must call.

    DeepSpeed takes a block's weights apart after each pass, but not while another module uses
    them; so they are marked as in use. Nothing is done at other stages.
    """
    weights: list[Any] = [weight for weight in module.parameters() if hasattr(weight, "ds_status")]
    apart = [one for one in weights if one.ds_status is not ZeroParamStatus.AVAILABLE]
    with GatheredParameters(apart):
        for weight in weights:
            weight.ds_active_sub_modules.add(_HOLDER)
        try:
            yield
        except BaseException:  # the modules of a pass that broke off hold theirs still
            for weight in weights:
                weight.ds_active_sub_modules.clear()
            raise
        finally:
            for weight in weights:
                weight.ds_active_sub_modules.discard(_HOLDER)
