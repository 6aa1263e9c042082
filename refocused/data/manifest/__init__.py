"""What a data set holds: its shards, fingerprint, selection and mixture."""
