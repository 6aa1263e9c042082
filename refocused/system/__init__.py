"""What every package stands on: errors, logs, hardware, atomic files, locks, processes, ranks."""
