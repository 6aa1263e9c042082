"""Which window is trained on when; pure functions of manifest, seed and epoch."""
