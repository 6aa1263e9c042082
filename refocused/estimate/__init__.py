"""What a run takes, by arithmetic alone: work, memory, hours, dollars."""
