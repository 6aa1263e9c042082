"""`prepare_data VERB`: one function a verb."""
