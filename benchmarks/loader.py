"""Compare our loader with others on batches of 8 x 2048 from 200 MB of tokens, in one run.

    .venv/bin/python benchmarks/loader.py [--repeats 5] [--json FILE]

A case is one way to read. `prepare` imports and makes the files; only what follows is timed: `open`
constructs everything and yields inputs and labels, int64 `[8, 2048]`, from a state on. torchdata is
installed into an environment of its own in the working folder.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from measuring import (
    WORK,
    Case,
    Column,
    Record,
    cpu_seconds,
    environment,
    measure,
    medians,
    parser_of,
    private_mib,
    seconds,
    table,
    write_report,
)
from token_samples import ROWS, SEQUENCE_LENGTH, SHARD_TOKENS, SHARDS, VOCABULARY, token_folder
from torch.utils.data import DataLoader, Dataset

Pair = tuple[torch.Tensor, torch.Tensor]
EPOCHS, LONGEST_S = 7, 12.0
LENGTH = SEQUENCE_LENGTH + 1
SEQUENCES_OF_SHARD = (SHARD_TOKENS - 1) // SEQUENCE_LENGTH
STEPS_OF_EPOCH = SHARDS * SEQUENCES_OF_SHARD // ROWS
FIRST_PASS = "ours, first pass of .npz"
COLUMNS = (
    Column("tokens_per_second", "M tokens/s", scale=1e-6),
    Column("tokens_per_cpu_second", "per CPU-s", scale=1e-6),
    Column("first_batch_s", "first batch, ms", scale=1e3),
    Column("private_mib", "private, MiB"),
    Column("growth_mib", "growth after 1st epoch, MiB"),
    Column("resume_s", "resume, ms", scale=1e3),
)
RATES = ("tokens_per_second", "tokens_per_cpu_second")


class Ours:
    """Local `.npy` shards, or `.npz` copied, checked and converted while they are read.

    Both through `build_data`, as training does it.
    """

    def __init__(
        self, kind: Literal["npy", "npz"] = "npy", *, gradient_accumulation_steps: int = 8
    ) -> None:
        # Batches of a step; the reading thread hands over a step at a time.
        self._kind, self._accumulation = kind, gradient_accumulation_steps

    def prepare(self, work: Path) -> None:
        """Create the files; fetch `.npy` once, and forget an earlier pass of `.npz`."""
        import refocused.data.loader.open_data  # noqa: F401 - its import is not construction

        self._source, self._cache = token_folder(work, self._kind), work / f"cache_{self._kind}"
        if self._kind == "npz":
            shutil.rmtree(self._cache, ignore_errors=True)
        elif not self._cache.exists():
            for _ in itertools.islice(self.open(0), STEPS_OF_EPOCH):
                pass

    def state_at(self, step: int) -> int | None:
        """Return the state after that many steps; None if it cannot resume, as a first pass."""
        return None if step and self._kind == "npz" else step

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


class NanoGpt:
    """karpathy/nanoGPT, train.py, get_batch: a new memory map and random sequences each time."""

    def prepare(self, work: Path) -> None:
        """Create the file."""
        self._path = token_folder(work, "bin") / "train.bin"

    def state_at(self, step: int) -> None:
        """Return None: it has no position."""
        return

    def open(self, state: None) -> Iterator[Pair]:
        """Yield random sequences without end."""
        while True:
            data = np.memmap(self._path, dtype=np.uint16, mode="r")
            ix = torch.randint(len(data) - SEQUENCE_LENGTH, (ROWS,)).tolist()
            rows = [torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in ix]
            yield torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])


class SequencesOfNpy(Dataset[Pair]):
    """The usual map-style data set over memory-mapped `.npy` files."""

    def __init__(self, folder: Path) -> None:
        self._shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]

    def __len__(self) -> int:
        return SHARDS * SEQUENCES_OF_SHARD

    def __getitem__(self, index: int) -> Pair:
        shard, sequence = divmod(index, SEQUENCES_OF_SHARD)
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
        self._folder = token_folder(work, "npy")

    def state_at(self, step: int) -> Any:
        """Return the step."""
        return step

    def open(self, state: Any) -> Iterator[Pair]:
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


def _for_ever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


CASES: dict[str, Any] = {
    "ours, .npy": Ours(),
    "ours, .npy, steps of one batch": Ours(gradient_accumulation_steps=1),
    FIRST_PASS: Ours("npz"),
    "nanoGPT memmap": NanoGpt(),
    "torch DataLoader": TorchLoader(0),
    "torch DataLoader, 2 workers": TorchLoader(2),
    "torchdata StatefulDataLoader": StatefulLoader(0),
}


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = parser_of(__file__, __doc__, repeats=5)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--only", default="", help="measure the cases whose name holds this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure_loader(chosen.case, chosen.work)))
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Run the cases in turns, print the tables, and write the JSON."""
    pythons: dict[str, str | None] = dict.fromkeys(CASES, sys.executable)
    torchdata = environment(chosen.work / "torchdata", "--no-deps", "torchdata")
    pythons["torchdata StatefulDataLoader"] = torchdata
    command = [__file__, "--work", str(chosen.work), "--case"]
    cases = [
        Case(name, [*command, name], python)
        for name, python in pythons.items()
        if python and chosen.only in name
    ]
    for case in cases:  # creates the files, which takes much longer than reading them
        if not (chosen.work / "prepared" / case.name).exists():
            measure([case], repeats=1, timeout_s=900)
            (chosen.work / "prepared").mkdir(parents=True, exist_ok=True)
            (chosen.work / "prepared" / case.name).touch()
    records = measure(cases, repeats=chosen.repeats, timeout_s=180)
    rows = {name: medians(found) for name, found in records.items()}
    print(table(rows, COLUMNS, title=f"Batches of 8 x 2048, medians of {chosen.repeats}"))
    if "ours, .npy" in rows:
        ours = rows["ours, .npy"]
        ratios = {name: {key: row[key] / ours[key] for key in RATES} for name, row in rows.items()}
        columns = [Column(key, key.replace("_", " "), "{:.2f}") for key in RATES]
        print(table(ratios, columns, title="The same, ours = 1"))
    write_report(chosen, records)


def measure_loader(name: str, work: Path) -> Record:
    """Read seven epochs, or as much of them as 12 s allow, then resume at a random step."""
    torch.empty(1)
    imported, case = private_mib(work), CASES[name]
    case.prepare(work)
    began, cpu_began = time.perf_counter(), cpu_seconds()
    batches = case.open(case.state_at(0))
    next(batches)
    found: Record = {"first_batch_s": time.perf_counter() - began}
    if name == FIRST_PASS:
        cpu, wall = cpu_began, began  # count what was fetched and converted before
    else:
        cpu, wall = cpu_seconds(), time.perf_counter()
    steps = STEPS_OF_EPOCH * (1 if name == FIRST_PASS else EPOCHS) - 2
    first_epoch = None
    for step in itertools.count(1):
        next(batches)
        if step == STEPS_OF_EPOCH:
            looked, cpu_looked = time.perf_counter(), cpu_seconds()
            first_epoch = private_mib(work)
            wall += time.perf_counter() - looked  # time of the memory measurement
            cpu += cpu_seconds() - cpu_looked
        elapsed = time.perf_counter() - wall
        if elapsed > LONGEST_S or step >= steps:
            break
    tokens = step * ROWS * SEQUENCE_LENGTH
    found["tokens_per_second"] = tokens / elapsed
    found["tokens_per_cpu_second"] = tokens / (cpu_seconds() - cpu)
    found["epochs"] = step / STEPS_OF_EPOCH
    found["private_mib"] = private_mib(work) - imported
    found["growth_mib"] = None if first_epoch is None else private_mib(work) - first_epoch
    del batches
    draw = random.Random(int(os.environ.get("BENCHMARK_REPEAT", "0")))
    state = case.state_at(draw.randrange(1, STEPS_OF_EPOCH // 2))
    if state is not None:
        found["resume_s"] = seconds(lambda: next(case.open(state)))
    return found


if __name__ == "__main__":
    main()
