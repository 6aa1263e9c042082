"""Foundations of all packages: errors, logs, hardware, atomic files, locks, processes, ranks."""
