"""The loop and what it calls."""
