"""Compare the shuffle in blocks of shards with a full shuffle and no shuffle.

    .venv/bin/python benchmarks/shuffle.py [--shards 100] [--epochs 5] [--json FILE]

A data set is a line of windows, shard after shard; text that belongs together is near on it. Over
whole epochs of the real order:

* position correlation: between a window's place in the epoch and its place on the line (its size
  without the sign; 0 for a full shuffle, up to its own noise of about 1 / sqrt(windows));
* neighbour distance: how far apart on the line two windows in a row are, on average, in shares of
  what a full shuffle gives, which is a third of the line;
* neighbours of one shard: how often two windows in a row come from the same shard;
* shards in a step: how many shards the windows of one step come from;
* step mean: how much the mean place of a step's windows varies between steps, in shares of what a
  full shuffle gives: what a model would notice as drift from step to step.
"""

import functools
from collections.abc import Callable

import numpy as np
from measuring import Column, Record, medians, parser_of, table, write_report
from numpy.typing import NDArray

from refocused.data.order.window_order import Order
from refocused.data.order.windows import WindowRange

SHARD_WINDOWS = 48_828  # of 2,048 tokens in a shard of 100 M
BLOCKS = (1, 4, 16, 100)
COLUMNS = (
    Column("position_correlation", "position corr.", "{:.4f}"),
    Column("neighbour_distance", "distance / full", "{:.3f}"),
    Column("same_shard", "same shard", "{:.2%}"),
    Column("shards_in_step", "shards in a step", "{:.1f}"),
    Column("step_mean", "step mean / full", "{:.2f}"),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--shard-windows", type=int, default=SHARD_WINDOWS)
    parser.add_argument("--step-windows", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    count = arguments.shards * arguments.shard_windows
    draw = np.random.default_rng(0)
    epochs: dict[str, Callable[[int], NDArray[np.int64]]] = {
        "no shuffle": lambda epoch: np.arange(count),
        **{
            f"blocks of {block}": functools.partial(
                _places, shards=arguments.shards, windows=arguments.shard_windows, block=block
            )
            for block in BLOCKS
            if block <= arguments.shards
        },
        "full shuffle": lambda epoch: draw.permutation(count),
    }
    rows = {}
    for name, places_of in epochs.items():
        records = [
            _measured(
                places_of(epoch),
                shard_windows=arguments.shard_windows,
                step_windows=arguments.step_windows,
            )
            for epoch in range(arguments.epochs)
        ]
        rows[name] = medians(records)
    title = (
        f"{arguments.shards} shards of {arguments.shard_windows:,} windows, steps of "
        f"{arguments.step_windows}, median of {arguments.epochs} epochs"
    )
    print(table(rows, COLUMNS, title=title))
    write_report(arguments, rows)


def _places(epoch: int, *, shards: int, windows: int, block: int) -> NDArray[np.int64]:
    """Return the place on the line of each window of an epoch, in the order of training."""
    ranges = [WindowRange(shard, 0, windows) for shard in range(shards)]
    order = Order(ranges, seed=1337, block_shards=block)
    located = order.locate(epoch * order.windows_per_epoch + np.arange(order.windows_per_epoch))
    places: NDArray[np.int64] = located.shards * windows + located.windows
    return places


def _measured(places: NDArray[np.int64], *, shard_windows: int, step_windows: int) -> Record:
    count = len(places)
    shards = places // shard_windows
    steps = count // step_windows
    in_steps = shards[: steps * step_windows].reshape(steps, step_windows)
    means = places[: steps * step_windows].reshape(steps, step_windows).mean(axis=1)
    different = 1 + np.count_nonzero(np.diff(np.sort(in_steps, axis=1), axis=1), axis=1)
    return {
        "position_correlation": abs(float(np.corrcoef(np.arange(count), places)[0, 1])),
        "neighbour_distance": float(np.abs(np.diff(places)).mean()) / (count / 3),
        "same_shard": float((shards[1:] == shards[:-1]).mean()),
        "shards_in_step": float(different.mean()),
        # Of independent draws from the line: its own deviation by the root of their number.
        "step_mean": float(means.std()) / (count / np.sqrt(12 * step_windows)),
    }


if __name__ == "__main__":
    main()
