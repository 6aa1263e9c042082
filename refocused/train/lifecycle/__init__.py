"""Building, resuming, stopping and finishing a run."""
