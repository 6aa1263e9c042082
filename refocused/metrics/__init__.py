"""What a run measures of itself, and the files and trackers that take it."""
