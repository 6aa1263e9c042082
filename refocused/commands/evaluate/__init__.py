"""`evaluate MODEL` and `evaluate VERB`: one function a verb."""
