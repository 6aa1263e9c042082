"""What a run measures of itself and where it is written."""
