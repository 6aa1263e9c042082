"""TEN: a language model of temporal eigenstates."""
