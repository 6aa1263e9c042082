"""Compare the shuffle in blocks of shards with a full shuffle and no shuffle.

    .venv/bin/python benchmarks/shuffle.py [--shards 100] [--epochs 5] [--json FILE]

A data set is a line of sequences, shard after shard; text that belongs together is near on it. Over
whole epochs of the real order:

* position correlation: between a sequence's place in the epoch and its place on the line (its size
  without the sign; 0 for a full shuffle, up to its own noise of about 1 / sqrt(sequences));
* neighbour distance: how far apart on the line two sequences in a row are, on average, in shares of
  what a full shuffle gives, which is a third of the line;
* neighbours of one shard: how often two sequences in a row come from the same shard;
* shards in a step: how many shards the sequences of one step come from;
* step mean: how much the mean place of a step's sequences varies between steps, in shares of what a
  full shuffle gives: what a model would notice as drift from step to step.
"""

import functools
from collections.abc import Callable

import numpy as np
from measuring import Column, Record, medians, parser_of, table, write_report
from numpy.typing import NDArray

from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import SequenceRange

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
    parser.add_argument("--shard-sequences", type=int, default=SHARD_WINDOWS)
    parser.add_argument("--step-sequences", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    count = arguments.shards * arguments.shard_sequences
    draw = np.random.default_rng(0)
    epochs: dict[str, Callable[[int], NDArray[np.int64]]] = {
        "no shuffle": lambda epoch: np.arange(count),
        **{
            f"blocks of {block}": functools.partial(
                _places, shards=arguments.shards, sequences=arguments.shard_sequences, block=block
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
                shard_sequences=arguments.shard_sequences,
                step_sequences=arguments.step_sequences,
            )
            for epoch in range(arguments.epochs)
        ]
        rows[name] = medians(records)
    title = (
        f"{arguments.shards} shards of {arguments.shard_sequences:,} sequences, steps of "
        f"{arguments.step_sequences}, median of {arguments.epochs} epochs"
    )
    print(table(rows, COLUMNS, title=title))
    write_report(arguments, rows)


def _places(epoch: int, *, shards: int, sequences: int, block: int) -> NDArray[np.int64]:
    """Return the place on the line of each sequence of an epoch, in the order of training."""
    ranges = [SequenceRange(shard, 0, sequences) for shard in range(shards)]
    order = Order(ranges, seed=1337, block_shards=block)
    located = order.locate(epoch * order.sequences_per_epoch + np.arange(order.sequences_per_epoch))
    places: NDArray[np.int64] = located.shards * sequences + located.sequences
    return places


def _measured(places: NDArray[np.int64], *, shard_sequences: int, step_sequences: int) -> Record:
    count = len(places)
    shards = places // shard_sequences
    steps = count // step_sequences
    in_steps = shards[: steps * step_sequences].reshape(steps, step_sequences)
    means = places[: steps * step_sequences].reshape(steps, step_sequences).mean(axis=1)
    different = 1 + np.count_nonzero(np.diff(np.sort(in_steps, axis=1), axis=1), axis=1)
    return {
        "position_correlation": abs(float(np.corrcoef(np.arange(count), places)[0, 1])),
        "neighbour_distance": float(np.abs(np.diff(places)).mean()) / (count / 3),
        "same_shard": float((shards[1:] == shards[:-1]).mean()),
        "shards_in_step": float(different.mean()),
        # Of independent draws from the line: its own deviation by the root of their number.
        "step_mean": float(means.std()) / (count / np.sqrt(12 * step_sequences)),
    }


if __name__ == "__main__":
    main()
