"""One checkpoint: its files, atomic commit, verification and retention."""
