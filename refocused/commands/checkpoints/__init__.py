"""`checkpoints VERB`: one function a verb."""
