"""Token files: recognised, counted, fetched, and mapped in one local form."""
