"""`speedrun`: from raw text to a model in one command."""
