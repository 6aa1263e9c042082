"""What is looked at before money is spent: each part probes, then judges what it found."""
