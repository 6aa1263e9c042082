"""The story of a run: build the parts, train, validate, save, stop."""
