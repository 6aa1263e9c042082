"""A two-rank training that is killed again and again, over a store with faults, and resumed.

    .venv/bin/python benchmarks/chaos.py [--kills 28] [--seed 0] [--minutes 20] [--json FILE]

Who: one rank, all ranks, DeepSpeed's launcher, the deepspeed command, the supervisor of
launch/train.sh, the mirror; by kill -9. When: in the steps, in a save, in an upload, in a start, in
the download of a resume whose machine was lost; with saves in the background and without. After
each the same command is typed again. In the end every loss that was ever written and every tensor
of the last checkpoint must equal those of an undisturbed run; exit code 3 if anything
differs, or a visible step was ever broken, or a process stayed behind.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from chaos_kills import MOMENTS, VICTIMS, Chaos, Kill, Outcome, deck
from chaos_site import (
    Site,
    changed,
    digest,
    kill,
    living,
    losses,
    missing,
    site,
    steps_made,
    wait_until,
)
from measuring import Column, parser_of, say, table, write_report

STEPS_FOR_A_KILL = 20  # typical progress of a start before its kill


def train_undisturbed(place: Site) -> float:
    """Train without a mirror and without kills; return the seconds until the first step."""
    began = time.monotonic()
    command = place.start(
        f"{place.mark}-reference", "run.directory=reference", "checkpoint.mirror=null"
    )
    wait_until(lambda: bool(steps_made(place.reference)) or command.poll() is not None, seconds=600)
    start_seconds = time.monotonic() - began
    if command.wait(3600):
        sys.exit(place.said(f"{place.mark}-reference"))
    return start_seconds


def report(place: Site, outcome: Outcome, chosen: argparse.Namespace) -> bool:
    """Print the tables, write the JSON; return whether all checks passed."""
    wanted = losses(place.reference)
    differing = changed(wanted, place.losses) + missing(wanted, place.losses, "step")
    same = digest(place.run, place.steps) == digest(place.reference, place.steps)
    rows = {
        victim: {moment: outcome.kills[Kill(victim, moment)] or None for moment in MOMENTS}
        for victim in VICTIMS
    }
    columns = [Column(moment, f"in {moment}", "{:.0f}") for moment in MOMENTS]
    print(table(rows, columns, title="Kills -9, by who and when"))
    results: dict[str, object] = {
        "kills": sum(outcome.kills.values()),
        "starts": outcome.starts,
        "resumes": outcome.resumes,
        "machines lost": outcome.machines_lost,
        "steps lost": outcome.steps_lost,
        "steps of the run": place.steps,
        "saves committed": place.said_in_all("save "),
        "uploads committed": len(place.committed()),
        "visible steps broken": len(outcome.broken),
        "losses compared": len(wanted),
        "losses that differ": len(differing),
        # A stop may skip a validation, and a resume does not repeat it.
        "validations missed": len(missing(wanted, place.losses, "validation")),
        "digest equal": "yes" if same else "NO",
        "oddities": len(outcome.odd),
    }
    print("\n" + "\n".join(f"{name:<22}{value:>8}" for name, value in results.items()))
    for line in [*outcome.broken, *outcome.odd, *differing[:10]]:
        print(f"! {line}")
    by_pair = {f"{kill_.victim} in {kill_.moment}": n for kill_, n in outcome.kills.items()}
    details = {"by who and when": by_pair, "broken": outcome.broken, "odd": outcome.odd}
    write_report(chosen, {**results, **details, "differing": differing})
    return same and not (differing or outcome.broken or outcome.odd)


def main() -> int:
    """Train without and with faults; compare."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--kills", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="no kill begins after these")
    parser.add_argument("--work", type=Path, help="folder for the runs; kept")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clean-up below runs
    chance = random.Random(chosen.seed)
    steps = STEPS_FOR_A_KILL * (chosen.kills + 1)
    mark = uuid.uuid4().hex[:12]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with site(folder, steps=steps, mark=mark, seed=chosen.seed) as place:
            try:
                say(f"{steps} steps undisturbed")
                start_seconds = train_undisturbed(place)
                chaos = Chaos(place, chance, start_seconds=start_seconds)
                until = time.monotonic() + chosen.minutes * 60
                chaos.run(deck(chosen.kills, chance), until=until)
            finally:
                kill(living(mark))
            right = report(place, chaos.outcome, chosen)
    return 0 if right else 3


if __name__ == "__main__":
    sys.exit(main())
