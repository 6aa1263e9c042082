"""From shards to batches: which window is trained on when, and how its tokens reach a rank."""
