"""Which checkpoint a run resumes from, and where it comes from."""
