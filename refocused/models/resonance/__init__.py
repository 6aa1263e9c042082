"""Resonance: a language model of damped resonators."""
