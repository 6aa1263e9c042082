"""`launch/evaluate.py`: measure a model by tasks and texts, on one rank or on many."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from refocused.commands.verbs import run_one, run_verb

COMPARE = ("evaluate_compare", "compare models by tasks, or by their speed")
SPECTRUM = ("evaluate_spectrum", "show and draw what a model without attention remembers, how long")
MODEL = ("evaluate_model", "measure a model by tasks and texts")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, or end the process when it was one of many ranks."""
    given = list(sys.argv[1:] if argv is None else argv)
    verbs = {"compare": COMPARE, "spectrum": SPECTRUM}
    if given and given[0] in verbs:
        code = run_verb("evaluate", verbs, given)
    else:
        code = run_one("evaluate", "evaluate", *MODEL, given=given)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads abort an ordinary end now and then; see commands/train.py
    return code
