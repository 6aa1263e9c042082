"""The live screen and the summary of a run."""
