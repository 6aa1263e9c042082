"""The causal resonance family."""
