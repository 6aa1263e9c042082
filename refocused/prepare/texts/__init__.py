"""Texts to shards: inputs, documents, tokenization and where its tasks run."""
