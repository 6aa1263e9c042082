"""What becomes of a saved step: its weights, a model to ask, an ordinary folder of files."""
