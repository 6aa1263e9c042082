import contextlib
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from refocused.engine.deepspeed_patches import without_regathering

WHOLE, APART = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


class Optimizer:
    """The part of DeepSpeed's optimizer that a save uses."""

    def __init__(self, *weights: SimpleNamespace) -> None:
        self.persistent_parameters = list(weights)
        self.gathered = 0

    def save(self) -> None:
        for weight in self.persistent_parameters:
            weight.data, weight.ds_status = torch.empty(0), APART
        self.checkpoint_event_epilogue()

    def checkpoint_event_epilogue(self) -> None:
        self.gathered += 1

    def invalidate_secondary_tensor(self) -> None:
        """Do nothing."""


def weight(
    status: ZeroParamStatus = WHOLE, part: OffloadDeviceEnum | None = None
) -> SimpleNamespace:
    place = SimpleNamespace(final_location=part)
    return SimpleNamespace(data=torch.arange(3.0), ds_status=status, ds_tensor=place)


@pytest.mark.parametrize("fails", [False, True])
def test_full_weights_are_put_back_without_gathering(fails: bool) -> None:
    optimizer = Optimizer(weight(), weight(part=OffloadDeviceEnum.cpu))
    with contextlib.suppress(OSError), without_regathering(optimizer):
        optimizer.save()
        if fails:
            raise OSError("full")
    assert optimizer.gathered == 0
    for one in optimizer.persistent_parameters:
        assert (one.ds_status, one.data.tolist()) == (WHOLE, [0.0, 1.0, 2.0])
    optimizer.checkpoint_event_epilogue()
    assert optimizer.gathered == 1  # the next one is DeepSpeed's own


@pytest.mark.parametrize(
    "other", [weight(status=APART), weight(part=OffloadDeviceEnum.nvme)], ids=["apart", "nvme"]
)
def test_deepspeed_gathers_if_a_weight_cannot_be_kept(other: SimpleNamespace) -> None:
    optimizer = Optimizer(weight(), other)
    with without_regathering(optimizer):
        optimizer.save()
    assert optimizer.gathered == 1
