"""Select, download and compare the checkpoint that a run resumes from."""
