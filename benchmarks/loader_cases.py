"""Our loader and others with one interface: from a saved state to batches of 8 x 2048."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from token_samples import (
    ROWS,
    SEQUENCE_LENGTH,
    SHARD_TOKENS,
    SHARDS,
    VOCABULARY,
    npy_folder,
    npz_folder,
    one_file,
)
from torch.utils.data import DataLoader, Dataset

Pair = tuple[torch.Tensor, torch.Tensor]
LENGTH = SEQUENCE_LENGTH + 1
WINDOWS_OF_SHARD = (SHARD_TOKENS - 1) // SEQUENCE_LENGTH
WINDOWS = SHARDS * WINDOWS_OF_SHARD
STEPS_OF_EPOCH = WINDOWS // ROWS


class Ours:
    """`.npy` shards that are local already, through `build_data` as training does it.

    A case is one way to read. `prepare` imports and makes the files; only what follows is timed:
    `open` constructs everything and yields inputs and labels, int64 `[8, 2048]`, from a state on.
    """

    def __init__(self, *, gradient_accumulation_steps: int = 8) -> None:
        # Batches of a step; the reading thread hands over a step at a time.
        self._accumulation = gradient_accumulation_steps

    def prepare(self, work: Path) -> None:
        """Create the files, and fetch them once, so that the index exists."""
        import refocused.data.loader.open_data  # noqa: F401 - its import is not construction

        self._source, self._cache = npy_folder(work), work / "cache"
        if not self._cache.exists():
            for _ in itertools.islice(self.open(0), STEPS_OF_EPOCH):
                pass

    def state_at(self, step: int) -> int | None:
        """Return the state after that many steps; None if it cannot resume."""
        return step

    def open(self, state: int) -> Iterator[Pair]:
        """Build the data part of a run and read from a position."""
        from refocused.config.batch_plan import BatchPlan
        from refocused.config.data import DataConfig
        from refocused.data.loader.open_data import build_data
        from refocused.data.order.sequences import Position
        from refocused.system.world import World

        parts = build_data(
            DataConfig(source=str(self._source), cache=str(self._cache)),
            plan=BatchPlan(ROWS, self._accumulation, 1, SEQUENCE_LENGTH),
            world=World(),
            vocabulary=VOCABULARY,
            seed=1,
            steps=1,
            evaluation_sequences=0,
        )
        stream = parts.loader.batches_from(Position(0, state * ROWS))
        try:
            while True:
                batches = stream.next_step()
                assert batches is not None, "it waits for them"
                for batch in batches:
                    yield batch.input_ids, batch.labels
        finally:
            stream.close()
            parts.cache.close()


class OursFirstPass(Ours):
    """Compressed `.npz` shards that are copied, checked and converted while they are read."""

    def prepare(self, work: Path) -> None:
        """Create the files, and remove the cache of an earlier pass."""
        import refocused.data.loader.open_data  # noqa: F401 - its import is not construction

        self._source, self._cache = npz_folder(work), work / "cache_of_npz"
        shutil.rmtree(self._cache, ignore_errors=True)

    def state_at(self, step: int) -> int | None:
        """Return None: only a first pass from the start is measured."""
        return None if step else 0


class NanoGpt:
    """karpathy/nanoGPT, train.py, get_batch: a new memory map and random sequences each time."""

    def prepare(self, work: Path) -> None:
        """Create the file."""
        self._path = one_file(work)

    def state_at(self, step: int) -> None:
        """Return None: it has no position."""
        return

    def open(self, state: None) -> Iterator[Pair]:
        """Yield random sequences without end."""
        while True:
            data = np.memmap(self._path, dtype=np.uint16, mode="r")
            ix = torch.randint(len(data) - SEQUENCE_LENGTH, (ROWS,)).tolist()
            x = torch.stack(
                [torch.from_numpy(data[i : i + LENGTH - 1].astype(np.int64)) for i in ix]
            )
            y = torch.stack(
                [torch.from_numpy(data[i + 1 : i + LENGTH].astype(np.int64)) for i in ix]
            )
            yield x, y


class SequencesOfNpy(Dataset[Pair]):
    """The usual map-style data set over memory-mapped `.npy` files."""

    def __init__(self, folder: Path) -> None:
        self._shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> Pair:
        shard, sequence = divmod(index, WINDOWS_OF_SHARD)
        first = sequence * SEQUENCE_LENGTH
        tokens = torch.from_numpy(self._shards[shard][first : first + LENGTH].astype(np.int64))
        return tokens[:-1], tokens[1:]


class TorchLoader:
    """torch's DataLoader; to resume it skips batches, as scripts do."""

    kind: Any = DataLoader

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def prepare(self, work: Path) -> None:
        """Make the `.npy` files."""
        self._folder = npy_folder(work)

    def state_at(self, step: int) -> int:
        """Return the step."""
        return step

    def open(self, state: int) -> Iterator[Pair]:
        """Skip `state` batches, then yield."""
        return itertools.islice(_for_ever(self._loader()), state, None)

    def _loader(self) -> Any:
        return self.kind(
            SequencesOfNpy(self._folder),
            batch_size=ROWS,
            shuffle=True,
            num_workers=self._workers,
            drop_last=True,
            generator=torch.Generator().manual_seed(1),
        )


class StatefulLoader(TorchLoader):
    """torchdata's StatefulDataLoader, resumed by its own state."""

    def prepare(self, work: Path) -> None:
        """Import torchdata."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.kind = StatefulDataLoader
        super().prepare(work)

    def state_at(self, step: int) -> Any:
        """Read so far, and save."""
        if not step:
            return None
        loader = self._loader()
        for _ in itertools.islice(loader, step):
            pass
        return loader.state_dict()

    def open(self, state: Any) -> Iterator[Pair]:
        """Load the state and read epoch after epoch."""
        loader = self._loader()
        if state is not None:
            loader.load_state_dict(state)
        return _for_ever(loader)


CASES: dict[str, Any] = {
    "ours, .npy": Ours(),
    "ours, .npy, steps of one batch": Ours(gradient_accumulation_steps=1),
    "ours, first pass of .npz": OursFirstPass(),
    "nanoGPT memmap": NanoGpt(),
    "torch DataLoader": TorchLoader(0),
    "torch DataLoader, 2 workers": TorchLoader(2),
    "torchdata StatefulDataLoader": StatefulLoader(0),
}


def _for_ever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
