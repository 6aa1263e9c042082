"""What token files look like and how they are read."""
