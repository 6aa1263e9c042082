"""Token data: from files in a bucket to batches on a device."""
