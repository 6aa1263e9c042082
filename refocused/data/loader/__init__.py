"""From sequences to batches on the device."""
