"""Object stores: one protocol over a Google Cloud Storage prefix and over a folder."""
