"""`launch/checkpoints.py`: the checkpoints of a run, on the disk and in the bucket."""

from __future__ import annotations

from collections.abc import Sequence

from refocused.commands.verbs import run_verb

# Each verb, the module that holds it, and one line about it.
VERBS = {
    "list": ("checkpoints_inspect", "show every step, newest first"),
    "info": ("checkpoints_info", "show all that is known about one step"),
    "verify": ("checkpoints_verify", "compare steps with their manifests"),
    "prune": ("checkpoints_prune", "remove old steps from the disk, or from the bucket"),
    "compare": ("checkpoints_compare", "show how two steps differ"),
    "export": ("checkpoints_move", "write a step as a folder that transformers load"),
    "plot": ("checkpoints_plot", "draw the losses of a run"),
    "download": ("checkpoints_move", "fetch a step from the bucket, verified"),
    "upload": ("checkpoints_move", "complete in the bucket what a mirror did not"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the first argument names; return the exit code."""
    return run_verb("checkpoints", VERBS, argv)
