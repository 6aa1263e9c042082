from __future__ import annotations

import threading

import torch

from refocused.data.loader.batch_memory import BatchMemory

SHAPE = (2, 3, 5)


def test_memory_is_given_out_again_only_when_every_view_of_it_is_gone() -> None:
    memory = BatchMemory(pin=False)
    first = memory.empty(SHAPE)
    assert (first.shape, first.dtype, first.is_contiguous()) == (SHAPE, torch.int64, True)
    address = first.data_ptr()
    labels = first[1]
    del first
    other = memory.empty(SHAPE)
    assert other.data_ptr() != address
    as_array = labels[:, 1:].numpy()
    del labels
    third = memory.empty(SHAPE)
    assert third.data_ptr() != address
    del as_array
    assert memory.empty(SHAPE).data_ptr() == address


def test_each_shape_has_memory_of_its_own() -> None:
    memory = BatchMemory(pin=False)
    small = memory.empty((1, 2))
    del small
    assert memory.empty(SHAPE).shape == SHAPE
    assert memory.empty((1, 2)).shape == (1, 2)


def test_what_held_more_is_given_out_for_less_and_comes_back_whole() -> None:
    memory = BatchMemory(pin=False)
    addresses = set()
    for passes in (7, 3, 1, 6, 2, 7):
        tensor = memory.empty((passes, 3, 5))
        assert (tensor.shape, tensor.is_contiguous()) == ((passes, 3, 5), True)
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) == 1


def test_what_is_too_small_for_more_is_not_given_out() -> None:
    memory = BatchMemory(pin=False)
    small = memory.empty((1, 3, 5))
    del small
    large = memory.empty((4, 3, 5))
    assert large.fill_(1).sum() == 4 * 3 * 5


def test_a_tensor_that_outlives_the_memory_is_whole_and_may_be_dropped_by_another_thread() -> None:
    memory = BatchMemory(pin=False)
    held = [memory.empty(SHAPE).fill_(7)]
    addresses = {held[0].data_ptr()}
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    kept = memory.empty(SHAPE)
    assert kept.data_ptr() in addresses
    kept.fill_(9)
    del memory
    assert bool((kept == 9).all())
