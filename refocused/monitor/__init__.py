"""Watching a run from outside: GPUs, machine, alarms, live screen, summary."""
