"""What becomes of a checkpoint: scores, generation, exported models."""
