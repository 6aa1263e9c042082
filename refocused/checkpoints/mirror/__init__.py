"""Copy a run's checkpoints to a bucket in the background."""
