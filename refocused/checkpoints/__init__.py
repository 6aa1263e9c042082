"""Checkpoints: commit, list, verify, mirror to a bucket, prune."""
