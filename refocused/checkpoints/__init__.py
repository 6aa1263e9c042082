"""Saved steps: written whole or not at all, listed, verified, mirrored to a bucket, thinned out."""
