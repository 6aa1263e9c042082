"""The local shards: planned, fetched, verified and evicted."""
