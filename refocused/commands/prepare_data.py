"""`launch/prepare_data.py`: makes shards of text and of other people's token files, and more."""

from __future__ import annotations

from collections.abc import Sequence

from refocused.commands.verbs import run_verb

# Each verb, the module that holds it, and one line about it.
VERBS = {
    "tokenize": ("prepare_tokenize", "make shards of .txt, .jsonl(.gz) and .parquet files"),
    "convert": ("prepare_convert", "make shards of other people's token files"),
    "split": ("prepare_convert", "choose files for validation; copies nothing"),
    "inspect": ("prepare_inspect", "say what token files really hold"),
    "verify": ("prepare_verify", "compare files with their manifest, or read them"),
    "manifest": ("prepare_verify", "list the files with their tokens"),
    "recommend": ("prepare_recommend", "propose a model and a run for a data set"),
    "sync": ("prepare_transfer", "fetch a bucket's files to a folder, and go on after a kill"),
    "upload": ("prepare_transfer", "store a folder's files in a bucket, the manifest last"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the first argument names; return the exit code."""
    return run_verb("prepare_data", VERBS, argv)
