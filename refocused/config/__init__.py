"""What a run may say, checked before anything starts."""
