"""Checks before a run: each part probes something and judges the result."""
