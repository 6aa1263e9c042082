import contextlib
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fake_cache import FolderCache, loader_of, manifest_of, order_of

from refocused.data.loader.batch import IGNORED_LABEL, Batch, MicroBatches
from refocused.data.loader.loader import STEPS_READY, Copies, DeviceCopier, Loader
from refocused.data.order.sequences import Position, SequenceRange, spread_sequences

GPU = torch.device("cuda", 1)
NOTED = {"to", "__enter__", "__exit__", "record_event", "wait_event", "record_stream"}


def noted(log: mock.MagicMock) -> list[str]:
    """What happened, in order: on which stream or tensor."""
    names = [call[0] for call in log.mock_calls if call[0].rpartition(".")[2] in NOTED]
    log.reset_mock()
    return names


@pytest.mark.parametrize("document_id", [None, 7])
def test_one_copy_runs_on_its_own_stream_and_the_computation_waits_for_it_on_the_device(
    document_id, monkeypatch
):
    log, numbers = mock.MagicMock(), np.zeros((2, 2), np.int64)
    there = torch.arange(2 * 3 * 5).view(2, 3, 5)
    log.tokens.to.return_value = there
    copier = DeviceCopier(GPU, cuda=log.cuda)
    copies = copier.begin(MicroBatches(log.tokens, numbers, numbers, (), document_id))
    log.tokens.to.assert_called_once_with(GPU, non_blocking=True)
    steps = ["cuda.stream().__enter__", "tokens.to", "cuda.Stream().record_event"]
    assert noted(log) == [*steps, "cuda.stream().__exit__"]
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *both: recorded.append(both))
    batches = copier.hand_over(copies)
    computing = log.cuda.current_stream.return_value
    computing.wait_event.assert_called_once_with(copies.arrived)
    assert all(stream is computing for _, stream in recorded)
    kept = [tensor.untyped_storage().data_ptr() for tensor, _ in recorded]
    for made, batch in zip(there.tolist(), batches, strict=True):
        assert batch.input_ids.tolist() == [row[:-1] for row in made]
        labels = [[IGNORED_LABEL if t == document_id else t for t in row[1:]] for row in made[:2]]
        assert batch.labels.tolist() == [*labels, [IGNORED_LABEL] * 4]
        for tensor in (batch.input_ids, batch.labels):
            assert tensor.untyped_storage().data_ptr() in kept


class RecordingCopier:
    """Stands in for the copier in a stream: marks what passed through it, and by which thread."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []
        self.handed: list[tuple[int, str]] = []

    def begin(self, micro_batches: MicroBatches) -> Copies:
        self.begun.append((len(self.begun), threading.current_thread().name))
        return Copies(micro_batches.batches(), arrived=self.begun[-1][0])

    def hand_over(self, copies: Copies) -> list[Batch]:
        self.handed.append((copies.arrived, threading.current_thread().name))
        return copies.batches


def loader_with(folder: Any, copier: Any, *, pin: bool = False) -> Loader:
    manifest = manifest_of(45, 60, 33)
    cache = FolderCache(folder, manifest)
    return loader_of(cache, order_of(manifest, block_shards=3), copier=copier, pin=pin)


def tokens(loader: Loader, steps: int) -> list[Any]:
    with contextlib.closing(loader.batches_from(Position())) as stream:
        return [
            [(batch.input_ids.tolist(), batch.labels.tolist()) for batch in stream.next_step()]
            for _ in range(steps)
        ]


def test_a_stream_copies_ahead_in_its_own_thread_and_hands_over_in_order(tmp_path):
    copier = RecordingCopier()
    assert tokens(loader_with(tmp_path, copier), 6) == tokens(loader_with(tmp_path, None), 6)
    here = threading.current_thread().name
    assert copier.handed == [(number, here) for number in range(6)]
    assert copier.begun[:6] == [(number, "read ahead") for number in range(6)]
    assert len(copier.begun) <= 6 + STEPS_READY + 1


def test_validation_batches_are_copied_as_those_of_training(tmp_path):
    copier, chosen = RecordingCopier(), spread_sequences([SequenceRange(0, 0, 4)], sequences=3)
    here, there = (
        [
            (batch.source, batch.input_ids.tolist(), batch.labels.tolist())
            for batch in loader_with(tmp_path, copying).validation_batches(chosen, source="web")
        ]
        for copying in (None, copier)
    )
    assert there == here
    assert len(copier.begun) == len(copier.handed) == len(here) > 0


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu(tmp_path):
    device = torch.device("cuda", 0)
    here = tokens(loader_with(tmp_path, None), 200)
    stream = loader_with(tmp_path, DeviceCopier(device), pin=True).batches_from(Position())
    busy = torch.randn(2048, 2048, device=device)
    with contextlib.closing(stream):
        there = []
        for _ in range(200):
            batches = stream.next_step()
            busy = busy @ busy  # the computation is behind while the next copies run
            busy /= busy.norm()
            there.append([(batch.input_ids + 0, batch.labels + 0) for batch in batches])
            assert all(batch.input_ids.device == device for batch in batches)
    assert [[(i.tolist(), n.tolist()) for i, n in step] for step in there] == here
