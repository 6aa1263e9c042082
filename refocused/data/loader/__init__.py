"""From windows to batches on the device."""
