"""Measure what the search for flipped bits (`run.replay_every`) adds to a step.

    .venv/bin/python benchmarks/bit_checks.py [--stages 1 3] [--tokens 512 4096] [--steps 20]
        [--device cuda]

Three engines make a step in turns: without the search, with the digests of the state alone, and
with a replay in each step. `over plain` is the median of the ratios. With `replay_every: N` a step
costs the digests, and one Nth of what the replay adds to them. On a CPU CPU time counts.
"""

from measuring import Column, Record, medians, parser_of, table, write_report
from step_contenders import WARM_STEPS, Clock, Setup, alone, ours

from refocused.config.optimization import PrecisionConfig

PLAIN, DIGESTS, REPLAYS = "plain", "digests", "digests and replay"
KINDS = {PLAIN: None, DIGESTS: 10**9, REPLAYS: 1}  # in steps; step 1 is always replayed
COLUMNS = (Column("ms", "ms a step", "{:,.1f}"), Column("ratio", "over plain", "{:.3f}"))


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], choices=(0, 1, 2, 3))
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    world, results = alone(chosen.device), Record()
    for stage in chosen.stages:
        for tokens in chosen.tokens:
            setup = Setup(
                chosen.layers,
                chosen.width,
                chosen.vocabulary,
                length=512,
                micro_batch_size=tokens // 512,
                gradient_accumulation_steps=1,
                precision=PrecisionConfig(dtype=chosen.dtype),
            )
            contenders = {
                kind: ours(setup, stage, world, replay_every=n) for kind, n in KINDS.items()
            }
            clock, records = Clock(world.device), list[Record]()
            for _ in range(chosen.steps):
                records.append({kind: clock.timed_ms(step) for kind, step in contenders.items()})
            records = records[WARM_STEPS:]
            title = f"{setup.name}, {chosen.dtype}, ZeRO-{stage}, median of {len(records)}"
            rows = {kind: compared(records, kind) for kind in KINDS}
            print(table(rows, COLUMNS, title=title))
            results[title] = {"records": records, "rows": rows}
    write_report(chosen, results)


def compared(records: list[Record], kind: str) -> Record:
    """Return a contender's median milliseconds, and the median of its ratios."""
    ratios = [{"ms": one[kind], "ratio": one[kind] / one[PLAIN]} for one in records]
    return medians(ratios)


if __name__ == "__main__":
    main()
