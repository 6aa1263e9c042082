"""Preparing data sets: tokenize, convert, inspect, verify, split, sync, upload."""
