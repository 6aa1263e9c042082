"""Formats of token files, and how they are read."""
