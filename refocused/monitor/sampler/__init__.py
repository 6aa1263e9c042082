"""The process that samples GPUs and machine and raises alarms."""
