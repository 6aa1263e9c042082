"""The manifest of a data set: its shards, fingerprint, selection and mixture."""
