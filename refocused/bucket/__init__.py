"""Object stores: one protocol for a Google Cloud Storage prefix and for a folder."""
