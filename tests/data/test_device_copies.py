from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_cache import FakeManifest, FolderCache, loader_of, order_of

from refocused.data.loader.batch import Batch, Passes
from refocused.data.loader.loader import STEPS_READY, Loader
from refocused.data.loader.prefetch import Copies, DeviceCopier
from refocused.data.order.position import Position

GPU = torch.device("cuda", 1)
MANIFEST = FakeManifest.of(45, 60, 33)


class FakeCuda:
    """Stands in for `torch.cuda`, and writes down what happens on which stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "computing"

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - torch's own name
        return FakeStream(self, f"copying on {device}")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream):
        self.current = stream.name
        yield
        self.current = "computing"

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, f"{self.current} on {device}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_event(self) -> str:
        self.cuda.log.append(f"{self.name}: event")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.cuda.log.append(f"{self.name}: wait for {event}")


class FakeTensor:
    """A tensor on the CPU or the GPU; its views tell what they are views of."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking
        self.cuda.log.append(f"{self.cuda.current}: copy {self.name} to {device}")
        return FakeTensor(self.cuda, f"{self.name} there")

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{stream.name}: uses {self.name}")

    def __getitem__(self, place: tuple[Any, slice]) -> FakeTensor:
        return FakeTensor(self.cuda, f"{self.name}[{place[1].start or ''}:{place[1].stop or ''}]")

    def unbind(self) -> list[str]:
        return [f"{self.name} {number}" for number in range(2)]


@pytest.mark.parametrize("masked", [False, True])
def test_copies_run_on_their_own_stream_and_the_computation_waits_for_them_on_the_device(masked):
    cuda = FakeCuda()
    copier = DeviceCopier(GPU, cuda=cuda)
    none = np.empty((2, 0), np.int64)
    kinds = ["tokens", "labels"] if masked else ["tokens"]
    tokens, labels = (cast("Any", FakeTensor(cuda, kind)) for kind in ("tokens", "labels"))
    copies = copier.begin(Passes(tokens, labels if masked else None, none, none, ()))
    copying, computing = "copying on cuda:1", "computing on cuda:1"
    moved = [f"{copying}: copy {kind} to cuda:1" for kind in kinds]
    assert cuda.log == [*moved, f"{copying}: event"]
    cuda.log.clear()
    batches: list[Any] = copier.hand_over(copies)
    uses = [f"{computing}: uses {kind} there" for kind in kinds]
    assert cuda.log == [f"{computing}: wait for event of {copying}", *uses]
    assert [batch.input_ids for batch in batches] == ["tokens there[:-1] 0", "tokens there[:-1] 1"]
    copied = "labels there" if masked else "tokens there[1:]"
    assert [batch.labels for batch in batches] == [f"{copied} 0", f"{copied} 1"]


class RecordingCopier:
    """Stands in for the copier in a stream: marks what passed through it, and by which thread."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []
        self.handed: list[tuple[int, str]] = []

    def begin(self, passes: Passes) -> Copies:
        self.begun.append((len(self.begun), threading.current_thread().name))
        return Copies(passes.batches(), [], arrived=self.begun[-1][0])

    def hand_over(self, copies: Copies) -> list[Batch]:
        self.handed.append((copies.arrived, threading.current_thread().name))
        return copies.batches


def loader_with(folder: Any, copier: Any, *, pin: bool = False) -> Loader:
    cache = FolderCache(folder, MANIFEST)
    return loader_of(cache, order_of(MANIFEST, block_shards=3), copier=copier, pin=pin)


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


def test_a_copy_that_cannot_be_begun_is_raised_where_it_is_waited_for(tmp_path):
    class Broken(RecordingCopier):
        def begin(self, batches: list[Batch]) -> Copies:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        tokens(loader_with(tmp_path, Broken()), 1)


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
