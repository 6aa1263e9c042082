from __future__ import annotations

import collections
import io
from typing import Any

import pytest
import torch

from refocused.engine.shard_files import HostMemory


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def content_of(step: float) -> dict[str, Any]:
    """As a checkpoint's: views of one flat memory, a parameter, plain values, an order."""
    flat = torch.full((1000,), step)
    return {
        "masters": [flat[:600], flat[600:].view(20, 20)],
        "module": collections.OrderedDict(weight=torch.nn.Parameter(torch.full((3, 5), -step))),
        "half": torch.arange(7, dtype=torch.bfloat16) + step,
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "empty": torch.empty(0),
        "shapes": [torch.Size([3, 5])],
        "step": step,
        "name": "adam",
    }


def test_a_copy_is_saved_to_the_same_bytes() -> None:
    content = content_of(1.0)
    assert saved(HostMemory().copy(content)) == saved(content)


def test_what_happens_to_the_content_afterwards_does_not_reach_the_copy() -> None:
    content = content_of(1.0)
    copy, before = HostMemory().copy(content), saved(content)
    content["masters"][0].fill_(99.0)
    content["step"] = 2.0
    content["shapes"].append("more")
    with torch.no_grad():
        content["module"]["weight"].zero_()
    assert saved(copy) == before


def test_tensors_that_share_memory_still_do() -> None:
    copy = HostMemory().copy(content_of(1.0))
    first, second = (part.untyped_storage() for part in copy["masters"])
    assert first.data_ptr() == second.data_ptr()
    assert first.nbytes() == 4000


def pointers(copy: dict[str, Any]) -> list[int]:
    return [copy["masters"][0].untyped_storage().data_ptr(), copy["half"].data_ptr()]


def test_the_next_copy_takes_the_same_memory() -> None:
    memory = HostMemory()
    first = pointers(memory.copy(content_of(1.0)))
    second = memory.copy(content_of(2.0))
    assert pointers(second) == first
    assert saved(second) == saved(content_of(2.0))


def test_content_that_has_grown_gets_new_memory() -> None:
    memory = HostMemory()
    memory.copy({"moments": torch.zeros(10)})
    grown = {"moments": torch.ones(20), "step": torch.tensor(1)}
    assert saved(memory.copy(grown)) == saved(grown)


@pytest.mark.gpu
def test_a_copy_from_a_gpu_lies_in_pinned_host_memory() -> None:
    copy = HostMemory().copy({"weights": torch.ones(1000, device="cuda")})
    torch.cuda.synchronize()
    assert copy["weights"].is_pinned()
    assert torch.equal(copy["weights"], torch.ones(1000))
