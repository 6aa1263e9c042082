"""The copy of a run's checkpoints in a bucket."""
