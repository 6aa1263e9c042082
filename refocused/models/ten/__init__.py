"""The temporal eigenstates family."""
