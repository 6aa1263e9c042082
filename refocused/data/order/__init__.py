"""The order of training windows: pure functions of manifest, seed and epoch."""
