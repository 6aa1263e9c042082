"""The order of training sequences: pure functions of manifest, seed and epoch."""
